"""LoRA adapters in the format of Hugging Face's PEFT, which servers load beside the base model."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from bcl_grain.json_files import read_json
from train.hf_weights import new_directory
from train.lora import LoraConfig, split_params
from train.model import ModelConfig, Params, init_params
from train.parameter_names import PROJECTION_NAMES
from train.safetensors_file import Writer, new_layout, read_layout, read_tensor

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
TEMPLATE_FILE = "chat_template.jinja"
"""Beside the two where the adapters were trained under another chat template than their model's."""

_FACTOR_NAMES = {"lora_a": "lora_A", "lora_b": "lora_B"}


def export_adapters(
    directory: str | os.PathLike[str],
    config: ModelConfig,
    trained: Params,
    *,
    base_model: str,
    template: str | None = None,
) -> None:
    """Writes adapters as `adapter_config.json` and `adapter_model.safetensors`, in whole or not at all.

    Args:
        directory: Must not exist yet, or be empty.
        config: The model, with its `lora`.
        trained: The adapters, as `train.lora.split_params` gives them.
        base_model: Path or name of the model that they belong to.
        template: The chat template that they were trained under, if it is not the model's own.

    Raises:
        ValueError: If `directory` is not empty, or the model has no adapters.
    """
    lora = _lora(config)
    factors = jax.tree.map(np.asarray, trained["layers"])
    tensors = {name: factors[target][factor][layer].T for (target, factor, layer), name in _names(config, lora).items()}
    layout = new_layout({name: ("F32", tensor.shape) for name, tensor in tensors.items()}, {"format": "pt"})
    with new_directory(directory) as partial, Writer(partial / WEIGHTS_FILE, layout) as writer:
        description = json.dumps(_description(lora, base_model), indent=2) + "\n"
        (partial / CONFIG_FILE).write_text(description, encoding="utf-8")
        if template is not None:
            (partial / TEMPLATE_FILE).write_text(template, encoding="utf-8")
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def read_lora_config(directory: str | os.PathLike[str]) -> LoraConfig:
    """Returns rank, weight and targets of the adapters in a directory.

    Raises:
        ValueError: If there are none, or they compute what is not computed here; the message names it.
    """
    path = pathlib.Path(directory) / CONFIG_FILE
    try:
        description = read_json(path)
        if description["peft_type"] != "LORA":
            raise ValueError(f"peft_type is {description['peft_type']!r}")
        for name in ("use_dora", "use_rslora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern"):
            if description.get(name):
                raise ValueError(f"{name} is {description[name]!r}")
        if description.get("bias", "none") != "none":
            raise ValueError(f"bias is {description['bias']!r}")
        ours = {theirs.rpartition(".")[2]: name for name, theirs in PROJECTION_NAMES.items()}
        targets = {ours.get(name, name) for name in description["target_modules"]}
        order = [name for name in PROJECTION_NAMES if name in targets] + sorted(targets - {*PROJECTION_NAMES})
        return LoraConfig(rank=description["r"], alpha=float(description["lora_alpha"]), targets=tuple(order))
    except OSError as error:
        raise ValueError(
            f"can't read {str(path)!r}: {error.strerror or error}; give a directory of adapters"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(path)!r} describes no adapters that are read here: {error}") from error


def load_adapters(directory: str | os.PathLike[str], config: ModelConfig) -> Params:
    """Reads adapters of a model. Nothing is compiled.

    Args:
        directory: With the two files that `export_adapters` writes.
        config: The model, with the `lora` that `read_lora_config` gives.

    Returns:
        float32 parameters on the first device, as `train.lora.split_params` gives them.

    Raises:
        ValueError: If a tensor is missing, unknown or of another shape, or a file can't be read.
    """
    lora = _lora(config)
    path = pathlib.Path(directory) / WEIGHTS_FILE
    layout = read_layout(path)
    names = _names(config, lora)
    odd = {*names.values()} ^ {*layout.entries}
    if odd:
        raise ValueError(
            f"{len(odd)} tensors of {str(path)!r} are missing or unknown, the first is {min(odd)!r}: the adapters are "
            "of another model, or of other projections"
        )
    abstract = split_params(jax.eval_shape(lambda: init_params(config, jax.random.key(0))))[0]["layers"]
    layers: dict[str, dict[str, Any]] = {target: {} for target in lora.targets}
    parts: dict[tuple[str, str], list[npt.NDArray[Any]]] = {}
    for (target, factor, _), name in names.items():
        parts.setdefault((target, factor), []).append(read_tensor(path, layout, name).T.astype(np.float32))
    for (target, factor), values in parts.items():
        wanted, found = abstract[target][factor].shape[1:], {value.shape for value in values}
        if found != {wanted}:
            raise ValueError(
                f"adapters of {PROJECTION_NAMES[target]!r} in {str(path)!r} have shapes {sorted(found)} (transposed), "
                f"the model calls for {wanted}"
            )
        layers[target][factor] = jax.device_put(np.stack(values))
    return {"layers": layers}


def _lora(config: ModelConfig) -> LoraConfig:
    if config.lora is None:
        raise ValueError("the model has no adapters: set its `lora`")
    return config.lora


def _names(config: ModelConfig, lora: LoraConfig) -> dict[tuple[str, str, int], str]:
    """Returns PEFT's name of each target's two factors in each layer."""
    return {
        (target, factor, layer): f"base_model.model.model.layers.{layer}.{PROJECTION_NAMES[target]}.{theirs}.weight"
        for target in lora.targets
        for factor, theirs in _FACTOR_NAMES.items()
        for layer in range(config.layers)
    }


def _description(lora: LoraConfig, base_model: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [PROJECTION_NAMES[target].rpartition(".")[2] for target in lora.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }
