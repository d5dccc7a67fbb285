"""Rotary positions: heads turn by angles that grow with a token's place, so that scores depend on distances.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. The pairs (i, i + head_dim / 2) turn
together, as in the weights that Hugging Face publishes; other layouts interleave them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

Array = TypeVar("Array", jax.Array, npt.NDArray[np.float64])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 and later stretch the slow frequencies, to reach past the length of their first training.

    A frequency that turns more than `high_freq_factor` times within `original_tokens` stays, one that turns less than
    `low_freq_factor` times is divided by `factor`; in between the divisor changes linearly with the number of turns.

    Attributes:
        factor: Divisor of the slowest frequencies.
        low_freq_factor: Turns below which `factor` applies in full.
        high_freq_factor: Turns above which it does not apply.
        original_tokens: Length of the first training.

    Raises:
        ValueError: If a value is out of range.

    >>> RopeScaling(factor=8.0).multiplier(np.array([1.0, 1e-4])).tolist()
    [1.0, 0.125]
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_tokens: int = 8192

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and 0 < self.low_freq_factor < self.high_freq_factor and self.original_tokens >= 1):
            raise ValueError(
                "RoPE scaling needs factor of at least 1, 0 < low_freq_factor < high_freq_factor and original_tokens "
                f"of at least 1, got {self}"
            )

    def multiplier(self, frequencies: Array) -> Array:
        """Returns what each frequency, in radians a token, is multiplied by."""
        turns = self.original_tokens * frequencies / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clip(0, 1)
        return (1 - kept) / self.factor + kept


def rotary(
    positions: jax.Array, head_dim: int, base: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine [r, n, 1, head_dim / 2] of the angles position * base**(-2 i / head_dim).

    Args:
        positions: int [r, n].
        head_dim: Width of a head, even.
        base: Of the frequencies.
        scaling: Changes the frequencies, if given.
    """
    frequencies = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        frequencies *= scaling.multiplier(frequencies)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Turns heads [r, n, heads, head_dim] by their positions' angles."""
    first, second = jnp.split(x.astype(jnp.promote_types(x.dtype, jnp.float32)), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)
