"""LoRA: the model's matrices stay as they are, small factors beside them are trained.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. A projection with matrix W becomes

    y = x W + (alpha / rank) (x A) B        A [inputs, rank] random, B [rank, outputs] zero at the start

so that training starts from the model as it is. The factors stand in the parameters' pytree as leaves beside "kernel".
`split_params` takes the two kinds apart: the optimizer, the gradient accumulator and the checkpoints then hold
the factors alone, and no gradient of W is ever computed. W is kept in bfloat16, half of what training it takes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")
"""The matrices of a layer that may have an adapter, by their names in `train.model`."""

FROZEN_DTYPE = jnp.dtype(jnp.bfloat16)
"""Type of the parameters that are not trained."""

_FACTORS = ("lora_a", "lora_b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Which projections have an adapter, and of what size.

    Attributes:
        rank: Columns of A and rows of B.
        alpha: Weight of the adapter: its output is multiplied by alpha / rank.
        targets: Among `PROJECTIONS`.

    Raises:
        ValueError: If a value is out of range.

    >>> LoraConfig(targets=("query", "lm_head"))
    Traceback (most recent call last):
    ...
    ValueError: LoRA targets must be among ('query', 'key', ...), got 'lm_head'
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = PROJECTIONS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"LoRA rank must be at least 1, got {self.rank!r}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"LoRA alpha must be positive, got {self.alpha!r}")
        if not self.targets or len(set(self.targets)) != len(self.targets):
            raise ValueError(f"LoRA targets must name at least one of {PROJECTIONS}, each once, got {self.targets!r}")
        for target in self.targets:
            if target not in PROJECTIONS:
                raise ValueError(f"LoRA targets must be among {PROJECTIONS}, got {target!r}")

    @property
    def scale(self) -> float:
        """What the adapter's output is multiplied by."""
        return self.alpha / self.rank


def split_params(params: Any) -> tuple[Any, Any]:
    """Returns what is trained and what is frozen; None for the latter if there are no adapters.

    >>> params = {"norm": 1, "query": {"kernel": 2, "lora_a": 3, "lora_b": 4}}
    >>> split_params(params)
    ({'query': {'lora_a': 3, 'lora_b': 4}}, {'norm': 1, 'query': {'kernel': 2}})
    >>> split_params({"norm": 1})
    ({'norm': 1}, None)
    """
    trained = _filter(params, keep_factors=True)
    return (trained, _filter(params, keep_factors=False)) if trained else (params, None)


def join_params(trained: Any, frozen: Any) -> Any:
    """Undoes `split_params`.

    >>> join_params({"query": {"lora_a": 3}}, {"norm": 1, "query": {"kernel": 2}})
    {'norm': 1, 'query': {'kernel': 2, 'lora_a': 3}}
    """
    if frozen is None:
        return trained
    joined = dict(frozen)
    for name, value in trained.items():
        joined[name] = join_params(value, frozen[name]) if isinstance(value, dict) and name in frozen else value
    return joined


def merge_adapters(params: Any, scale: float) -> Any:
    """Returns parameters without adapters that compute the same: W + scale A B, in float32.

    Args:
        params: Parameters with adapters, or a part of them; matrices may be stacked along leading axes.
        scale: `LoraConfig.scale`.
    """
    if not isinstance(params, dict):
        return params
    if _FACTORS[0] not in params:
        return {name: merge_adapters(value, scale) for name, value in params.items()}
    a, b = (jnp.asarray(params[name], jnp.float32) for name in _FACTORS)
    product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    kernel = jnp.asarray(params["kernel"], jnp.float32) + scale * product
    return {**{name: value for name, value in params.items() if name not in _FACTORS}, "kernel": kernel}


def _filter(params: Any, *, keep_factors: bool) -> Any:
    """Returns the leaves that are factors, or those that are not, without the empty branches."""
    kept = {}
    for name, value in params.items():
        if isinstance(value, dict):
            branch = _filter(value, keep_factors=keep_factors)
            if branch:
                kept[name] = branch
        elif (name in _FACTORS) == keep_factors:
            kept[name] = value
    return kept
