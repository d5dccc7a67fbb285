"""Checksums of a checkpoint's files: storage that gives back other bytes than it took must not train on.

The formats inside a checkpoint notice a missing or truncated file, but a flipped bit among the parameters comes back as
another number. Checksums stand beside the checkpoint, not in it: it is whole before they can be made. One that lost
its checksums, because its run was killed at that moment, is taken unverified.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from bcl_grain.json_files import read_json

_PIECE_BYTES = 2**22


def write_checksums(directory: Path, path: Path) -> None:
    """Writes the size and CRC-32 of every file under `directory` to `path`, in whole or not at all.

    Raises:
        OSError: If a file can't be read or written.
    """
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({name: _checksum(directory / name) for name in _names(directory)}))
    os.replace(temporary, path)


def find_damage(directory: Path, path: Path) -> str | None:
    """Returns what is wrong with the files under `directory` by the list in `path`, or None.

    A list that does not exist finds nothing wrong.
    """
    if not path.exists():
        return None
    try:
        wanted = read_json(path)
        if not isinstance(wanted, dict):
            raise ValueError(f"expected an object, got {type(wanted).__name__}")
    except (OSError, ValueError) as error:
        return f"its checksums in {path} can't be read: {error}"
    found = set(_names(directory))
    if missing := sorted(wanted.keys() - found):
        return f"{missing[0]} is missing"
    for name, (size, checksum) in wanted.items():
        try:
            actual = _checksum(directory / name)
        except OSError as error:
            return f"{name} can't be read: {error.strerror or error}"
        if actual != [size, checksum]:
            return f"{name} has {actual[0]} bytes with checksum {actual[1]}, saved were {size} with {checksum}"
    return None


def remove_others(directory: Path, steps: Iterable[int]) -> None:
    """Removes the lists of checkpoints that are no more."""
    kept = {f"{step}.json" for step in steps}
    for path in directory.glob("*.json"):
        if path.name not in kept:
            path.unlink(missing_ok=True)


def _names(directory: Path) -> list[str]:
    return sorted(file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file())


def _checksum(path: Path) -> list[int]:
    """Returns size and CRC-32."""
    size = digest = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            size, digest = size + len(piece), zlib.crc32(piece, digest)
    return [size, digest]
