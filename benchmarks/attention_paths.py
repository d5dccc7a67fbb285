"""Attention paths against a float32 reference: values, gradients, padding, segments, time. Used by `benchmarks.gpu`."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from train.attention import Attention, AttentionName, attention_for, masked_attention

Array = npt.NDArray[Any]

PATHS: tuple[AttentionName, ...] = ("masked", "blockwise", "pallas", "cudnn-masked", "cudnn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes of one comparison.

    Attributes:
        rows: Rows; the last one is all padding.
        length: Tokens in a row.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        one_record_rows: Whether a row holds one record, from its start, or several; each ends in padding.
    """

    rows: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    one_record_rows: bool

    @property
    def name(self) -> str:
        """Its name in the results."""
        kind = "one record" if self.one_record_rows else "packed"
        return f"{kind}, {self.rows} x {self.length}, heads {self.heads}/{self.kv_heads} x {self.head_dim}"

    @property
    def segment_ids(self) -> Array:
        """int32 [rows, length]."""
        ids = np.zeros((self.rows, self.length), np.int32)
        for row in range(self.rows - 1):
            used = self.length - self.length // 16 * (row + 1) - row
            cuts = [0, used] if self.one_record_rows else [0, used // 7, used // 2, used - used // 5, used]
            for segment, (start, stop) in enumerate(itertools.pairwise(cuts), start=1):
                ids[row, start:stop] = segment
        return ids

    def inputs(self, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns query, key, value and what the output is weighted with, all random."""
        rng = np.random.default_rng(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        arrays = (rng.normal(size=(self.rows, self.length, h, self.head_dim)) for h in heads)
        # Rounded once: the reference gets the same numbers.
        query, key, value, weights = (jnp.asarray(x, dtype) for x in arrays)
        return query, key, value, weights * (jnp.asarray(self.segment_ids) > 0)[:, :, None, None]


def candidates(platform: str, *, one_record_rows: bool) -> Iterator[tuple[str, Callable[[], Attention]]]:
    """Yields (name, maker) of every path that may serve the rows; a maker raises where it can't."""
    for name in PATHS:
        if name == "cudnn" and not one_record_rows:
            continue
        yield name, lambda name=name: attention_for(platform, one_record_rows=one_record_rows, name=name)  # type: ignore[misc]
    for implementation in ("mosaic", "triton"):
        yield f"tokamax {implementation}", lambda implementation=implementation: _tokamax(implementation)  # type: ignore[misc]


def _tokamax(implementation: str) -> Attention:
    """Tokamax's kernel with segments as a boolean mask, where it is installed."""
    tokamax = importlib.import_module("tokamax")

    def attention(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array) -> jax.Array:
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        mixed: jax.Array = tokamax.dot_product_attention(
            query, key, value, mask=mask, is_causal=True, implementation=implementation
        )
        return mixed

    return attention


def _program(case: Case, attention: Attention, weights: jax.Array) -> Any:
    segment_ids = jnp.asarray(case.segment_ids)

    def weighted(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        mixed = attention(query, key, value, segment_ids)
        return jnp.sum((mixed * weights).astype(jnp.float32)), mixed

    return jax.jit(jax.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True))


def reference(case: Case, dtype: Any) -> tuple[Array, list[Array]]:
    """Returns values and gradients of the dense mask in float32, of inputs that were rounded to `dtype`."""
    *inputs, weights = (x.astype(jnp.float32) for x in case.inputs(dtype))
    with jax.default_matmul_precision("highest"):
        (_, values), grads = _program(case, masked_attention, weights)(*inputs)
    return np.asarray(values), [np.asarray(grad) for grad in grads]


def compare(
    case: Case, attention: Attention, want: tuple[Array, list[Array]], *, dtype: Any, repeats: int
) -> dict[str, Any]:
    """Returns errors, times and memory of one path.

    Errors are norms of differences / norms, over tokens of records. `finite` covers padding too. `segment_leak` is the
    largest change of an output when another segment's keys and values change; it must be 0.

    Args:
        case: The shapes.
        attention: The path.
        want: From `reference`.
        dtype: Of the inputs.
        repeats: Measurements of each time.
    """
    segment_ids = jnp.asarray(case.segment_ids)
    *inputs, weights = case.inputs(dtype)
    backward = _program(case, attention, weights).lower(*inputs).compile()
    forward = jax.jit(lambda q, k, v: attention(q, k, v, segment_ids)).lower(*inputs).compile()
    (_, mixed), grads = backward(*inputs)
    inside = np.asarray(segment_ids) > 0
    figures: dict[str, Any] = {
        "forward_error": _error(np.asarray(mixed, np.float32)[inside], want[0][inside]),
        "gradient_errors": [_error(np.asarray(g, np.float32), w) for g, w in zip(grads, want[1], strict=True)],
        "finite": all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in (mixed, *grads)),
    }
    if not case.one_record_rows:
        first = (segment_ids == 1)[:, :, None, None]
        query, key, value = inputs
        changed = forward(query, jnp.where(first, key + 1, key), jnp.where(first, value - 1, value))
        others = np.asarray(segment_ids) > 1
        difference = np.asarray(changed, np.float32)[others] - np.asarray(forward(*inputs), np.float32)[others]
        figures["segment_leak"] = float(np.abs(difference).max())
    figures["forward_seconds"] = _seconds(forward, inputs, repeats)
    figures["forward_backward_seconds"] = _seconds(backward, inputs, repeats)
    memory = backward.memory_analysis()
    figures["temporary_mib"] = round(memory.temp_size_in_bytes / 2**20, 1) if memory is not None else None
    return figures


def _error(got: Array, want: Array) -> float:
    difference, size = np.linalg.norm(got.astype(np.float64) - want), np.linalg.norm(want.astype(np.float64))
    return float(difference / size) if size else float(difference)


def _seconds(program: Any, inputs: list[jax.Array], repeats: int) -> float:
    """Median of synchronised runs, after one that does not count."""
    taken = []
    for _ in range(repeats + 1):
        begin = time.monotonic()
        jax.block_until_ready(program(*inputs))  # type: ignore[no-untyped-call]
        taken.append(time.monotonic() - begin)
    return statistics.median(taken[1:])


def lower_for_gpu(case: Case, attention: Attention) -> int:
    """Lowers forward and backward for CUDA, on whatever machine; returns the size of the text."""
    rows = (case.rows, case.length)
    query, key, value = (
        jax.ShapeDtypeStruct((*rows, heads, case.head_dim), jnp.bfloat16)  # type: ignore[no-untyped-call]
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    segment_ids = jax.ShapeDtypeStruct(rows, jnp.int32)  # type: ignore[no-untyped-call]

    def total(query: Any, key: Any, value: Any, segment_ids: Any) -> jax.Array:
        return jnp.sum(attention(query, key, value, segment_ids).astype(jnp.float32))

    traced = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(query, key, value, segment_ids)
    return len(traced.lower(lowering_platforms=("cuda",)).as_text())
