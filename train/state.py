"""What training changes (parameters, optimizer state), and the optimizer that changes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from train.model import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """A pytree. The update program donates it: after a step only the new one may be used.

    Attributes:
        step: int32 [], updates done.
        params: What is trained: all parameters of the model (see `train.model.Params`), or its adapters.
        opt_state: Optax's.
    """

    step: Any
    params: Params
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optax transformation with its learning-rate schedule, which the metrics report.

    Attributes:
        transform: Gradients to updates, the learning rate included.
        schedule: Updates done -> learning rate.
    """

    transform: Any
    schedule: Any


def make_optimizer(
    *,
    total_steps: int,
    learning_rate: float = 1e-3,
    warmup_steps: int = 0,
    final_share: float = 0.1,
    weight_decay: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    max_grad_norm: float = 1.0,
) -> Optimizer:
    """Returns AdamW with linear warm-up, cosine decay and clipping of the gradient's norm.

    Args:
        total_steps: Updates of the job; then the learning rate stays at its end.
        learning_rate: Its peak.
        warmup_steps: Updates until the peak; the first is made at `learning_rate / warmup_steps`, not at 0.
        final_share: Last learning rate as a share of the peak.
        weight_decay: For matrices; norm scales and biases do not decay.
        b1: Decay of the gradient's running mean.
        b2: Decay of its running square.
        eps: Added to the root of the latter.
        max_grad_norm: Gradients of a larger norm are scaled down to it.

    Raises:
        ValueError: If a value is out of range.

    >>> schedule = make_optimizer(total_steps=100, learning_rate=1.0, warmup_steps=10).schedule
    >>> [round(float(schedule(step)), 3) for step in (0, 10, 100)]
    [0.1, 1.0, 0.1]
    """
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"optimizer.warmup_steps must be at least 0 and below the run's {total_steps} steps, got {warmup_steps}: "
            "set it lower, or make more steps"
        )
    if not (learning_rate > 0 and max_grad_norm > 0):
        raise ValueError(f"learning_rate and max_grad_norm must be positive, got {learning_rate!r}, {max_grad_norm!r}")
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=learning_rate / max(warmup_steps, 1),
        peak_value=learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=total_steps,
        end_value=final_share * learning_rate,
    )
    adamw = optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=_is_matrix)
    return Optimizer(transform=optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw), schedule=schedule)


def new_state(params: Params, optimizer: Optimizer) -> TrainState:
    """Returns the state before the first update. Pure: jit it, with the shardings that it shall have."""
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.transform.init(params))


def _is_matrix(params: Params) -> Any:
    # Not by rank: the norms' scales and the biases are stacked over layers.
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("scale", "bias"), params)
