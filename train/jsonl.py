"""JSON Lines read at random: an index of where lines begin, and strict parsing of one line.

Also what the other formats share with it: JSON texts with limits, and files that must not change under an index.
"""

from __future__ import annotations

import array
import codecs
import dataclasses
import functools
import json
import os
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_LINE_BYTES = 4 * 2**20
"""Of one JSON text, by default: 20 times the longest meeting transcript among our samples."""

_PIECE_BYTES = 2**20


def parse_object(text: bytes, *, max_bytes: int = MAX_LINE_BYTES) -> dict[str, Any]:
    """Returns the JSON object in `text`, UTF-8.

    Raises:
        ValueError: If it is anything else, saying what.

    >>> parse_object(b'{"prompt": "hi"}')
    {'prompt': 'hi'}
    """
    if len(text) > max_bytes:
        raise _too_long(len(text), max_bytes)
    if text.startswith(codecs.BOM_UTF8):
        raise ValueError("a byte order mark in the middle of the file; remove it")
    if b"\0" in text:
        raise ValueError(f"a NUL byte at position {text.index(0)}: the file is damaged; restore the line")
    try:
        value = json.loads(text.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    except RecursionError as error:
        raise ValueError("JSON that nests too deep; flatten it") from error
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error}); write one JSON object a line") from error
    if not isinstance(value, dict):
        raise ValueError(f"want a JSON object, got a {type(value).__name__}: {value!r:.60}; write one object a line")
    return value


class FileChangedError(RuntimeError):
    """No row of the file can be trusted any more. Not a ValueError: it must not pass for a broken row."""


@dataclasses.dataclass(frozen=True)
class FileStamp:
    """Which state of a file was indexed: reading another one by the old index would give nonsense."""

    path: str
    size_bytes: int
    modified_ns: int

    @staticmethod
    def of(path: str | os.PathLike[str]) -> FileStamp:
        """Returns the stamp of a file as it is now.

        Raises:
            ValueError: If it can't be read.
        """
        try:
            status = os.stat(path)
        except OSError as error:
            raise ValueError(f"can't read {os.fspath(path)!r}: {error.strerror or error}; give another file") from error
        return FileStamp(os.fspath(path), status.st_size, status.st_mtime_ns)

    def check(self) -> None:
        """Raises FileChangedError if the file is no longer the one that was indexed."""
        if FileStamp.of(self.path) != self:
            raise FileChangedError(f"{self.path!r} was changed while in use; start again, and leave it alone meanwhile")


@dataclasses.dataclass(frozen=True, eq=False)
class JsonLines:
    """A JSON Lines file, by an index of where lines begin; made by `index_lines`.

    Attributes:
        file: The indexed file.
        offsets: int64 [rows + 1], where each row begins; the last one is the file's end.
        blank_lines: int64, line numbers (from 1) without a row.
        max_line_bytes: A longer row can't be read.
    """

    file: FileStamp
    offsets: npt.NDArray[np.int64]
    blank_lines: npt.NDArray[np.int64]
    max_line_bytes: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        # What may follow a row up to the next one are blank lines, and these may make any length.
        text = _open_for_reading(self.file).read(start, min(end - start, self.max_line_bytes + 2)).strip()
        if len(text) > self.max_line_bytes:
            raise _too_long(end - start, self.max_line_bytes)
        return parse_object(text, max_bytes=self.max_line_bytes)

    def line(self, index: int) -> int:
        """Returns the number of a row's line, from 1."""
        rows_before_blank = self.blank_lines - np.arange(1, len(self.blank_lines) + 1)
        return index + 1 + int(np.searchsorted(rows_before_blank, index, side="right"))

    def place(self, index: int) -> str:
        """Returns file and line in words."""
        return f"{self.file.path}, line {self.line(index)}"


def index_lines(path: str | os.PathLike[str], *, max_line_bytes: int = MAX_LINE_BYTES) -> JsonLines:
    """Indexes a JSON Lines file in one pass, in constant memory but for the index: 8 bytes a row.

    Blank lines hold no row; line ends may be LF or CRLF; a byte order mark at the file's start is not part of it.

    Raises:
        ValueError: If the file can't be read, holds no row, or is no JSON Lines file at all.
    """
    stamp = FileStamp.of(path)
    starts, blank = array.array("q"), array.array("q")
    with open(path, "rb") as file:
        begin = file.read(4)
        if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError(f"{stamp.path!r} is UTF-16; save it as UTF-8")
        position = len(codecs.BOM_UTF8) if begin.startswith(codecs.BOM_UTF8) else 0
        file.seek(position)
        number = 0
        at_line_start = True
        # A line is read in pieces of a bounded size: a file without line ends must not fill the memory.
        for piece in iter(lambda: file.readline(_PIECE_BYTES), b""):
            if at_line_start:
                number += 1
                if number == 1 and piece.strip() in (b"[", b"[{"):
                    raise ValueError(f"{stamp.path!r} is one JSON array over many lines; write one object a line")
                if piece.strip() or len(piece) == _PIECE_BYTES:
                    starts.append(position)
                else:
                    blank.append(number)
            position += len(piece)
            at_line_start = piece.endswith(b"\n")
    if not starts:
        raise ValueError(f"{stamp.path!r} holds no row; give one JSON object a line")
    starts.append(position)
    return JsonLines(stamp, np.asarray(starts), np.asarray(blank), max_line_bytes)


class _OpenFile:
    """An open file that any number of threads may read at once; closed with the last reference to it."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, size_bytes: int) -> bytes:
        return os.pread(self._descriptor, size_bytes, start)


@functools.lru_cache(maxsize=256)
def _open_for_reading(file: FileStamp) -> _OpenFile:
    # Cached by process, and not in the source: that one travels to other processes, where the descriptor means nothing.
    file.check()
    return _OpenFile(file.path)


def _too_long(size_bytes: int, max_bytes: int) -> ValueError:
    return ValueError(f"{size_bytes:,} bytes, over the limit of {max_bytes:,}; shorten it, or raise max_line_bytes")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
