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
"""Queries that the CPU path takes at once: small enough that a block's scores stay in cache."""


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
    length = segment_ids.shape[1]
    blocks = []
    for start in range(0, length, QUERY_BLOCK_TOKENS):
        stop = min(start + QUERY_BLOCK_TOKENS, length)
        causal = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
        mask = (segment_ids[:, start:stop, None] == segment_ids[:, None, :stop]) & causal
        blocks.append(_scores_again(query[:, start:stop], key[:, :stop], value[:, :stop], mask[:, None]))
    return jnp.concatenate(blocks, axis=1)


@jax.checkpoint
def _scores_again(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="xla")


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
