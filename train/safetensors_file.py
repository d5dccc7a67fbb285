"""Reading and writing tensors of a safetensors file one at a time, bfloat16 included.

The format: 8 bytes, the header's length as a little-endian integer; the header, JSON that gives each tensor's type,
shape and place; then the tensors' bytes, row by row, without gaps. A header is kept as the bytes it was read as, so
that a file can be written anew exactly as it was. Nothing is mapped into memory: a file larger than the memory costs no
more than its largest tensor.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The types that parameters have. A file may hold others; reading such a tensor is an error."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a tensor lies.

    Attributes:
        dtype: Its type as the file names it.
        shape: Its shape.
        start: Its first byte, from the file's beginning.
        stop: One after its last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """A safetensors file without its tensors.

    Attributes:
        header: All that stands before the first tensor.
        entries: The tensors by name.
    """

    header: bytes
    entries: Mapping[str, Entry]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return max((entry.stop for entry in self.entries.values()), default=len(self.header))


def read_layout(path: str | os.PathLike[str]) -> Layout:
    """Reads a file's header and checks that the file has what it promises.

    Raises:
        ValueError: If it can't be read, is not of this format, or is cut off; the message names the file.
    """
    name = repr(os.fspath(path))
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise ValueError(f"{name} is no safetensors file, or cut off after {size} bytes: fetch it again")
            file.seek(0)
            header = file.read(_LENGTH_BYTES + length)
    except OSError as error:
        raise ValueError(f"can't read {name}: {error.strerror or error}") from error
    layout = Layout(header, _entries(header, name))
    if layout.num_bytes != size:
        raise ValueError(f"{name} has {size} bytes, its header promises {layout.num_bytes}: fetch it again")
    return layout


def new_layout(specs: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> Layout:
    """Returns the layout of a file that is to be written.

    Args:
        specs: (type, shape) of each tensor; they come in this order.
        metadata: Goes into the header.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for name, (dtype, shape) in specs.items():
        stop = place + math.prod(shape) * DTYPES[dtype].itemsize
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, stop]}
        place = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return Layout(header, _entries(header, "the new file"))


def read_tensor(path: str | os.PathLike[str], layout: Layout, name: str) -> npt.NDArray[Any]:
    """Reads one tensor.

    Raises:
        ValueError: If it is of a type that parameters don't have.
    """
    entry = layout.entries[name]
    if entry.dtype not in DTYPES:
        raise ValueError(
            f"tensor {name!r} in {os.fspath(path)!r} is of type {entry.dtype}, only {', '.join(DTYPES)} are read: take "
            "the model's files that are not quantised"
        )
    with open(path, "rb") as file:
        file.seek(entry.start)
        data = np.fromfile(file, np.uint8, entry.stop - entry.start)
    return data.view(DTYPES[entry.dtype]).reshape(entry.shape)


def fill(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    """Copies an array into another one, converted to its type; either may be a transposed view."""
    # Some rows at a time: their columns stay in cache, which makes a transposed copy three times as fast.
    for start in range(0, len(target), 64):
        target[start : start + 64] = source[start : start + 64]


class Writer:
    """Writes a file of a known layout, its tensors in any order. A context manager: the file is complete at the end.

    Args:
        path: Where to.
        layout: What it holds.
    """

    def __init__(self, path: pathlib.Path, layout: Layout) -> None:
        self._layout = layout
        self._missing = set(layout.entries)
        self._file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self._file.write(layout.header)
        self._file.truncate(layout.num_bytes)

    def write(self, name: str, tensor: npt.NDArray[Any]) -> None:
        """Writes a tensor, converted to the type that the layout gives it."""
        entry = self._layout.entries[name]
        assert tensor.shape == entry.shape, (name, tensor.shape, entry.shape)
        self._file.seek(entry.start)
        rows = np.empty(entry.shape, DTYPES[entry.dtype])
        fill(rows, tensor)
        self._file.write(rows.view(np.uint8).data)
        self._missing.remove(name)

    def write_bytes(self, name: str, data: bytes) -> None:
        """Writes a tensor's bytes as they are."""
        self._file.seek(self._layout.entries[name].start)
        self._file.write(data)
        self._missing.remove(name)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        assert kind is not None or not self._missing, f"tensors never written: {sorted(self._missing)}"


def _entries(header: bytes, name: str) -> dict[str, Entry]:
    """Returns the tensors that a header lists, in the order of their places."""
    try:
        table = json.loads(header[_LENGTH_BYTES:])
        table.pop("__metadata__", None)
        entries = {
            tensor: Entry(
                dtype=str(spec["dtype"]),
                shape=tuple(int(size) for size in spec["shape"]),
                start=len(header) + int(spec["data_offsets"][0]),
                stop=len(header) + int(spec["data_offsets"][1]),
            )
            for tensor, spec in table.items()
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"the header of {name} can't be read ({error!r}): fetch it again") from error
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    place = len(header)
    for tensor, entry in entries.items():
        known = DTYPES.get(entry.dtype)
        wanted = entry.stop - entry.start if known is None else math.prod(entry.shape) * known.itemsize
        if entry.start != place or entry.stop - entry.start != wanted or min(entry.shape, default=0) < 0:
            raise ValueError(
                f"the header of {name} is wrong about tensor {tensor!r}: bytes {entry.start} to {entry.stop} for shape "
                f"{entry.shape} of {entry.dtype}, where {wanted} bytes from {place} on were expected; fetch it again"
            )
        place = entry.stop
    return entries
