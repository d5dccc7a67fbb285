"""Dimensions of decoder-only transformers: a few well-known ones, or those of a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bcl_grain.costs import TransformerCost
from bcl_grain.json_files import read_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDims:
    """Dimensions of a decoder-only transformer, dense, with one kind of layer.

    Attributes:
        layers: Decoder layers.
        width: Model width.
        heads: Query heads.
        kv_heads: Key and value heads, a divisor of `heads`.
        head_dim: Width of a head.
        hidden: Width of the feed-forward layer.
        vocab_size: Entries of the vocabulary.
        gated: Whether the feed-forward layer has three matrices (SwiGLU) or two.
        tied_embeddings: Whether the output projection is the embedding's transpose.
        qkv_bias: Whether query, key and value projections have a bias.

    Raises:
        ValueError: If a dimension is not positive, or `kv_heads` doesn't divide `heads`.

    >>> f"{KNOWN_MODELS['smollm2-135m'].num_parameters:,}"
    '134,515,008'
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab_size: int
    gated: bool = True
    tied_embeddings: bool = False
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "head_dim", "hidden", "vocab_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, or of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Parameters, a tied embedding counted once; two norms a layer and one at the end, without biases."""
        attention = 2 * self.width * (self.query_width + self.kv_width)
        bias = self.query_width + 2 * self.kv_width if self.qkv_bias else 0
        feed_forward = (3 if self.gated else 2) * self.width * self.hidden
        layer = attention + bias + feed_forward + 2 * self.width
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * self.width
        return self.layers * layer + embeddings + self.width

    def cost(self, *, remat: bool = False) -> TransformerCost:
        """Returns the FLOPs of one training step as a cost model: see `TransformerCost.from_dims`."""
        return TransformerCost.from_dims(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden=self.hidden,
            vocab_size=self.vocab_size,
            gated=self.gated,
            remat=remat,
        )


def _llama(layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocab_size: int, **more: Any) -> ModelDims:
    return ModelDims(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width // heads,
        hidden=hidden,
        vocab_size=vocab_size,
        **more,
    )


KNOWN_MODELS: dict[str, ModelDims] = {
    "smollm2-135m": _llama(30, 576, 9, 3, 1536, 49152, tied_embeddings=True),
    "smollm2-360m": _llama(32, 960, 15, 5, 2560, 49152, tied_embeddings=True),
    "smollm2-1.7b": _llama(24, 2048, 32, 32, 8192, 49152, tied_embeddings=True),
    "qwen2.5-0.5b": _llama(24, 896, 14, 2, 4864, 151936, tied_embeddings=True, qkv_bias=True),
    "qwen2.5-1.5b": _llama(28, 1536, 12, 2, 8960, 151936, tied_embeddings=True, qkv_bias=True),
    "qwen2.5-7b": _llama(28, 3584, 28, 4, 18944, 152064, qkv_bias=True),
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, 128256, tied_embeddings=True),
    "llama-3.2-3b": _llama(28, 3072, 24, 8, 8192, 128256, tied_embeddings=True),
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama-3.1-70b": _llama(80, 8192, 64, 8, 28672, 128256),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000),
}
"""Published dimensions by name."""

_PLAIN_FEED_FORWARD = frozenset({"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "phi", "falcon", "starcoder2"})
"""Model types of Hugging Face whose feed-forward layer has two matrices."""


def load_model(name_or_path: str) -> ModelDims:
    """Returns the dimensions of a known model, or those that a `config.json` states.

    Args:
        name_or_path: A key of `KNOWN_MODELS`, a `config.json`, or the directory that holds one.

    Raises:
        ValueError: If it is neither, or the file can't be used; the message names the remedy.

    >>> load_model("smollm2-135m").layers
    30
    """
    known = KNOWN_MODELS.get(name_or_path.lower())
    if known is not None:
        return known
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"unknown model {name_or_path!r}: pass one of {', '.join(KNOWN_MODELS)}, or the path of a Hugging Face "
            "config.json"
        )
    try:
        config = read_json(path)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error}): pass a Hugging Face config.json") from error
    return dims_from_config(config, origin=str(path))


def dims_from_config(config: Mapping[str, Any], *, origin: str = "config") -> ModelDims:
    """Returns the dimensions that a Hugging Face configuration states.

    Of a multimodal model the text decoder's are taken. Older names (`n_embd`, `n_layer`, ...) are understood.

    Args:
        config: The parsed `config.json`.
        origin: Its name, for messages.

    Raises:
        ValueError: If a dimension is missing or out of range, or the model is a mixture of experts.

    >>> dims_from_config({"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "model_type": "gpt2"}).hidden
    3072
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{origin} holds a {type(config).__name__}, not an object: pass a Hugging Face config.json")
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    experts = next((key for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)), None)
    if experts is not None:
        raise ValueError(
            f"{origin} describes a mixture of experts ({experts}={config[experts]!r}), which is not modelled: pass the "
            "config.json of a dense model of the same active size, or --cost linear=A,quadratic=B"
        )

    def read(*names: str, default: int | None = None) -> int:
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found = "is missing" if value is None else f"is {value!r}"
            raise ValueError(f"{names[0]!r} {found} in {origin}: it must be a positive integer")
        return value

    width = read("hidden_size", "n_embd", "d_model")
    heads = read("num_attention_heads", "n_head", "n_heads")
    model_type = str(config.get("model_type", ""))
    gated = model_type not in _PLAIN_FEED_FORWARD
    return ModelDims(
        layers=read("num_hidden_layers", "n_layer", "n_layers"),
        width=width,
        heads=heads,
        kv_heads=read("num_key_value_heads", default=heads),
        head_dim=read("head_dim", default=max(1, width // heads)),
        hidden=read("intermediate_size", "n_inner", "ffn_dim", default=None if gated else 4 * width),
        vocab_size=read("vocab_size"),
        gated=gated,
        tied_embeddings=bool(config.get("tie_word_embeddings", model_type == "gpt2")),
        qkv_bias=bool(config.get("attention_bias", model_type == "qwen2")),
    )
