"""Data files as rows, read at random: JSON Lines, ArrayRecord, Parquet and Hugging Face `datasets` directories.

A source says how many rows there are, reads any of them, and knows each one's place. It holds an index and no rows: a
file of 10 GB costs 8 bytes a line. A row that can't be read raises ValueError when it is read, not before, so that one
pass over a source finds them all; the file as a whole fails at once. Nothing is ever unpickled.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import glob
import itertools
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

import grain

from train.jsonl import MAX_LINE_BYTES, index_lines, parse_object

_SPLIT_NAMES = ("train", "validation", "valid", "val", "dev", "test", "eval")
_REFUSED = {
    **dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip"), "compressed text can't be read at random: unpack it"),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".pth", ".bin"), "pickles can run code: convert it to JSON Lines"),
    **dict.fromkeys((".csv", ".tsv", ".txt"), "convert it to JSON Lines"),
}


class Source(Protocol):
    """Rows that can be read in any order, by several threads, and by other processes."""

    def __len__(self) -> int:
        """Number of rows, those that can't be read included."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns a row. Raises ValueError, without the place, if it can't be read."""

    def place(self, index: int) -> str:
        """Returns file and line (or row, from 1) in words."""


def open_source(path: str | os.PathLike[str], *, max_line_bytes: int = MAX_LINE_BYTES) -> Source:
    """Opens a file, a directory of files of one kind, or a pattern such as "data/train-*.parquet".

    Files are taken in the order of their names.

    Args:
        path: `.jsonl` (also `.ndjson`, `.json`), `.array_record` holding JSON, `.parquet`, or a directory: of such
            files, or one that Hugging Face's `save_to_disk` wrote.
        max_line_bytes: A longer JSON text is a row that can't be read.

    Raises:
        ValueError: If there is nothing at `path` that can be read, saying what to do.
    """
    if _is_saved_dataset(where := pathlib.Path(path)):
        from train.tables import open_saved_dataset  # needs pyarrow, which only columnar files take

        return _joined(open_saved_dataset(where))
    return _joined([_open_file(file, max_line_bytes) for file in source_files(path)])


def source_files(path: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Returns the files that hold a source's rows, and its description where it has one, without reading them.

    Raises:
        ValueError: If there is nothing at `path`, or a directory holds files of several kinds.
    """
    where = pathlib.Path(path)
    if _is_saved_dataset(where):
        return sorted(file for file in where.iterdir() if file.suffix in (".arrow", ".json"))
    if where.is_dir():
        return _files_of_one_kind(where)
    if where.exists():
        return [where]
    files = sorted(map(pathlib.Path, glob.glob(os.fspath(path), recursive=True)))
    if not files:
        raise ValueError(f"there is no file {os.fspath(path)!r}; give a file, a directory or a pattern")
    return files


def source_folder(path: str | os.PathLike[str]) -> str:
    """Returns the directory below which a source's files lie, as their places name it.

    What follows it in a place stays when the data is moved, whether it was given as a directory, a file or a pattern.
    """
    where = pathlib.Path(path)
    if where.is_dir():
        return os.fspath(where)
    while not (where := where.parent).exists():  # a part of the pattern
        pass
    return os.fspath(where)


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayRecords:
    """An ArrayRecord file whose records are JSON objects."""

    path: str
    records: grain.sources.ArrayRecordDataSource
    max_line_bytes: int

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return parse_object(bytes(self.records[index]), max_bytes=self.max_line_bytes)

    def place(self, index: int) -> str:
        """Returns file and record in words."""
        return f"{self.path}, record {index + 1}"


@dataclasses.dataclass(frozen=True, eq=False)
class Concatenated:
    """Sources one after the other."""

    sources: tuple[Source, ...]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        source, inside = self._find(index)
        return source[inside]

    def place(self, index: int) -> str:
        """Returns the place in the source that holds the row."""
        source, inside = self._find(index)
        return source.place(inside)

    @functools.cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(map(len, self.sources)))

    def _find(self, index: int) -> tuple[Source, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        part = bisect.bisect_right(self._ends, index)
        return self.sources[part], index - (self._ends[part - 1] if part else 0)


def _is_saved_dataset(where: pathlib.Path) -> bool:
    return where.is_dir() and any((where / name).exists() for name in ("state.json", "dataset_dict.json"))


def _joined(sources: Sequence[Source]) -> Source:
    return sources[0] if len(sources) == 1 else Concatenated(tuple(sources))


def _open_file(path: pathlib.Path, max_line_bytes: int) -> Source:
    if path.suffix in (".jsonl", ".ndjson", ".json"):
        return index_lines(path, max_line_bytes=max_line_bytes)
    if path.suffix in (".array_record", ".arrayrecord"):
        try:
            records = grain.sources.ArrayRecordDataSource([os.fspath(path)])
            len(records)
        except Exception as error:  # the library raises what its C++ side made of it
            raise ValueError(f"can't read {os.fspath(path)!r} as ArrayRecord: {error}; write it again") from error
        return ArrayRecords(os.fspath(path), records, max_line_bytes)
    if path.suffix == ".parquet":
        from train.tables import open_parquet

        return open_parquet(path)
    reason = _REFUSED.get(path.suffix, "its name does not end in .jsonl, .array_record or .parquet")
    raise ValueError(f"can't read {os.fspath(path)!r}: {reason}")


def _files_of_one_kind(directory: pathlib.Path) -> list[pathlib.Path]:
    kinds: dict[str, list[pathlib.Path]] = {}
    for file in sorted(directory.rglob("*")):
        if file.suffix in (".jsonl", ".ndjson", ".array_record", ".arrayrecord", ".parquet") and file.is_file():
            kinds.setdefault(file.suffix, []).append(file)
    if len(kinds) != 1:
        found = ", ".join(f"{len(files)} {suffix}" for suffix, files in sorted(kinds.items())) or "none"
        raise ValueError(
            f"want data files of one kind in {os.fspath(directory)!r}, found {found}; name them by a pattern"
        )
    (files,) = kinds.values()
    splits = {name for file in files for name in _SPLIT_NAMES if file.name.startswith((f"{name}-", f"{name}."))}
    if len(splits) > 1:
        raise ValueError(
            f"{os.fspath(directory)!r} holds several splits ({', '.join(sorted(splits))}); name the files of one by a "
            f"pattern, such as {os.fspath(directory)}/train-*"
        )
    return files
