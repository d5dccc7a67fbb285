"""Attention inside segments, chosen by backend in one place.

Every path computes the same: a token attends to itself and to what precedes it in its own segment. Padding (segment 0)
is a segment like another, so no softmax is ever empty; nothing reads its output.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""(query [r, n, heads, d], key [r, n, kv_heads, d], value like key, segment_ids [r, n]) -> like query."""

QUERY_BLOCK_TOKENS = 128
"""Fewest queries that the CPU path takes at once: so many that matrix products pay."""

MAX_QUERY_BLOCKS = 8
"""Most blocks of a row: each is compiled by itself, and more save little (1/2 + 1/16 of all scores are computed)."""


def attention_for(platform: str, *, one_record_rows: bool = False) -> Attention:
    """Returns the attention for a device's platform.

    Args:
        platform: "cpu", "gpu", ...: `device.platform`.
        one_record_rows: Whether no row ever holds two records (bucketed and padded layouts), each from the row's
            start. Kernels that know sequence lengths, but no segments, can serve such rows.
    """
    if platform == "gpu" and one_record_rows:
        return cudnn_attention
    if platform == "cpu":
        return blockwise_attention
    # Packed rows on an accelerator: no public kernel takes segment ids; rows are short enough for a dense mask.
    return masked_attention


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

    Needs bfloat16 or float16. See `Attention` for the shapes.
    """
    # cuDNN may return NaN for a row of length 0: a row of padding counts its first token.
    lengths = jnp.maximum(jnp.sum(segment_ids > 0, axis=1), 1).astype(jnp.int32)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
