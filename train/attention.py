"""Attention inside segments, chosen by backend in one place.

Every path computes the same: a token attends to itself and to what precedes it in its own segment. Padding (segment 0)
is a segment like another, so no softmax is ever empty; nothing reads its output. docs/attention.md says what was
weighed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""(query [r, n, heads, d], key [r, n, kv_heads, d], value like key, segment_ids [r, n]) -> like query."""

AttentionName = Literal["auto", "masked", "blockwise", "cudnn", "cudnn-masked", "pallas"]

QUERY_BLOCK_TOKENS = 128
"""Fewest queries that the CPU path takes at once: so many that matrix products pay."""

MAX_QUERY_BLOCKS = 8
"""Most blocks of a row: each is compiled by itself, and more save little (1/2 + 1/16 of all scores are computed)."""


def attention_for(platform: str, *, one_record_rows: bool = False, name: AttentionName = "auto") -> Attention:
    """Returns the attention for a device's platform.

    Args:
        platform: "cpu", "gpu", ...: `device.platform`.
        one_record_rows: Whether no row ever holds two records (bucketed and padded layouts), each from the row's
            start. Kernels that know sequence lengths, but no segments, can serve such rows.
        name: A path, or `auto` for the fastest one that the rows allow.

    Raises:
        ValueError: If the path is unknown, or serves neither the platform nor the rows.

    >>> attention_for("cpu") is blockwise_attention
    True
    """
    if name == "auto":
        if platform == "cpu":
            return blockwise_attention
        if platform == "gpu":
            return cudnn_attention if one_record_rows else packed_gpu_attention
        return masked_attention
    if name == "masked":
        return masked_attention
    if name == "blockwise":
        return blockwise_attention
    if name == "pallas":
        # On a CPU the kernel is interpreted: for tests.
        return functools.partial(pallas_attention, interpret=platform == "cpu")
    if name in ("cudnn", "cudnn-masked"):
        if platform != "gpu":
            raise ValueError(f"attention {name!r} needs a GPU, and the platform is {platform!r}: pass 'auto'")
        if name == "cudnn-masked":
            return cudnn_masked_attention
        if not one_record_rows:
            raise ValueError(
                "attention 'cudnn' knows a row's length, but no segments: rows of several records would see each "
                "other. Pass 'auto', or a layout of one record a row"
            )
        return cudnn_attention
    raise ValueError(f"unknown attention {name!r}: pass auto, masked, blockwise, cudnn, cudnn-masked or pallas")


def masked_attention(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Computes all scores [r, heads, n, n] and masks them. See `Attention` for the shapes."""
    length = segment_ids.shape[1]
    causal = jnp.arange(length)[:, None] >= jnp.arange(length)
    mask = (segment_ids[:, :, None] == segment_ids[:, None, :]) & causal
    return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None], implementation="xla")


def blockwise_attention(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Computes the scores of one block of queries after the other, against the keys up to the block's end only.

    The scores of the upper half are never computed (n/2 + block/2 keys a query instead of n), and the backward pass
    computes a block's scores again instead of reading them back from memory. See `Attention` for the shapes.
    """
    rows, length, heads, head_dim = query.shape
    groups = heads // key.shape[2]
    # Heads lead, so that scores are plain batched matrix products; the query heads of one key head stay together.
    query = jnp.moveaxis(query.reshape(rows, length, -1, groups, head_dim), 1, 3) * head_dim**-0.5
    key, value = jnp.moveaxis(key, 1, 2), jnp.moveaxis(value, 1, 2)
    block = max(QUERY_BLOCK_TOKENS, -(-length // MAX_QUERY_BLOCKS))
    blocks = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        causal = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
        mask = (segment_ids[:, start:stop, None] == segment_ids[:, None, :stop]) & causal
        blocks.append(_block(query[..., start:stop, :], key[:, :, :stop], value[:, :, :stop], mask))
    mixed = jnp.concatenate(blocks, axis=3)
    return jnp.moveaxis(mixed, 3, 1).reshape(rows, length, heads, head_dim)


@jax.checkpoint
def _block(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """[r, kv_heads, groups, b, d], [r, kv_heads, s, d] twice, [r, b, s] -> like query."""
    # Groups and queries as one axis: XLA's CPU products with two free axes are several times slower.
    flat = query.reshape(*query.shape[:2], -1, query.shape[-1])
    scores = jnp.einsum("rkqd,rksd->rkqs", flat, key).reshape(*query.shape[:-1], -1)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    # The softmax's division comes last, over head_dim values a query instead of one a score.
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    mixed = jnp.einsum("rkqs,rksd->rkqd", weights.reshape(*flat.shape[:-1], -1), value)
    return mixed.reshape(query.shape) / jnp.sum(weights, axis=-1, keepdims=True)


def cudnn_attention(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Runs cuDNN's fused kernel on rows of one record each: its cost follows the record's length, not the row's.

    Needs bfloat16 or float16, and a head_dim that is a multiple of 8, at most 256 (128 before Hopper). See `Attention`
    for the shapes.
    """
    inside = segment_ids > 0
    # cuDNN may return NaN for a row of length 0: a row of padding counts its first token.
    lengths = jnp.maximum(jnp.sum(inside, axis=1), 1).astype(jnp.int32)
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    # What it leaves beyond a length is nowhere promised, and a NaN times a weight of 0 is still one.
    return jnp.where(inside[:, :, None, None], mixed, 0)


def cudnn_masked_attention(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Runs cuDNN's fused kernel with segments as a mask [r, 1, n, n], read as a bias; the upper half is skipped.

    Needs what `cudnn_attention` does, and an even row length. Up to JAX 0.10.2 the backward pass also writes a gradient
    of the mask, [r, heads, n, n], that nobody reads. See `Attention` for the shapes.
    """
    mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True, implementation="cudnn")


PALLAS_BLOCK_TOKENS = 128
"""Row lengths that `pallas_attention` takes are multiples of it."""


def pallas_takes(length: int, head_dim: int) -> bool:
    """Returns whether `pallas_attention` serves rows of this length and heads of this width.

    >>> pallas_takes(2048, 64), pallas_takes(2000, 64)
    (True, False)
    """
    return length % PALLAS_BLOCK_TOKENS == 0 and 16 <= head_dim <= 128


def pallas_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Runs JAX's Pallas kernel for GPUs: scores stay on the chip, the upper half is skipped, other segments are not.

    Keys and values are repeated for the query heads that share them. See `Attention` for the shapes.

    Args:
        query: See `Attention`.
        key: See `Attention`.
        value: See `Attention`.
        segment_ids: See `Attention`.
        interpret: Runs the kernel block by block in plain JAX, on any platform.

    Raises:
        ValueError: If `pallas_takes` says no.
    """
    # Pallas for GPUs takes a while to import, and other platforms don't need it.
    from jax.experimental.pallas.ops.gpu.attention import mha

    _, length, heads, head_dim = query.shape
    if not pallas_takes(length, head_dim):
        raise ValueError(
            f"attention 'pallas' takes rows of a multiple of {PALLAS_BLOCK_TOKENS} tokens and heads of 16 to 128, got "
            f"rows of {length} and heads of {head_dim}: change the layout's length, or pass attention 'auto'"
        )
    groups = heads // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    return mha(query, key, value, segment_ids, sm_scale=head_dim**-0.5, causal=True, interpret=interpret)


def packed_gpu_attention(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Runs `pallas_attention` on shapes that it takes, `masked_attention` on others. See `Attention` for the shapes."""
    path = pallas_attention if pallas_takes(query.shape[1], query.shape[3]) else masked_attention
    return path(query, key, value, segment_ids)
