"""Hugging Face model directories: `config.json`, `model*.safetensors`, and what else a server reads.

Opening one reads headers only, and checks every tensor's name and shape. Writing one that was opened gives the same
files again, bit for bit as long as the parameters are as they were read: names, types, order, shards and metadata are
kept, and so are the files beside the weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bcl_grain.json_files import read_json
from train.generation_config import GENERATION_FILE, read_end_ids
from train.hf_config import context_tokens, from_hf_config
from train.model import ModelConfig
from train.parameter_names import EMBEDDING, HEAD, Leaf, check_tensors, leaves
from train.safetensors_file import DTYPES, Layout, Writer, read_layout, read_tensor

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_COPIED = (
    "config.json",
    INDEX_FILE,
    GENERATION_FILE,
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
    "LICENSE*",
    "NOTICE*",
)

# Buffers that old files carry: the model computes them, whatever they say.
_BUFFER = ".rotary_emb.inv_freq"

_COMPARED_AT_ONCE_BYTES = 2**24


@dataclasses.dataclass(frozen=True)
class HfModel:
    """A model directory whose headers were read and found in order.

    Attributes:
        directory: Where it is.
        config: The model's dimensions.
        files: Layouts of its safetensors files, by file name.
        extra: Bytes of tensors that are no parameters of their own, by name: buffers.
        end_ids: Tokens that end an answer, as its files say; there may be none.
        context_tokens: Length of the sequences that it can read, None if its files don't say.
    """

    directory: pathlib.Path
    config: ModelConfig
    files: Mapping[str, Layout]
    extra: Mapping[str, bytes]
    end_ids: tuple[int, ...]
    context_tokens: int | None

    def read(self, name: str) -> npt.NDArray[Any]:
        """Reads a tensor, in the type that the file has."""
        file = next(file for file, layout in self.files.items() if name in layout.entries)
        return read_tensor(self.directory / file, self.files[file], name)

    def beside(self) -> dict[str, pathlib.Path]:
        """Returns the files that belong to the model beside its weights, by name."""
        return {path.name: path for pattern in _COPIED for path in sorted(self.directory.glob(pattern))}


def open_hf_model(directory: str | os.PathLike[str]) -> HfModel:
    """Reads a model directory's configuration and the headers of its weights. Nothing is compiled.

    Raises:
        ValueError: If a file is missing or damaged, or the architecture, a tensor, its shape or its type is not one
            that is read here. The message names it.
    """
    directory = pathlib.Path(directory)
    settings, origin = _json(directory / CONFIG_FILE), repr(str(directory / CONFIG_FILE))
    config = from_hf_config(settings, origin=origin)
    files = _layouts(directory)
    entries = {name: (file, entry) for file, layout in files.items() for name, entry in layout.entries.items()}
    buffers = {name for name in entries if name.endswith(_BUFFER)}
    found = {name: entry.shape for name, (_, entry) in entries.items() if name not in buffers}
    if config.tied_embeddings and HEAD in found and EMBEDDING in found:
        _check_tied(directory, files, entries[HEAD][0], entries[EMBEDDING][0])
        del found[HEAD]
    check_tensors(config, found, origin=repr(str(directory)))
    for name in found:
        if entries[name][1].dtype not in DTYPES:
            raise ValueError(
                f"tensor {name!r} in {str(directory / entries[name][0])!r} is of type {entries[name][1].dtype}, only "
                f"{', '.join(DTYPES)} are read: take the model's files that are not quantised"
            )
    extra = {name: _raw(directory / entries[name][0], files[entries[name][0]], name) for name in sorted(buffers)}
    end_ids = read_end_ids(directory, settings, vocab_size=config.vocab_size)
    return HfModel(directory, config, files, extra, end_ids, context_tokens(settings, origin=origin))


def write_hf_model(
    directory: str | os.PathLike[str],
    config: ModelConfig,
    params: Any,
    *,
    files: Mapping[str, Layout],
    extra: Mapping[str, bytes] | None = None,
    beside: Mapping[str, pathlib.Path | str] | None = None,
) -> None:
    """Writes a model directory, in whole or not at all.

    Memory: one parameter, all layers of it, beside those that are there.

    Args:
        directory: Must not exist yet, or be empty.
        config: The model.
        params: Its parameters, without adapters.
        files: Layouts of the safetensors files, by name. Each tensor gets the type that its layout says.
        extra: Bytes of tensors that are no parameters.
        beside: Other files by name: a file to copy, or the text itself.

    Raises:
        ValueError: If `directory` is not empty.
    """
    with new_directory(directory) as partial, contextlib.ExitStack() as stack:
        for name, content in (beside or {}).items():
            if isinstance(content, pathlib.Path):
                shutil.copyfile(content, partial / name)
            else:
                (partial / name).write_text(content, encoding="utf-8")
        writer_of: dict[str, Writer] = {}
        for name, layout in files.items():
            writer = stack.enter_context(Writer(partial / name, layout))
            writer_of |= dict.fromkeys(layout.entries, writer)
        for leaf in leaves(config):
            for name, tensor in leaf.cut(_parameter(params, leaf)).items():
                writer_of[name].write(name, tensor)
                if name == EMBEDDING and config.tied_embeddings and HEAD in writer_of:
                    writer_of[HEAD].write(HEAD, tensor)
        for name, data in (extra or {}).items():
            writer_of[name].write_bytes(name, data)


@contextlib.contextmanager
def new_directory(directory: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Gives a directory to fill that gets its name when all is in it.

    Raises:
        ValueError: If there is something already.
    """
    target = pathlib.Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{str(target)!r} is not empty: give another directory to write to")
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    if target.exists():
        target.rmdir()
    os.replace(partial, target)


def _parameter(params: Any, leaf: Leaf) -> npt.NDArray[Any]:
    value = params
    for key in leaf.path:
        value = value[key]
    return np.asarray(value)


def _layouts(directory: pathlib.Path) -> dict[str, Layout]:
    """Reads the headers of all shards."""
    index_file = directory / INDEX_FILE
    if not index_file.exists():
        if not (directory / SINGLE_FILE).exists():
            others = sorted(path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in directory.glob(pattern))
            raise ValueError(
                f"there is neither {SINGLE_FILE} nor {INDEX_FILE} in {str(directory)!r}, but {others}: save the model "
                "as safetensors (transformers' `save_pretrained`), or give a GGUF file's own path"
            )
        return {SINGLE_FILE: read_layout(directory / SINGLE_FILE)}
    place_of = _json(index_file).get("weight_map")
    if not isinstance(place_of, dict) or not place_of:
        raise ValueError(f"{str(index_file)!r} has no weight_map: fetch it again")
    names = sorted(set(map(str, place_of.values())))
    outside = [name for name in names if pathlib.PurePath(name).name != name]
    if outside:  # an export writes files of the same names
        raise ValueError(f"{str(index_file)!r} names files outside its directory: {outside[:5]}; don't use this model")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ValueError(
            f"{len(missing)} of the {len(names)} shards named in {str(index_file)!r} are missing: {missing[:5]}; fetch "
            "them again"
        )
    files = {name: read_layout(directory / name) for name in names}
    found = {tensor: name for name, layout in files.items() for tensor in layout.entries}
    lost = [tensor for tensor, name in place_of.items() if tensor not in files[name].entries]
    unlisted = [tensor for tensor, name in found.items() if place_of.get(tensor) != name]
    if lost or unlisted:
        tensor = (lost or unlisted)[0]
        raise ValueError(
            f"{str(index_file)!r} and the shards contradict each other: tensor {tensor!r} should be in "
            f"{place_of.get(tensor)!r}, it is in {found.get(tensor)!r}; fetch them again"
        )
    return files


def _check_tied(directory: pathlib.Path, files: Mapping[str, Layout], head_file: str, embedding_file: str) -> None:
    """Compares the output projection with the embedding whose copy it is said to be."""
    head, embedding = files[head_file].entries[HEAD], files[embedding_file].entries[EMBEDDING]
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    with open(directory / head_file, "rb") as first, open(directory / embedding_file, "rb") as second:
        first.seek(head.start)
        second.seek(embedding.start)
        left = head.stop - head.start
        while same and left:
            size = min(left, _COMPARED_AT_ONCE_BYTES)
            same = first.read(size) == second.read(size)
            left -= size
    if not same:
        raise ValueError(
            f"{str(directory)!r} says tie_word_embeddings, but its {HEAD!r} is not its {EMBEDDING!r}: set "
            "tie_word_embeddings to false in config.json if the model has an output projection of its own"
        )


def _raw(path: pathlib.Path, layout: Layout, name: str) -> bytes:
    entry = layout.entries[name]
    with open(path, "rb") as file:
        file.seek(entry.start)
        return file.read(entry.stop - entry.start)


def _json(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except OSError as error:
        raise ValueError(
            f"can't read {str(path)!r}: {error.strerror or error}; a model directory has {CONFIG_FILE} and safetensors "
            "files"
        ) from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error}): fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} holds no JSON object: fetch it again")
    return content
