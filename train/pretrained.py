"""Models that others trained: from a path to parameters, and from parameters to a directory that servers load.

pretrained = open_pretrained("models/SmolLM2-135M-Instruct")   # or a .gguf file; reads headers only
params = load_params(pretrained, sharding=...)                 # pretrained.config says of what model
export_model("out", params, like=pretrained, max_tokens=8192)
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from bcl_grain.json_files import read_json
from train.gguf_weights import GgufModel, open_gguf_model
from train.hf_config import to_hf_config
from train.hf_weights import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, HfModel, open_hf_model, write_hf_model
from train.model import ModelConfig, Params
from train.parameter_names import Leaf, leaves, tensor_shapes
from train.safetensors_file import DTYPES, Layout, fill, new_layout

Pretrained = HfModel | GgufModel
"""A model whose files were opened: `config` says which, `read(name)` gives a tensor by Hugging Face's name."""

SHARD_BYTES = 5_000_000_000
"""Above it a model is written as several files."""

_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def open_pretrained(path: str | os.PathLike[str]) -> Pretrained:
    """Opens a model without reading its weights. Nothing is compiled.

    Args:
        path: A Hugging Face model directory, or a GGUF file.

    Raises:
        ValueError: If it is neither, or anything in it is not read here; the message names it.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        return open_hf_model(path)
    if path.suffix == ".gguf":
        return open_gguf_model(path)
    raise ValueError(
        f"{str(path)!r} is not a model: give a Hugging Face directory (config.json, model.safetensors, ...) or a .gguf "
        "file"
    )


def load_params(
    pretrained: Pretrained,
    *,
    dtype: npt.DTypeLike = np.float32,
    sharding: jax.sharding.Sharding | None = None,
) -> Params:
    """Reads a model's parameters onto the devices, one after the other. Nothing is compiled.

    Memory of the host: one parameter, all layers of it, and one tensor; on a CPU the result besides.

    Args:
        pretrained: From `open_pretrained`.
        dtype: Of the parameters.
        sharding: Where they go; default: the first device. With several processes each of them reads the model.

    Returns:
        Parameters of `pretrained.config`, without adapters.
    """
    params: Params = {}
    for leaf in leaves(pretrained.config):
        value = read_parameter(pretrained, leaf, dtype)
        branch = params
        for key in leaf.path[:-1]:
            branch = branch.setdefault(key, {})
        branch[leaf.path[-1]] = on_devices(value, sharding)
    return params


def read_parameter(pretrained: Pretrained, leaf: Leaf, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns one of a model's parameters, all layers of it."""
    value = np.empty(leaf.shape, dtype)
    for name, part in leaf.cut(value).items():
        fill(part, pretrained.read(name))
    return value


def export_model(
    directory: str | os.PathLike[str],
    params: Params,
    *,
    like: HfModel | None = None,
    config: ModelConfig | None = None,
    dtype: str | None = None,
    max_tokens: int | None = None,
    beside: Mapping[str, pathlib.Path | str] | None = None,
    special_ids: Mapping[str, Any] | None = None,
) -> None:
    """Writes parameters as a Hugging Face model directory, in whole or not at all.

    Args:
        directory: Must not exist yet, or be empty.
        params: Without adapters: see `train.lora.merge_adapters`. Anything that NumPy makes an array of, one at a time.
        like: The directory that the parameters came from: names, types, shards, configuration and the files beside
            the weights are taken from it. Parameters that were not changed come out bit for bit.
        config: Without `like`: the model.
        dtype: Type of the tensors, "F32", "BF16" or "F16"; default: as `like` has them, or "F32".
        max_tokens: Without `like`: length of the sequences that it can read.
        beside: Further files by name, such as a tokenizer's, to copy or as text; those of `like` come, too.
        special_ids: Without `like`: goes into the configuration, such as {"eos_token_id": 2}.

    Raises:
        ValueError: If `directory` is not empty, or neither `like` nor `config` is given.
    """
    texts: dict[str, pathlib.Path | str] = {**({} if like is None else like.beside()), **(beside or {})}
    if like is not None and dtype is None:
        write_hf_model(directory, like.config, params, files=like.files, extra=like.extra, beside=texts)
        return
    dtype = "F32" if dtype is None else dtype
    if dtype not in _TORCH_NAMES:
        raise ValueError(f"dtype must be one of {', '.join(_TORCH_NAMES)}, got {dtype!r}")
    if like is not None:
        config, description = like.config, read_json(like.directory / CONFIG_FILE)
        description["dtype" if "dtype" in description else "torch_dtype"] = _TORCH_NAMES[dtype]
        texts.pop(INDEX_FILE, None)
    elif config is None or max_tokens is None:
        raise ValueError("a model without a directory that it came from needs config and max_tokens to be written")
    else:
        description = to_hf_config(
            config, dtype=_TORCH_NAMES[dtype], max_tokens=max_tokens, special_ids=dict(special_ids or {})
        )
    texts[CONFIG_FILE] = json.dumps(description, indent=2) + "\n"
    files = new_layouts(config, dtype)
    if len(files) > 1:
        places = {name: file for file, layout in files.items() for name in layout.entries}
        total = sum(entry.stop - entry.start for layout in files.values() for entry in layout.entries.values())
        texts[INDEX_FILE] = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"
    write_hf_model(directory, dataclasses.replace(config, lora=None), params, files=files, beside=texts)


def new_layouts(config: ModelConfig, dtype: str, *, shard_bytes: int = SHARD_BYTES) -> dict[str, Layout]:
    """Returns the files of a model that is written for the first time, each at most `shard_bytes` if a tensor is."""
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, shape in tensor_shapes(config).items():
        size = int(np.prod(shape)) * DTYPES[dtype].itemsize
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = dtype, shape
        filled += size
    if len(shards) == 1:
        return {SINGLE_FILE: new_layout(shards[0], {"format": "pt"})}
    return {
        f"model-{i:05}-of-{len(shards):05}.safetensors": new_layout(shard, {"format": "pt"})
        for i, shard in enumerate(shards, start=1)
    }


def on_devices(value: npt.NDArray[Any], sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Returns an array that every process has as a global one: each puts its own copy on its own devices."""
    if sharding is None:
        return jax.device_put(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
