"""Greedy generation with a cache of keys and values, compiled once for a shape.

Prompts of different lengths share a batch: each is written from the row's start, the cache's places behind it hold
padding until generated tokens take them over, one after the other, before any query looks at them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import SingleDeviceSharding

from train.attention import attention_for
from train.model import Decoder, ModelConfig, Params, compute_dtype, graphdef

IntArray = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class Generator:
    """A compiled program that continues prompts; made by `compile_generator`.

    Attributes:
        program: (params, tokens, lengths) -> tokens.
        device: Where it runs.
        batch: Prompts of one call, at most.
        prompt_tokens: Tokens of a prompt, at most.
        new_tokens: Tokens that are written, at most.
        eos_ids: Each of these ends the answer.
    """

    program: jax.stages.Compiled
    device: jax.Device
    batch: int
    prompt_tokens: int
    new_tokens: int
    eos_ids: tuple[int, ...]

    def __call__(self, params: Params, prompts: Sequence[npt.ArrayLike]) -> list[IntArray]:
        """Continues prompts, each token being the most likely one.

        Args:
            params: Of the types that the program was compiled for, on its device or on all.
            prompts: Ids [n] of each, 1 <= n <= `prompt_tokens`.

        Returns:
            The ids that were written, for each prompt; the end token is the last of them where it was reached.

        Raises:
            ValueError: If there are too many prompts, or one is empty or too long.
        """
        if not len(prompts) <= self.batch:
            raise ValueError(
                f"got {len(prompts)} prompts, compiled for {self.batch} at a time: call again for the rest"
            )
        tokens = np.zeros((self.batch, self.prompt_tokens), np.int32)
        lengths = np.zeros(self.batch, np.int32)
        for i, prompt in enumerate(prompts):
            ids = np.asarray(prompt, np.int32)
            if ids.ndim != 1 or not 1 <= len(ids) <= self.prompt_tokens:
                raise ValueError(
                    f"prompt {i} has shape {ids.shape}, want 1 to {self.prompt_tokens} tokens: shorten it, or compile "
                    "for longer ones"
                )
            tokens[i, : len(ids)], lengths[i] = ids, len(ids)
        here = jax.tree.map(lambda x: _on_device(x, self.device), params)
        written = np.asarray(self.program(here, tokens, lengths))
        return [self._cut(row) for row in written[: len(prompts)]]

    def _cut(self, row: IntArray) -> IntArray:
        ends = np.flatnonzero(np.isin(row, self.eos_ids))
        return row[: ends[0] + 1] if len(ends) else row


def compile_generator(
    config: ModelConfig,
    params: Params,
    *,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    eos_ids: Sequence[int],
    device: jax.Device | None = None,
) -> Generator:
    """Compiles the generation of `new_tokens` after prompts of at most `prompt_tokens`.

    Memory: the cache has 2 * layers * batch * (prompt_tokens + new_tokens) * kv_heads * head_dim activations.

    Args:
        config: The model.
        params: Its parameters, adapters included, or their shapes and types.
        batch: Prompts of one call.
        prompt_tokens: Longest prompt.
        new_tokens: Longest answer.
        eos_ids: Tokens that end an answer; there may be several, and none.
        device: Where it runs; default: the first local one.

    Raises:
        ValueError: If a size is below 1.
    """
    for name, value in (("batch", batch), ("prompt_tokens", prompt_tokens), ("new_tokens", new_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value!r}")
    device = jax.local_devices()[0] if device is None else device
    here = SingleDeviceSharding(device)
    graph = graphdef(config)

    def run(params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        return _generate(nnx.merge(graph, params), tokens, lengths, new_tokens, tuple(eos_ids), device.platform)

    def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)  # type: ignore[no-untyped-call]

    program = (
        jax.jit(run)
        .lower(
            jax.tree.map(lambda x: abstract(x.shape, x.dtype), params),
            abstract((batch, prompt_tokens), np.int32),
            abstract((batch,), np.int32),
        )
        .compile()
    )
    return Generator(program, device, batch, prompt_tokens, new_tokens, tuple(eos_ids))


class _Cache(NamedTuple):
    """Keys and values [layers, batch, places, kv_heads, head_dim]."""

    keys: jax.Array
    values: jax.Array


def _generate(
    model: Decoder, tokens: jax.Array, lengths: jax.Array, new_tokens: int, eos_ids: tuple[int, ...], platform: str
) -> jax.Array:
    """Returns what follows the prompts, [batch, new_tokens]; 0 behind an end token. A row of length 0 has no prompt."""

    def ends(token: jax.Array) -> jax.Array:
        return jnp.isin(token, jnp.asarray(eos_ids, jnp.int32))

    absent, lengths = lengths == 0, jnp.maximum(lengths, 1)
    hidden, cache = _read_prompts(model, tokens, lengths, new_tokens, platform)
    first = jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32)
    written = jnp.zeros((len(tokens), new_tokens), jnp.int32).at[:, 0].set(first)

    def unfinished(state: tuple[Any, ...]) -> jax.Array:
        count, done, _, _ = state
        return (count < new_tokens) & ~jnp.all(done)

    def write_one(state: tuple[Any, ...]) -> tuple[Any, ...]:
        count, done, written, cache = state
        hidden, cache = _read_one(model, written[:, count - 1], lengths + count - 1, cache)
        token = jnp.where(done, 0, jnp.argmax(model.logits(hidden), axis=-1)).astype(jnp.int32)
        return count + 1, done | ends(token), written.at[:, count].set(token), cache

    start = jnp.ones((), jnp.int32), absent | ends(first), written, cache
    _, _, written, _ = jax.lax.while_loop(unfinished, write_one, start)
    return written


def _read_prompts(
    model: Decoder, tokens: jax.Array, lengths: jax.Array, new_tokens: int, platform: str
) -> tuple[jax.Array, _Cache]:
    """Returns the hidden state [batch, width] at each prompt's end, and the cache with room for `new_tokens`."""
    batch, places = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(places), (batch, places))
    segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
    rotation = model.rotation(positions)
    attention = attention_for(platform, one_record_rows=True)
    graph, layers = nnx.split(model.layers)

    def run_layer(x: jax.Array, params: Any) -> tuple[jax.Array, _Cache]:
        layer = nnx.merge(graph, params)
        query, key, value = layer.project(x, rotation)
        return layer.absorb(x, attention(query, key, value, segment_ids)), _Cache(key, value)

    x, cache = jax.lax.scan(run_layer, model.embedding[...][tokens].astype(compute_dtype(platform)), layers)
    room = ((0, 0), (0, 0), (0, new_tokens), (0, 0), (0, 0))
    last = x[jnp.arange(batch), lengths - 1]
    return model.norm(last), jax.tree.map(lambda z: jnp.pad(z, room), cache)


def _read_one(model: Decoder, token: jax.Array, position: jax.Array, cache: _Cache) -> tuple[jax.Array, _Cache]:
    """Returns the hidden state [batch, width] of one more token for each prompt, and the cache with it."""
    rows = jnp.arange(len(token))
    seen = jnp.arange(cache.keys.shape[2]) <= position[:, None]
    rotation = model.rotation(position[:, None])
    graph, layers = nnx.split(model.layers)

    # The cache is carried along, not scanned over: so it is updated in place.
    def run_layer(state: tuple[jax.Array, _Cache], layer: tuple[jax.Array, Any]) -> tuple[tuple[Any, ...], None]:
        (x, cache), (index, params) = state, layer
        module = nnx.merge(graph, params)
        query, key, value = module.project(x, rotation)
        keys = cache.keys.at[index, rows, position].set(key[:, 0])
        values = cache.values.at[index, rows, position].set(value[:, 0])
        mixed = jax.nn.dot_product_attention(
            query, keys[index], values[index], mask=seen[:, None, None], implementation="xla"
        )
        return (module.absorb(x, mixed), _Cache(keys, values)), None

    x = model.embedding[...][token][:, None].astype(cache.keys.dtype)
    (x, cache), _ = jax.lax.scan(run_layer, (x, cache), (jnp.arange(model.config.layers), layers))
    return model.norm(x[:, 0]), cache


def _on_device(x: Any, device: jax.Device) -> Any:
    """Returns a device's copy of a replicated array, without copying it; another array as it is."""
    if not isinstance(x, jax.Array):
        return x
    return next(shard.data for shard in x.addressable_shards if shard.device == device)
