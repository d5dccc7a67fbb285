"""A decoder-only transformer in Flax NNX: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

NNX stays at the edge: parameters travel as a plain nested dict of float32 arrays, those of the layers stacked along a
leading layer axis, and `jax.lax.scan` runs over them, so that compile time does not grow with depth.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import bcl_grain as bcl
from train.attention import Attention

Params = dict[str, Any]
"""Nested dict of parameter arrays: {"embedding": ..., "layers": {...}, "norm": ..., "head": ...}."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Dimensions of a decoder.

    Attributes:
        vocab_size: Entries of the vocabulary.
        layers: Decoder layers.
        width: Model width.
        heads: Query heads.
        kv_heads: Key and value heads, a divisor of `heads`.
        head_dim: Width of a head, even.
        hidden: Width of the feed-forward layer.
        rope_base: Base of the rotary frequencies.
        norm_eps: Added to the mean square in RMSNorm.
        tied_embeddings: Whether the output projection is the embedding's transpose.
        remat: Whether the backward pass computes each layer again instead of keeping its activations.

    Raises:
        ValueError: If a dimension is out of range.

    >>> config = ModelConfig(vocab_size=49152, layers=30, width=576, heads=9, kv_heads=3, head_dim=64, hidden=1536)
    >>> f"{config.num_parameters:,}"
    '134,515,008'
    """

    vocab_size: int
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 384
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = True
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if not (self.rope_base > 0 and self.norm_eps > 0):
            raise ValueError(f"rope_base and norm_eps must be positive, got {self.rope_base!r} and {self.norm_eps!r}")

    @property
    def num_parameters(self) -> int:
        """Number of parameters, a tied embedding counted once."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.width * self.hidden + 2 * self.width
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * self.width
        return self.layers * layer + embeddings + self.width

    def cost(self) -> bcl.TransformerCost:
        """Returns what a record costs in one training step, in FLOPs: what the planner balances."""
        return bcl.TransformerCost.from_dims(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden=self.hidden,
            vocab_size=self.vocab_size,
            remat=self.remat,
        )


def compute_dtype(platform: str) -> jnp.dtype[Any]:
    """Returns the dtype of activations on a platform: bfloat16, but float32 on a CPU, which emulates bfloat16."""
    return jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)


class RMSNorm(nnx.Module):
    """Divides by the root mean square, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones(width))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] -> the same shape and dtype."""
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.scale[...]).astype(x.dtype)


class Linear(nnx.Module):
    """A matrix, kept in float32, multiplied in the input's dtype."""

    def __init__(self, inputs: int, outputs: int, *, scale: float = 1.0, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (inputs, outputs)) * (scale * inputs**-0.5))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., inputs] -> [..., outputs]."""
        return x @ self.kernel[...].astype(x.dtype)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each added to its input."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        c = config
        into_residual = (2 * c.layers) ** -0.5  # keeps the residual stream's size independent of depth
        self.head_dim = c.head_dim
        self.attention_norm = RMSNorm(c.width, c.norm_eps)
        self.query = Linear(c.width, c.heads * c.head_dim, rngs=rngs)
        self.key = Linear(c.width, c.kv_heads * c.head_dim, rngs=rngs)
        self.value = Linear(c.width, c.kv_heads * c.head_dim, rngs=rngs)
        self.output = Linear(c.heads * c.head_dim, c.width, scale=into_residual, rngs=rngs)
        self.feed_forward_norm = RMSNorm(c.width, c.norm_eps)
        self.gate = Linear(c.width, c.hidden, rngs=rngs)
        self.up = Linear(c.width, c.hidden, rngs=rngs)
        self.down = Linear(c.hidden, c.width, scale=into_residual, rngs=rngs)

    def __call__(
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], segment_ids: jax.Array, attention: Attention
    ) -> jax.Array:
        """[r, n, width] -> [r, n, width]."""
        y = self.attention_norm(x)
        query, key, value = (
            z.reshape(*z.shape[:2], -1, self.head_dim) for z in (self.query(y), self.key(y), self.value(y))
        )
        mixed = attention(rotate(query, *rotation), rotate(key, *rotation), value, segment_ids)
        x = x + self.output(mixed.reshape(*x.shape[:2], -1))
        y = self.feed_forward_norm(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class Decoder(nnx.Module):
    """The model. Build it through `init_params` and `nnx.merge(graphdef(config), params)`.

    Attributes:
        config: Its dimensions.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedding = nnx.Param(
            jax.random.normal(rngs.params(), (config.vocab_size, config.width)) * config.width**-0.5
        )
        stacked = nnx.split_rngs(splits=config.layers)(nnx.vmap(lambda rngs: DecoderLayer(config, rngs=rngs)))
        self.layers = stacked(rngs)
        self.norm = RMSNorm(config.width, config.norm_eps)
        if not config.tied_embeddings:
            self.head = Linear(config.width, config.vocab_size, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        *,
        attention: Attention,
        dtype: jax.typing.DTypeLike,
    ) -> jax.Array:
        """Returns the hidden states after the last norm.

        Args:
            tokens: int [r, n].
            positions: int [r, n], each token's place in its record.
            segment_ids: int [r, n], from 1; 0 is padding.
            attention: One of `train.attention`.
            dtype: Of the activations.

        Returns:
            [r, n, width] in `dtype`; `logits` makes predictions of them.
        """
        rotation = rotary(positions, self.config.head_dim, self.config.rope_base)
        layer_graph, layer_params = nnx.split(self.layers)

        def run_layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
            return nnx.merge(layer_graph, params)(x, rotation, segment_ids, attention), None

        if self.config.remat:
            run_layer = jax.checkpoint(run_layer, prevent_cse=False)  # the scan already keeps the passes apart
        x, _ = jax.lax.scan(run_layer, self.embedding[...][tokens].astype(dtype), layer_params)
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., width] -> [..., vocab_size] in float32."""
        kernel = self.embedding[...].T if self.config.tied_embeddings else self.head.kernel[...]
        return jnp.matmul(
            hidden,
            kernel.astype(hidden.dtype),
            preferred_element_type=jnp.promote_types(hidden.dtype, jnp.float32),
        )


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Returns fresh float32 parameters. Pure: jit it, with the shardings that they shall have."""
    model = Decoder(config, rngs=nnx.Rngs(params=key))
    params: Params = nnx.to_pure_dict(nnx.split(model, nnx.Param)[1])
    return params


def graphdef(config: ModelConfig) -> nnx.GraphDef[Decoder]:
    """Returns the model without its parameters: `nnx.merge(graphdef(config), params)` is a `Decoder`.

    Computes nothing.
    """
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0)))
    return nnx.split(abstract, nnx.Param)[0]


def rotary(positions: jax.Array, head_dim: int, base: float) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine [r, n, 1, head_dim / 2] of the angles position * base**(-2 i / head_dim).

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021; the pairs (i, i + head_dim / 2)
    turn together, as in Llama's published weights for Hugging Face.
    """
    frequencies = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Turns heads [r, n, heads, head_dim] by their positions' angles."""
    first, second = jnp.split(x.astype(jnp.promote_types(x.dtype, jnp.float32)), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)
