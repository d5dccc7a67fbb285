"""The loss of supervised fine-tuning as a sum, so that any cut of a batch into chunks adds up to the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from train.attention import Attention
from train.model import Decoder

LOGITS_AT_ONCE = 2**24
"""Logits that exist at a time (64 MiB in float32): a chunk's tokens meet the vocabulary slice by slice."""

GPU_LOGITS_AT_ONCE = 2**27
"""The same on an accelerator (512 MiB): with a vocabulary of 128k some 1,000 tokens, or products would starve it."""


def logits_at_once_on(platform: str) -> int:
    """Returns how many logits may exist at a time on a device's platform."""
    return LOGITS_AT_ONCE if platform == "cpu" else GPU_LOGITS_AT_ONCE


class Sums(NamedTuple):
    """Sums over tokens; those of chunks and devices add up.

    Attributes:
        loss: Cross entropy in nats, each token's times its weight in the loss mask.
        tokens: Weights: the number of tokens that count.
        correct: Weights of the tokens that the model holds most likely.
    """

    loss: Any
    tokens: Any
    correct: Any


def targets(chunk: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns what each place of a chunk predicts, and how much that counts.

    Place t predicts token t + 1 if both are in one segment; it counts as the loss mask says of token t + 1.

    Args:
        chunk: Arrays [r, n].

    Returns:
        Target tokens int [r, n] and weights float32 [r, n], 0 where nothing is predicted.
    """

    def next_of(x: jax.Array) -> jax.Array:
        return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))

    segment_ids = chunk["tokens_segment_ids"]
    inside = (segment_ids > 0) & (segment_ids == next_of(segment_ids))
    return next_of(chunk["tokens"]), jnp.where(inside, next_of(chunk["loss_mask"]), 0)


def loss_sums(
    model: Decoder,
    chunk: Mapping[str, jax.Array],
    *,
    attention: Attention,
    dtype: jax.typing.DTypeLike,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> Sums:
    """Returns the sums over one chunk.

    Memory: at most about `logits_at_once` logits, forward and backward, whatever the chunk's size and the vocabulary.

    Args:
        model: The decoder, its parameters merged in.
        chunk: Arrays [r, n] as a layout makes them.
        attention: One of `train.attention`.
        dtype: Of the activations.
        logits_at_once: Upper bound of (tokens of a slice) * vocabulary; a slice has at least one token.
    """
    target, weight = targets(chunk)
    hidden = model(
        chunk["tokens"], chunk["tokens_positions"], chunk["tokens_segment_ids"], attention=attention, dtype=dtype
    )
    tokens = target.size
    slice_tokens = min(tokens, max(1, logits_at_once // model.config.vocab_size))
    slices = -(-tokens // slice_tokens)
    slice_tokens = -(-tokens // slices)  # slices of even size: less padding

    def cut(x: jax.Array) -> jax.Array:
        flat = x.reshape(tokens, *x.shape[2:])
        padded = jnp.pad(flat, ((0, slices * slice_tokens - tokens), *((0, 0),) * (flat.ndim - 1)))
        return padded.reshape(slices, slice_tokens, *flat.shape[1:])

    def add_slice(sums: Sums, part: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Sums, None]:
        return jax.tree.map(jnp.add, sums, _slice_sums(model, *part)), None

    parts = cut(hidden), cut(target), cut(weight)
    if slices == 1:
        return _slice_sums(model, *(part[0] for part in parts))
    zero = jnp.zeros((), jnp.promote_types(dtype, jnp.float32))
    sums, _ = jax.lax.scan(jax.checkpoint(add_slice, prevent_cse=False), Sums(zero, zero, zero), parts)
    return sums


def _slice_sums(model: Decoder, hidden: jax.Array, target: jax.Array, weight: jax.Array) -> Sums:
    logits = model.logits(hidden)
    # A comparison instead of a gather: it fuses into the sum, and its gradient is no scatter.
    is_target = jnp.arange(logits.shape[-1]) == target[:, None]
    of_target = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    loss = jax.nn.logsumexp(logits, axis=-1) - of_target
    best = of_target >= jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    weight = weight.astype(logits.dtype)
    return Sums(loss=jnp.sum(loss * weight), tokens=jnp.sum(weight), correct=jnp.sum(best * weight))
