"""A source's tokens on disk, made once: later starts and other processes map them instead of tokenizing again.

What is kept lies in a directory that is named by all that the tokens depend on: the files (path, size, time of change),
tokenizer, template, settings, and the code itself. It is made beside its final place and moved there whole; of several
processes of a machine one makes it. Checksums tell whether it is whole: of a token's record when that is read, of all
else at once. It may be removed at any time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from bcl_grain.json_files import read_json
from train.chat_data import SHOWN_PROBLEMS, Block, Check, Problem, RowReader
from train.jsonl import FileChangedError, FileStamp
from train.sources import open_source, source_files, source_folder
from train.token_table import ENTRY, TokenTable
from train.tokenizing import read_blocks

Say = Callable[[str], None]
"""Takes a line for the user."""

TOKENS_FILE, ENTRIES_FILE, FRACTIONS_FILE, ABOUT_FILE = "tokens.bin", "entries.bin", "fractions.bin", "about.json"

_FORMAT = 2
_CODE = (
    *("chat", "chat_data", "chat_template", "chat_tokens", "conversations", "corpus", "jsonl", "sources", "tables"),
    *("token_files", "token_table", "tokenizers", "tokenizing"),
)
_LIBRARIES = ("jinja2", "numpy", "pyarrow", "tokenizers")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SourceTokens:
    """The records of a source.

    Attributes:
        table: The records.
        fractions: float64 [records], see `Block`.
        check: What the pass found.
    """

    table: TokenTable
    fractions: npt.NDArray[np.float64]
    check: Check


def source_tokens(
    path: str,
    reader: RowReader,
    *,
    cache: str | os.PathLike[str] | None,
    workers: int | None = None,
    say: Say = print,
    progress: bool = False,
) -> SourceTokens:
    """Returns the records of a source, from `cache` where they are there.

    Memory: 40 bytes a record. Disk: 4 bytes a token and 40 a record.

    Args:
        path: See `open_source`.
        reader: How a row becomes records.
        cache: Directory of what is kept. None keeps it until the process ends, in the system's temporary directory.
        workers: See `read_blocks`.
        say: Takes lines for the user.
        progress: Whether a bar shows how far the pass is.

    Raises:
        ValueError: If the source can't be read or changes meanwhile, or there is no room for the tokens.
    """
    files, folder = source_files(path), source_folder(path)
    stamps = [FileStamp.of(file.absolute()) for file in files]

    def make(directory: pathlib.Path) -> None:
        try:
            source = open_source(path)
        except OSError as error:
            raise ValueError(f"can't read {path!r}: {error}; give another file, or the right to read it") from error
        blocks = read_blocks(source, reader, folder=folder, workers=workers)
        with tqdm(total=len(source), desc=path, unit=" rows", delay=2, leave=False, disable=not progress) as bar:
            _write(directory, blocks, len(source), bar.update)
        for stamp in stamps:
            stamp.check()
        if source_files(path) != files:
            raise FileChangedError(f"files came or went under {path!r} while in use; start again, and leave them alone")

    try:
        if cache is None:
            with tempfile.TemporaryDirectory(prefix="tokens-") as temporary:
                make(pathlib.Path(temporary))
                return _read(pathlib.Path(temporary))  # what is mapped stays readable
        final = pathlib.Path(cache, _key(stamps, folder, reader))
        found = _kept(final)  # before any lock: the directory may be one that can only be read
        if found is None:
            with _only_one(final, say):
                found = _kept(final)
                if found is None:
                    _make_aside(final, make)
                    return _read(final)
        say(f"tokens of {path}: from {final}")
        return found
    except OSError as error:
        where = tempfile.gettempdir() if cache is None else os.fspath(cache)
        raise ValueError(
            f"can't keep the tokens of {path!r} in {where!r}: {error}; make room there, 4 bytes a token, or set "
            "runtime.token_cache to another directory"
        ) from error


def _key(stamps: Iterable[FileStamp], folder: str, reader: RowReader) -> str:
    here = pathlib.Path(__file__)
    tokenizer, template = reader.chat_format.tokenizer, reader.chat_format.template
    ids = {name: value for name, value in vars(tokenizer).items() if name != "backend"}
    content = {
        "format": _FORMAT,
        "code": [here.with_name(f"{name}.py").read_text(encoding="utf-8") for name in _CODE],
        "libraries": [importlib.metadata.version(name) for name in _LIBRARIES],
        "files": [dataclasses.astuple(stamp) for stamp in stamps],
        "folder": os.path.abspath(folder),
        "tokenizer": [tokenizer.backend.to_str(), ids],
        "template": [template.source, template.tool_source, dict(template.variables), str(template.date)],
        "reader": [
            reader.train_on,
            dataclasses.asdict(reader.columns),
            reader.tool_format,
            reader.by_answer,
        ],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def _write(directory: pathlib.Path, blocks: Iterable[Block], num_rows: int, done: Callable[[int], Any]) -> None:
    start = num_broken = read = entries_checksum = fractions_checksum = 0
    problems: list[Problem] = []
    with contextlib.ExitStack() as opened:
        names = (TOKENS_FILE, ENTRIES_FILE, FRACTIONS_FILE)
        files = [opened.enter_context((directory / name).open("wb")) for name in names]
        for block in blocks:
            moved = block.entries.copy()
            moved["start"] += start
            start += len(block.values)
            contents = block.values.astype("<i4").tobytes(), moved.tobytes(), block.fractions.tobytes()
            for file, content in zip(files, contents, strict=True):
                file.write(content)
            entries_checksum = zlib.crc32(contents[1], entries_checksum)
            fractions_checksum = zlib.crc32(contents[2], fractions_checksum)
            num_broken += block.num_broken
            problems += block.problems[: SHOWN_PROBLEMS - len(problems)]
            done(block.num_rows)
            read += block.num_rows
        for file in files:
            _sync(file)
    assert read == num_rows, (read, num_rows)
    about = {
        "num_rows": num_rows,
        "num_broken": num_broken,
        "problems": problems,
        "num_tokens": start,
        "checksums": [entries_checksum, fractions_checksum],
    }
    with (directory / ABOUT_FILE).open("w", encoding="utf-8") as text:
        json.dump({"about": about, "checksum": _checksum(about)}, text)
        _sync(text)


def _read(directory: pathlib.Path) -> SourceTokens:
    """Returns what is in a directory.

    Raises:
        OSError: If it can't be read, or is not what was written.
    """
    try:
        sealed = read_json(directory / ABOUT_FILE)
        about = sealed["about"]
        whole = sealed["checksum"] == _checksum(about)
    except (ValueError, TypeError, KeyError):
        whole = False
    if whole:
        tokens = directory / TOKENS_FILE
        entries = np.fromfile(directory / ENTRIES_FILE, ENTRY)
        fractions = np.fromfile(directory / FRACTIONS_FILE, np.float64)
        whole = [zlib.crc32(part.view(np.uint8).data) for part in (entries, fractions)] == about["checksums"]
    if not whole or tokens.stat().st_size != 4 * about["num_tokens"]:
        raise OSError(f"{str(directory)!r} does not hold what was written there: remove it, it is made anew")
    # A file of no bytes can't be mapped.
    values = np.memmap(tokens, "<i4", mode="r") if about["num_tokens"] else np.empty(0, np.int32)
    check = Check(
        num_rows=about["num_rows"],
        num_broken=about["num_broken"],
        problems=tuple(Problem(*problem) for problem in about["problems"]),
    )
    return SourceTokens(table=TokenTable((values,), entries), fractions=fractions, check=check)


def _checksum(about: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _kept(directory: pathlib.Path) -> SourceTokens | None:
    """Returns what is kept in a directory, or None if that is nothing, or damaged."""
    try:
        return _read(directory)
    except OSError:
        return None


def _make_aside(final: pathlib.Path, make: Callable[[pathlib.Path], None]) -> None:
    aside = final.with_name(f"{final.name}.making-{socket.gethostname()}-{os.getpid()}")
    shutil.rmtree(final, ignore_errors=True)  # damaged
    aside.mkdir()
    try:
        make(aside)
        try:
            aside.rename(final)
        except OSError:
            if _kept(final) is None:  # else a host was faster whose lock is not seen here
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _only_one(final: pathlib.Path, say: Say) -> Iterator[None]:
    """Keeps other processes from the block; what one of them left half made is removed."""
    final.parent.mkdir(parents=True, exist_ok=True)
    with final.with_name(f"{final.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process makes the tokens in {os.fspath(final)!r}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Only this host's: where a shared file system keeps locks to a host, another one may be at work beside us.
        for left in final.parent.glob(f"{final.name}.making-{socket.gethostname()}-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
