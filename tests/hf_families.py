"""Tiny models of every family, and what they compute by a plain NumPy transcription: the oracle of the weight tests.

Nothing here uses the trainer's code: names, shapes, file format and arithmetic are written out again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Config = dict[str, Any]
Tensors = dict[str, npt.NDArray[Any]]
Floats = npt.NDArray[np.float64]

_COMMON: Config = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_LLAMA: Config = {**_COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
_QWEN2: Config = {**_COMMON, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
_STRETCHED: Config = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, Config] = {
    "llama2": {**_LLAMA, "num_key_value_heads": 4},
    "llama3": {**_LLAMA, "rope_theta": 500_000.0, "rope_scaling": _STRETCHED},
    "llama3-tied": {
        **_LLAMA,
        "tie_word_embeddings": True,
        "head_dim": 16,
        "rope_parameters": {**_STRETCHED, "factor": 32.0, "rope_theta": 500_000.0},
    },
    "smollm2": {
        **_LLAMA,
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_theta": 100_000,
    },
    "qwen2": {**_QWEN2, "rope_theta": 10_000.0},
    "qwen2.5": {**_QWEN2, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    "qwen3": {
        **_COMMON,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 12,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
}
"""The content of `config.json`, by family."""


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def random_tensors(config: Config, *, seed: int = 0, dtype: npt.DTypeLike = np.float32) -> Tensors:
    """Returns random weights under Hugging Face's names, large enough for attention to be far from even."""
    rng = np.random.default_rng(seed)
    width, hidden, dim = config["hidden_size"], config["intermediate_size"], head_dim(config)
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    tensors: Tensors = {}

    def add(name: str, *shape: int, scale: float | None = None, mean: float = 0.0) -> None:
        deviation = shape[-1] ** -0.5 if scale is None else scale
        tensors[name] = (mean + deviation * rng.standard_normal(shape)).astype(dtype)

    add("model.embed_tokens.weight", config["vocab_size"], width)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
            add(f"{layer}self_attn.{name}_proj.weight", outputs, width, scale=2 * width**-0.5)
            if config["model_type"] == "qwen2":
                add(f"{layer}self_attn.{name}_proj.bias", outputs, scale=0.5)
        if config["model_type"] == "qwen3":
            add(f"{layer}self_attn.q_norm.weight", dim, scale=0.3, mean=1.5)
            add(f"{layer}self_attn.k_norm.weight", dim, scale=0.3, mean=1.5)
        add(f"{layer}self_attn.o_proj.weight", width, queries)
        add(f"{layer}mlp.gate_proj.weight", hidden, width)
        add(f"{layer}mlp.up_proj.weight", hidden, width)
        add(f"{layer}mlp.down_proj.weight", width, hidden)
        add(f"{layer}input_layernorm.weight", width, scale=0.2, mean=1.0)
        add(f"{layer}post_attention_layernorm.weight", width, scale=0.2, mean=1.0)
    add("model.norm.weight", width, scale=0.2, mean=1.0)
    if not config["tie_word_embeddings"]:
        add("lm_head.weight", config["vocab_size"], width)
    return tensors


def write_safetensors(path: Path, tensors: Tensors, *, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a file as the format's description says."""
    names = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16"}
    table: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    data = b""
    for name, tensor in tensors.items():
        place = len(data)
        data += tensor.tobytes()
        dtype = names.get(tensor.dtype, tensor.dtype.name.upper())
        table[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [place, len(data)]}
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def write_model(directory: Path, config: Config, tensors: Tensors, *, shards: int = 1) -> Path:
    """Writes a model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (directory / "tokenizer.json").write_text("{}")
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return directory
    places: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict([*tensors.items()][i::shards])
        write_safetensors(directory / file, part)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def reference_logits(config: Config, tensors: Tensors, tokens: npt.NDArray[np.integer[Any]]) -> Floats:
    """Returns the logits [n, vocabulary] for one sequence [n], in float64, head by head and place by place."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    dim, eps = head_dim(config), config["rms_norm_eps"]
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    angles = np.arange(len(tokens))[:, None] * _frequencies(config, dim)
    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = {
            name.removeprefix(f"model.layers.{i}."): value
            for name, value in weights.items()
            if name.startswith(f"model.layers.{i}.")
        }
        y = _norm(x, layer["input_layernorm.weight"], eps)
        projected = {}
        for name in "qkv":
            value = y @ layer[f"self_attn.{name}_proj.weight"].T + layer.get(f"self_attn.{name}_proj.bias", 0.0)
            heads = value.reshape(len(tokens), -1, dim)
            if f"self_attn.{name}_norm.weight" in layer:
                heads = _norm(heads, layer[f"self_attn.{name}_norm.weight"], eps)
            projected[name] = heads if name == "v" else _turn(heads, angles)
        mixed = np.zeros_like(projected["q"])
        for head in range(config["num_attention_heads"]):
            for place in range(len(tokens)):
                scores = projected["k"][: place + 1, head // group] @ projected["q"][place, head] / math.sqrt(dim)
                share = np.exp(scores - scores.max())
                mixed[place, head] = share @ projected["v"][: place + 1, head // group] / share.sum()
        x = x + mixed.reshape(len(tokens), -1) @ layer["self_attn.o_proj.weight"].T
        y = _norm(x, layer["post_attention_layernorm.weight"], eps)
        gate = y @ layer["mlp.gate_proj.weight"].T
        up = y @ layer["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    head_weight = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits: Floats = _norm(x, weights["model.norm.weight"], eps) @ head_weight.T
    return logits


def _norm(x: Floats, weight: Floats, eps: float) -> Floats:
    result: Floats = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    return result


def _turn(heads: Floats, angles: Floats) -> Floats:
    """Multiplies the pairs (i, i + d/2), taken as complex numbers, by exp(i angle)."""
    half = heads.shape[-1] // 2
    turned = (heads[..., :half] + 1j * heads[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _frequencies(config: Config, dim: int) -> Floats:
    """Returns the rotary frequencies; the stretched ones by the case distinction of Llama 3.1's description."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = float(settings.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    frequencies = []
    for i in range(0, dim, 2):
        frequency = base ** (-i / dim)
        if settings:
            length, factor = settings["original_max_position_embeddings"], settings["factor"]
            low, high = settings["low_freq_factor"], settings["high_freq_factor"]
            wavelength = 2 * math.pi / frequency
            if wavelength > length / low:
                frequency /= factor
            elif wavelength >= length / high:
                smooth = (length / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / factor + smooth * frequency
        frequencies.append(frequency)
    return np.array(frequencies)
