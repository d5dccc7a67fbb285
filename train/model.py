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
from train.lora import LoraConfig
from train.rotary import RopeScaling, rotary, rotate

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
        qkv_bias: Whether queries, keys and values have a bias, as in Qwen 2.
        qk_norm: Whether each head of the queries and keys is normed, as in Qwen 3.
        rope_scaling: How rotary frequencies are stretched, as in Llama 3.1, or None.
        lora: Adapters beside the matrices, or None.
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
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    lora: LoraConfig | None = None
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "hidden"):
            if not 1 <= getattr(self, name) < 2**31:
                raise ValueError(f"{name} must be at least 1 and below {2**31:,}, got {getattr(self, name)!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if not (self.rope_base > 0 and self.norm_eps > 0):
            raise ValueError(f"rope_base and norm_eps must be positive, got {self.rope_base!r} and {self.norm_eps!r}")

    @property
    def num_parameters(self) -> int:
        """Number of parameters, a tied embedding counted once and adapters not at all."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.qkv_bias:
            attention += self.head_dim * (self.heads + 2 * self.kv_heads)
        if self.qk_norm:
            attention += 2 * self.head_dim
        layer = attention + 3 * self.width * self.hidden + 2 * self.width
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * self.width
        return self.layers * layer + embeddings + self.width

    def cost(self) -> bcl.TransformerCost:
        """Returns what a record costs in one training step, in FLOPs: what the planner balances."""
        cost = bcl.TransformerCost.from_dims(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden=self.hidden,
            vocab_size=self.vocab_size,
            remat=self.remat,
        )
        if self.lora is None:
            return cost
        # No gradient of the matrices themselves, a third of the work on them; the adapters' own work is left out.
        matrices = self.num_parameters - (0 if self.tied_embeddings else self.vocab_size * self.width)
        return dataclasses.replace(cost, per_token=cost.per_token - 2.0 * matrices)


def compute_dtype(platform: str) -> jnp.dtype[Any]:
    """Returns the dtype of activations on a platform: bfloat16, but float32 on a CPU, which emulates bfloat16."""
    return jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """[..., inputs] times [inputs, outputs], in the dtype of the former."""
    # One leading axis: the kernel's gradient sums over it, and XLA's CPU products that sum over two take twice as long.
    flat = x.reshape(-1, x.shape[-1])
    return (flat @ kernel.astype(x.dtype)).reshape(*x.shape[:-1], -1)


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
    """A matrix, multiplied in the input's dtype whatever its own, and what may come on top: a bias, an adapter."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        scale: float = 1.0,
        bias: bool = False,
        lora: LoraConfig | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (inputs, outputs)) * (scale * inputs**-0.5))
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None
        self.adapter_scale = None if lora is None else lora.scale
        if lora is not None:
            bound = inputs**-0.5
            self.lora_a = nnx.Param(jax.random.uniform(rngs.params(), (inputs, lora.rank), minval=-bound, maxval=bound))
            self.lora_b = nnx.Param(jnp.zeros((lora.rank, outputs)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., inputs] -> [..., outputs]."""
        y = matmul(x, self.kernel[...])
        if self.bias is not None:
            y += self.bias[...].astype(x.dtype)
        if self.adapter_scale is not None:
            y += self.adapter_scale * matmul(matmul(x, self.lora_a[...]), self.lora_b[...])
        return y


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each added to its input."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        c = config
        into_residual = (2 * c.layers) ** -0.5  # keeps the residual stream's size independent of depth

        def linear(name: str, inputs: int, outputs: int, *, scale: float = 1.0, bias: bool = False) -> Linear:
            lora = c.lora if c.lora is not None and name in c.lora.targets else None
            return Linear(inputs, outputs, scale=scale, bias=bias, lora=lora, rngs=rngs)

        self.head_dim = c.head_dim
        self.attention_norm = RMSNorm(c.width, c.norm_eps)
        self.query = linear("query", c.width, c.heads * c.head_dim, bias=c.qkv_bias)
        self.key = linear("key", c.width, c.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.value = linear("value", c.width, c.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.query_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.key_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.output = linear("output", c.heads * c.head_dim, c.width, scale=into_residual)
        self.feed_forward_norm = RMSNorm(c.width, c.norm_eps)
        self.gate = linear("gate", c.width, c.hidden)
        self.up = linear("up", c.width, c.hidden)
        self.down = linear("down", c.hidden, c.width, scale=into_residual)

    def __call__(
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], segment_ids: jax.Array, attention: Attention
    ) -> jax.Array:
        """[r, n, width] -> [r, n, width]."""
        query, key, value = self.project(x, rotation)
        return self.absorb(x, attention(query, key, value, segment_ids))

    def project(self, x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[r, n, width] -> queries [r, n, heads, head_dim], keys and values [r, n, kv_heads, head_dim], rotated."""
        y = self.attention_norm(x)
        query, key, value = (
            z.reshape(*z.shape[:2], -1, self.head_dim) for z in (self.query(y), self.key(y), self.value(y))
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return rotate(query, *rotation), rotate(key, *rotation), value

    def absorb(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        """Adds what attention gave [r, n, heads, head_dim] to x [r, n, width], then the feed-forward layer's output."""
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
        rotation = self.rotation(positions)
        layer_graph, layer_params = nnx.split(self.layers)

        def run_layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
            return nnx.merge(layer_graph, params)(x, rotation, segment_ids, attention), None

        if self.config.remat:
            run_layer = jax.checkpoint(run_layer, prevent_cse=False)  # the scan already keeps the passes apart
        x, _ = jax.lax.scan(run_layer, self.embedding[...][tokens].astype(dtype), layer_params)
        return self.norm(x)

    def rotation(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns cosine and sine of the positions' angles; see `train.rotary`."""
        return rotary(positions, self.config.head_dim, self.config.rope_base, self.config.rope_scaling)

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
