"""The `config.json` of a Hugging Face model directory as a `ModelConfig`, and back.

Every setting that changes what the model computes is either understood or refused; what only concerns training or
other programs is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from train.model import ModelConfig
from train.rotary import RopeScaling

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""The families that are read, by `model_type`. SmolLM 2 is a Llama, Qwen 2.5 a Qwen 2."""

_REQUIRED = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")

# Settings that change the computation, with the only values that are computed here. Absent means the first.
_REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "dual_chunk_attention_config": (None,),
}


def from_hf_config(config: Mapping[str, Any], *, origin: str) -> ModelConfig:
    """Returns the dimensions of the model that a `config.json` describes.

    Args:
        config: The parsed file.
        origin: Its name, for messages.

    Raises:
        ValueError: If the architecture or a setting is not one that is computed here, or a dimension is missing; the
            message names it.
    """
    model_type = config.get("model_type")
    architectures = config.get("architectures") or [ARCHITECTURES.get(str(model_type))]
    if model_type not in ARCHITECTURES or architectures != [ARCHITECTURES[model_type]]:
        raise ValueError(
            f"{origin}: architecture {architectures} of model_type {model_type!r} is not read here, only "
            f"{', '.join(f'{name} ({key})' for key, name in ARCHITECTURES.items())}"
        )
    for name, values in _REFUSED_UNLESS.items():
        value = config.get(name, values[0])
        if value not in values and (name, model_type) != ("attention_bias", "qwen2"):  # which always has it
            raise ValueError(f"{origin}: {name} {value!r} is not computed here, only {values[0]!r}: take another model")
    odd = sorted({str(kind) for kind in config.get("layer_types") or []} - {"full_attention"})
    if odd:
        raise ValueError(f"{origin}: layer_types {odd} are not computed here, only full_attention: take another model")
    missing = [name for name in _REQUIRED if config.get(name) is None]
    if missing:
        raise ValueError(f"{origin} lacks {', '.join(missing)}: fetch it again")
    width, heads = config["hidden_size"], config["num_attention_heads"]
    base, scaling = _rope(config, origin)
    try:
        return ModelConfig(
            vocab_size=_whole(config["vocab_size"]),
            layers=_whole(config["num_hidden_layers"]),
            width=_whole(width),
            heads=_whole(heads),
            kv_heads=_whole(config.get("num_key_value_heads") or heads),
            head_dim=_whole(config.get("head_dim") or (128 if model_type == "qwen3" else width // heads)),
            hidden=_whole(config["intermediate_size"]),
            rope_base=base,
            rope_scaling=scaling,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=model_type == "qwen2",
            qk_norm=model_type == "qwen3",
        )
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{origin} has a value out of range: {error}") from error


def context_tokens(config: Mapping[str, Any], *, origin: str) -> int | None:
    """Returns the length of the sequences that a `config.json` says its model can read; None if it says nothing.

    Scaled rotary positions of Llama's kind are counted in already.

    Raises:
        ValueError: If it is no positive integer; the message names the file.
    """
    value = config.get("max_position_embeddings")
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(
            f"{origin}: max_position_embeddings must be a positive integer, got {value!r}: repair the file"
        )
    return value


def to_hf_config(config: ModelConfig, *, dtype: str, max_tokens: int, special_ids: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a `config.json` for a model of ours.

    Args:
        config: The model.
        dtype: Of its tensors, as PyTorch names it: "bfloat16".
        max_tokens: Length of the sequences that it can read.
        special_ids: Such as {"eos_token_id": 2}.

    Raises:
        ValueError: If no family has both biases and head norms.
    """
    if config.qkv_bias and config.qk_norm:
        raise ValueError("no family has qkv_bias and qk_norm both: the model can't be written for other programs")
    model_type = "qwen2" if config.qkv_bias else "qwen3" if config.qk_norm else "llama"
    scaling = config.rope_scaling
    rope_scaling = None
    if scaling is not None:
        rope_scaling = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_tokens,
        }
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": max_tokens,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": dtype,
        **special_ids,
    }


def _rope(config: Mapping[str, Any], origin: str) -> tuple[float, RopeScaling | None]:
    """Returns base and scaling, from the older two settings or the newer one that holds both."""
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = settings.pop("rope_theta", config.get("rope_theta", 10_000.0))
    if not isinstance(base, int | float) or not (math.isfinite(base) and base > 0):
        raise ValueError(f"{origin}: rope_theta must be a positive number, got {base!r}")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return float(base), None
    if kind != "llama3":
        raise ValueError(
            f"{origin}: RoPE scaling of type {kind!r} is not computed here, only 'llama3': take another model, or "
            "remove the setting if the records stay within the length of the model's first training"
        )
    try:
        return float(base), RopeScaling(
            factor=float(settings["factor"]),
            low_freq_factor=float(settings["low_freq_factor"]),
            high_freq_factor=float(settings["high_freq_factor"]),
            original_tokens=int(settings["original_max_position_embeddings"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{origin}: the RoPE scaling {settings} is not complete or out of range ({error})") from error


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no integer")
    return value
