"""The attention kernels that run on a CPU, and how far two results are apart."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from train.attention import attention_for, blockwise_attention, masked_attention

ATTENTIONS = {"masked": masked_attention, "blockwise": blockwise_attention}
PALLAS = attention_for("cpu", name="pallas")  # interpreted


def relative_difference(a: Any, b: Any) -> float:
    """Norm of the difference over the norm, of whole pytrees."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    difference = sum(float(np.sum(np.subtract(x, y, dtype=np.float64) ** 2)) for x, y in pairs)
    norm = sum(float(np.sum(np.asarray(y, np.float64) ** 2)) for _, y in pairs)
    return float(np.sqrt(difference / norm))
