"""Columnar files as rows: Parquet, and the directories that Hugging Face's `datasets` library saves.

The library writes Arrow files, which are mapped into memory and read at random at no cost. Parquet is compressed by row
group, so that a row costs the decoding of its group: groups are kept while they fit `CACHE_BYTES`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import os
import pathlib
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from bcl_grain.json_files import read_json
from train.jsonl import FileStamp

CACHE_BYTES = 2**30
"""Decoded row groups that a process keeps. A larger single group is refused."""

WARN_BYTES = 2**24
"""From this size of a row group on, reading a file at random that does not fit `CACHE_BYTES` is slow."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class ParquetRows:
    """A Parquet file; made by `open_parquet`.

    Attributes:
        file: The file.
        group_ends: int64 [row groups], rows up to the end of each group.
    """

    file: FileStamp
    group_ends: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.group_ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        group, inside = _locate(self.group_ends, index)
        return _row(_groups.get(self.file, group), inside)

    def place(self, index: int) -> str:
        """Returns file and row in words."""
        return f"{self.file.path}, row {index + 1}"


@dataclasses.dataclass(frozen=True, eq=False)
class ArrowRows:
    """An Arrow file of record batches; made by `open_saved_dataset`.

    Attributes:
        file: The file.
        batch_ends: int64 [batches], rows up to the end of each batch.
    """

    file: FileStamp
    batch_ends: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.batch_ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch, inside = _locate(self.batch_ends, index)
        return _row(_mapped_batches(self.file)[batch], inside)

    def place(self, index: int) -> str:
        """Returns file and row in words."""
        return f"{self.file.path}, row {index + 1}"


def open_parquet(path: str | os.PathLike[str]) -> ParquetRows:
    """Opens a Parquet file; reads its footer only.

    Raises:
        ValueError: If it is none, holds no row, or has a row group larger than `CACHE_BYTES`.
    """
    file = FileStamp.of(path)
    try:
        with pq.ParquetFile(path) as opened:
            metadata = opened.metadata
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"can't read {file.path!r} as Parquet: {error}; write it again") from error
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    if not metadata.num_rows:
        raise ValueError(f"{file.path!r} holds no row; leave it out")
    largest_bytes = max(group.total_byte_size for group in groups)
    remedy = "rewrite it with pyarrow.parquet.write_table(..., row_group_size=1000), or as JSON Lines"
    if largest_bytes > CACHE_BYTES:
        raise ValueError(
            f"{file.path!r} has a row group of {largest_bytes:,} bytes, over the limit of {CACHE_BYTES:,} bytes in "
            f"memory at once; {remedy}"
        )
    if sum(group.total_byte_size for group in groups) > CACHE_BYTES and largest_bytes > WARN_BYTES:
        _log.warning("%s: a row read at random decodes %s bytes; %s", file.path, f"{largest_bytes:,}", remedy)
    return ParquetRows(file, np.cumsum([group.num_rows for group in groups], dtype=np.int64))


def open_saved_dataset(directory: str | os.PathLike[str]) -> list[ArrowRows]:
    """Opens a directory that `datasets.Dataset.save_to_disk` wrote, file by file in its order.

    Raises:
        ValueError: If the directory holds several splits, is incomplete, or its files can't be read.
    """
    folder = pathlib.Path(directory)
    if (folder / "dataset_dict.json").exists():
        splits = _described(folder / "dataset_dict.json").get("splits")
        raise ValueError(
            f"{str(folder)!r} holds the splits {splits}: give the directory of one, such as {folder}/train"
        )
    state = _described(folder / "state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ValueError(f"{str(folder)!r} selects rows by an index; call flatten_indices() before saving it")
    files = [entry.get("filename", "") for entry in state.get("_data_files", []) if isinstance(entry, dict)]
    # A description from elsewhere must not point out of its directory.
    if not files or any(not name or pathlib.PurePath(name).name != name for name in files):
        raise ValueError(f"{str(folder / 'state.json')!r} names the data files {files}; save the data set again")
    opened = [_open_arrow(folder / name) for name in files]
    if not sum(map(len, opened)):
        raise ValueError(f"{str(folder)!r} holds no row; give another data set")
    return opened


def _open_arrow(path: pathlib.Path) -> ArrowRows:
    file = FileStamp.of(path)
    return ArrowRows(file, np.cumsum([batch.num_rows for batch in _mapped_batches(file)] or [0], dtype=np.int64))


@functools.lru_cache(maxsize=256)
def _mapped_batches(file: FileStamp) -> list[pa.RecordBatch]:
    """Returns the batches of an Arrow file, mapped into memory and not read. Cached by process: maps can't travel."""
    file.check()
    try:
        return list(pa.ipc.open_stream(pa.memory_map(file.path)))
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"can't read {file.path!r} as an Arrow stream: {error}; save the data set again") from error


class _Groups:
    """The row groups last used in this process, up to `CACHE_BYTES` in all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: collections.OrderedDict[tuple[FileStamp, int], pa.Table] = collections.OrderedDict()

    def get(self, file: FileStamp, group: int) -> pa.Table:
        key = (file, group)
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key]
        table = _read_group(file, group)
        with self._lock:
            self._tables[key] = table
            while len(self._tables) > 1 and sum(kept.nbytes for kept in self._tables.values()) > CACHE_BYTES:
                self._tables.popitem(last=False)
        return table


_groups = _Groups()


def _read_group(file: FileStamp, group: int) -> pa.Table:
    file.check()
    try:
        with pq.ParquetFile(file.path) as opened:
            return opened.read_row_group(group)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"can't decode row group {group} of {file.path!r}: {error}; write the file again") from error


def _locate(ends: npt.NDArray[np.int64], index: int) -> tuple[int, int]:
    """Returns which part holds row `index`, and the row's number inside it."""
    if not 0 <= index < ends[-1]:
        raise IndexError(f"row {index} of {ends[-1]}")
    part = int(np.searchsorted(ends, index, side="right"))
    return part, index - (int(ends[part - 1]) if part else 0)


def _row(rows: pa.Table | pa.RecordBatch, index: int) -> dict[str, Any]:
    try:
        row: dict[str, Any] = rows.slice(index, 1).to_pylist()[0]
    except (UnicodeDecodeError, pa.ArrowException) as error:
        raise ValueError(f"a value that can't be read ({error}); repair the row") from error
    return row


def _described(file: pathlib.Path) -> dict[str, Any]:
    try:
        value = read_json(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"can't read {str(file)!r}: {error}; save the data set again") from error
    return value if isinstance(value, dict) else {}
