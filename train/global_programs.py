"""What all devices of all processes compute together: the update, the totals, and the step in one program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.state import Optimizer, TrainState

Metrics = dict[str, jax.Array]


def total(stacked: Any) -> Metrics:
    """Returns the means over all devices; `stacked` is a `Sums` with a leading axis."""
    sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), stacked)
    tokens = _nonzero(sums.tokens)
    return {"loss": sums.loss / tokens, "tokens": sums.tokens, "accuracy": sums.correct / tokens}


def update_function(
    optimizer: Optimizer, expected_tokens: float | None, grad_shardings: Any = None
) -> Callable[[TrainState, Any, jax.Array], tuple[TrainState, Metrics]]:
    """Returns (state, stacked accumulators, notes) -> (state, metrics); the metrics hold the notes of all devices.

    Args:
        optimizer: Gradients to updates.
        expected_tokens: Constant denominator; None for the step's own number of tokens.
        grad_shardings: How summed gradients lie on the mesh: like the optimizer's state, if that is cut up.
    """

    def update(state: TrainState, stacked: Any, notes: jax.Array) -> tuple[TrainState, Metrics]:
        metrics = total(stacked.sums)
        denominator = _nonzero(metrics["tokens"]) if expected_tokens is None else expected_tokens
        grads = jax.tree.map(lambda x: jnp.sum(x, axis=0) / denominator, stacked.grads)
        if grad_shardings is not None:
            grads = jax.lax.with_sharding_constraint(grads, grad_shardings)  # type: ignore[no-untyped-call]
        updates, opt_state = optimizer.transform.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics |= {
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": optimizer.schedule(state.step),
            "notes": notes,
        }
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

    return update


def spmd_function(
    mesh: Mesh, zeros: Callable[[], tuple[Any, Any]], accumulate: Callable[..., Any], update: Callable[..., Any]
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Returns the whole step as one function: (state, frozen, chunks, notes) -> (state, metrics).

    Chunks are arrays [packs of a device, devices * rows, length], cut along their second axis. Each device runs its own
    one after the other, as in the decoupled step, then all add up.
    """

    def local(params: Any, frozen: Any, chunks: Mapping[str, jax.Array]) -> Any:
        def one(accumulator: Any, chunk: Mapping[str, jax.Array]) -> tuple[Any, None]:
            return accumulate(accumulator, params, frozen, chunk), None

        accumulator, _ = jax.lax.scan(one, zeros()[0], chunks)
        return jax.lax.psum(accumulator, "data")  # type: ignore[no-untyped-call]

    spec = PartitionSpec
    # Not checked, so that a gradient with respect to the parameters, which all devices share, stays each device's own.
    everywhere, by_rows = spec(), spec(None, "data")  # type: ignore[no-untyped-call]
    add_up = jax.shard_map(
        local, mesh=mesh, in_specs=(everywhere, everywhere, by_rows), out_specs=everywhere, check_vma=False
    )

    def step(state: TrainState, frozen: Any, chunks: Mapping[str, jax.Array], notes: jax.Array) -> Any:
        return update(state, add_up(state.params, frozen, chunks), notes)

    return step


def cut_axis(shape: tuple[int, ...], pieces: int) -> int | None:
    """Returns the axis along which an array is cut into even pieces, its longest that allows it; None for no such axis.

    >>> cut_axis((2, 6, 4), 2), cut_axis((3, 5), 2)
    (1, None)
    """
    axes = [axis for axis, size in enumerate(shape) if size and size % pieces == 0]
    return max(axes, key=lambda axis: shape[axis], default=None)


def cut_up(tree: Any, mesh: Mesh) -> Any:
    """Returns shardings that divide each array among the devices along its longest axis that they divide evenly.

    What has no such axis is copied to all: scalars, and small arrays of odd sizes.
    """

    def of(x: Any) -> NamedSharding:
        axis = cut_axis(x.shape, mesh.size)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "data")  # type: ignore[no-untyped-call]
        return NamedSharding(mesh, spec)

    return jax.tree.map(of, tree)


def _nonzero(tokens: jax.Array) -> jax.Array:
    return jnp.where(tokens > 0, tokens, 1)
