"""Weights of GGUF files, under the names and in the order of Hugging Face's.

Quantised tensors come back as float32. Llama's files hold the rows of the query and key projections in the order that
suits interleaved rotary positions, (0, d/2, 1, d/2 + 1, ...) within each head: that is undone.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from train.model import ModelConfig
from train.parameter_names import PROJECTION_NAMES, check_tensors
from train.rotary import RopeScaling

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": PROJECTION_NAMES["query"],
    "attn_k": PROJECTION_NAMES["key"],
    "attn_v": PROJECTION_NAMES["value"],
    "attn_output": PROJECTION_NAMES["output"],
    "ffn_gate": PROJECTION_NAMES["gate"],
    "ffn_up": PROJECTION_NAMES["up"],
    "ffn_down": PROJECTION_NAMES["down"],
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
# A text's end, a turn's, and that of a message which a tool's answer follows.
_END_KEYS = tuple(f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot", "eom"))
_ROPE_DIVISORS = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True)
class GgufModel:
    """A GGUF file whose metadata and tensors were found in order.

    Attributes:
        path: Where it is.
        config: The model's dimensions.
        tensors: The library's tensors, by Hugging Face's names.
        interleaved: Whether query and key rows are in the order for interleaved rotary positions.
        end_ids: Tokens that end an answer, as its metadata say; there may be none.
        context_tokens: Length of the sequences that it can read.
    """

    path: str
    config: ModelConfig
    tensors: Mapping[str, Any]
    interleaved: bool
    end_ids: tuple[int, ...]
    context_tokens: int

    def read(self, name: str) -> npt.NDArray[Any]:
        """Reads a tensor as float32, [outputs, inputs] if it is a projection."""
        tensor = self.tensors[name]
        value: npt.NDArray[Any] = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if self.interleaved and PROJECTION_NAMES["query"] in name:
            return _halves(value, self.config.heads)
        if self.interleaved and PROJECTION_NAMES["key"] in name:
            return _halves(value, self.config.kv_heads)
        return value


def open_gguf_model(path: str | os.PathLike[str]) -> GgufModel:
    """Reads a GGUF file's metadata and its list of tensors. Nothing is compiled.

    Raises:
        ValueError: If the file can't be read, or its architecture, a setting, a tensor, its shape or its type is not
            one that is read here. The message names it.
    """
    path = os.fspath(path)
    reader = _reader(path)
    tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
    divisors = tensors.pop(_ROPE_DIVISORS, None)
    settings = _Settings(path, reader)
    config = _config(settings, {name: _shape(tensor) for name, tensor in tensors.items()})
    check_tensors(config, {name: _shape(tensor) for name, tensor in tensors.items()}, origin=repr(path))
    for name, tensor in tensors.items():
        _check_type(path, name, tensor)
    if divisors is not None:
        config = dataclasses.replace(config, rope_scaling=_rope_scaling(path, config, divisors))
    return GgufModel(
        path,
        config,
        tensors,
        interleaved=settings.architecture == "llama",
        end_ids=settings.end_ids(config.vocab_size),
        context_tokens=settings.whole("context_length"),
    )


class _Settings:
    """The metadata of one architecture; errors name the file and the key."""

    def __init__(self, path: str, reader: gguf.GGUFReader) -> None:
        self._path, self._fields = path, reader.fields
        self.architecture = str(self._get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{path!r}: architecture {self.architecture!r} is not read here, only {', '.join(ARCHITECTURES)}"
            )

    def _get(self, key: str) -> Any:
        return self._fields[key].contents() if key in self._fields else None

    def get(self, key: str, default: Any = None) -> Any:
        value = self._get(f"{self.architecture}.{key}")
        if value is None and default is None:
            raise ValueError(f"{self._path!r} has no {self.architecture}.{key}: convert the model again")
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int:
            raise ValueError(
                f"{self._path!r}: {self.architecture}.{key} is {value!r}, layers that differ are not computed here: "
                "take another model"
            )
        return value

    def end_ids(self, vocab_size: int) -> tuple[int, ...]:
        found = {key: self._get(key) for key in _END_KEYS if key in self._fields}
        for key, token_id in found.items():
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{self._path!r}: {key} must be a token's id in [0, {vocab_size:,}), got {token_id!r}: convert the "
                    "model again"
                )
        return tuple(dict.fromkeys(found.values()))

    def refuse_unless(self, key: str, *values: Any) -> None:
        value = self.get(key, values[0])
        if value not in values:
            raise ValueError(
                f"{self._path!r}: {self.architecture}.{key} {value!r} is not computed here, only {values[0]!r}: take "
                "another model"
            )


def _reader(path: str) -> gguf.GGUFReader:
    try:
        reader = gguf.GGUFReader(path)
    except OSError as error:
        raise ValueError(f"can't read {path!r}: {error.strerror or error}; give a GGUF file") from error
    except Exception as error:  # a damaged file makes the reader fail in many ways
        raise ValueError(f"{path!r} is no GGUF file, or a damaged one ({error}): fetch it again") from error
    parts = reader.fields.get("split.count")
    if parts is not None and parts.contents() > 1:
        raise ValueError(
            f"{path!r} is one of {parts.contents()} parts, which are not read here: join them (llama.cpp's "
            "`llama-gguf-split --merge`)"
        )
    return reader


def _config(settings: _Settings, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    width, heads = settings.whole("embedding_length"), settings.whole("attention.head_count")
    head_dim = settings.whole("attention.key_length", width // heads)
    settings.refuse_unless("attention.value_length", head_dim)
    settings.refuse_unless("rope.dimension_count", head_dim)
    settings.refuse_unless("rope.scaling.type", "none")
    settings.refuse_unless("expert_count", 0)
    settings.refuse_unless("attention.sliding_window", 0)
    embedding = shapes.get(_NAMES["token_embd"] + ".weight", (settings.whole("vocab_size", 1),))
    return ModelConfig(
        vocab_size=embedding[0],
        layers=settings.whole("block_count"),
        width=width,
        heads=heads,
        kv_heads=settings.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        hidden=settings.whole("feed_forward_length"),
        rope_base=_shortest(settings.get("rope.freq_base", 10_000.0)),
        norm_eps=_shortest(settings.get("attention.layer_norm_rms_epsilon")),
        tied_embeddings=_NAMES["output"] + ".weight" not in shapes,
        qkv_bias=settings.architecture == "qwen2",
        qk_norm=settings.architecture == "qwen3",
    )


def _hf_name(name: str) -> str:
    """Returns Hugging Face's name of a tensor, or its own where there is none.

    >>> _hf_name("blk.3.attn_q.weight"), _hf_name("blk.0.ffn_gate_exps.weight")
    ('model.layers.3.self_attn.q_proj.weight', 'blk.0.ffn_gate_exps.weight')
    """
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    if stem.startswith("blk."):
        _, layer, module = stem.split(".", 2)
        if module in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[module]}.{kind}"
    return name


def _shape(tensor: Any) -> tuple[int, ...]:
    # GGUF lists the fastest axis first.
    return tuple(int(size) for size in tensor.shape)[::-1]


def _check_type(path: str, name: str, tensor: Any) -> None:
    if tensor.tensor_type in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        return
    try:
        gguf.dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:  # the first is the library's word for a type it can't decode
        raise ValueError(
            f"tensor {name!r} in {path!r} is of type {tensor.tensor_type.name}, which can't be read ({error}): take a "
            "file of another quantisation, such as Q8_0 or F16"
        ) from error


def _rope_scaling(path: str, config: ModelConfig, divisors: Any) -> RopeScaling:
    """Returns the scaling whose divisors a file holds: it doesn't hold the settings that made them.

    All models so far were made with the same settings but for `factor`, the largest of the divisors.
    """
    wanted = np.asarray(divisors.data, np.float64)
    scaling = RopeScaling(factor=_shortest(wanted.max()))
    frequencies = config.rope_base ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    made = 1 / scaling.multiplier(frequencies)
    if wanted.shape != made.shape or not np.allclose(made, wanted, rtol=1e-3):
        raise ValueError(
            f"tensor {_ROPE_DIVISORS!r} in {path!r} does not stretch rotary frequencies as Llama 3.1 does: take the "
            "model's Hugging Face directory"
        )
    return scaling


def _halves(value: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Brings rows (0, d/2, 1, d/2 + 1, ...) of each head into the order (0, 1, ..., d - 1).

    >>> _halves(np.array([[0], [2], [1], [3]]), 1).ravel().tolist()
    [0, 1, 2, 3]
    """
    rows, columns = value.shape
    return value.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _shortest(value: Any) -> float:
    """Returns the decimal number that a float32 was written as.

    >>> _shortest(9.999999747378752e-06)
    1e-05
    """
    return float(str(np.float32(value)))
