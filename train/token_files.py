"""A source's tokens on disk, made once: later starts and other processes map them instead of tokenizing again.

What is kept lies in a directory that is named by all that the tokens depend on: the files (path, size, time of change),
tokenizer, template, settings, and the code itself. It is made beside its final place and moved there whole; of several
processes of a machine one makes it. It may be removed at any time.
"""

from __future__ import annotations

import array
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
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from bcl_grain.json_files import read_json
from train.chat_data import SHOWN_PROBLEMS, Block, Check, Problem, RowReader
from train.jsonl import FileStamp
from train.sources import open_source, source_files
from train.token_table import ENTRY, TokenTable
from train.tokenizing import read_blocks

Say = Callable[[str], None]

TOKENS_FILE, ENTRIES_FILE, FRACTIONS_FILE, ABOUT_FILE = "tokens.bin", "entries.npy", "fractions.npy", "about.json"

_FORMAT = 1
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
    stamps = [FileStamp.of(file.absolute()) for file in source_files(path)]

    def make(directory: pathlib.Path) -> None:
        source = open_source(path)
        blocks = read_blocks(source, reader, folder=str(pathlib.Path(path).parent), workers=workers)
        with tqdm(total=len(source), desc=path, unit=" rows", delay=2, leave=False, disable=not progress) as bar:
            _write(directory, blocks, len(source), bar.update)
        for stamp in stamps:
            stamp.check()

    try:
        if cache is None:
            with tempfile.TemporaryDirectory(prefix="tokens-") as temporary:
                make(pathlib.Path(temporary))
                return _read(pathlib.Path(temporary))  # what is mapped stays readable
        final = pathlib.Path(cache, _key(stamps, reader))
        with _only_one(final, say):
            if (found := _kept(final)) is not None:
                say(f"tokens of {path}: from {final}")
                return found
            _make_aside(final, make)
            return _read(final)
    except OSError as error:
        where = tempfile.gettempdir() if cache is None else os.fspath(cache)
        raise ValueError(
            f"can't keep the tokens of {path!r} in {where!r}: {error}; make room there, 4 bytes a token, or set "
            "runtime.token_cache to another directory"
        ) from error


def _key(stamps: Iterable[FileStamp], reader: RowReader) -> str:
    here = pathlib.Path(__file__)
    tokenizer, template = reader.chat_format.tokenizer, reader.chat_format.template
    ids = {name: value for name, value in vars(tokenizer).items() if name != "backend"}
    content = {
        "format": _FORMAT,
        "code": [here.with_name(f"{name}.py").read_text(encoding="utf-8") for name in _CODE],
        "libraries": [importlib.metadata.version(name) for name in _LIBRARIES],
        "files": [dataclasses.astuple(stamp) for stamp in stamps],
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
    entries, fractions = array.array("B"), array.array("d")
    start = num_broken = read = 0
    problems: list[Problem] = []
    with (directory / TOKENS_FILE).open("wb") as file:
        for block in blocks:
            moved = block.entries.copy()
            moved["start"] += start
            start += len(block.values)
            file.write(block.values.astype("<i4").tobytes())
            entries.frombytes(moved.tobytes())
            fractions.frombytes(block.fractions.tobytes())
            num_broken += block.num_broken
            problems += block.problems[: SHOWN_PROBLEMS - len(problems)]
            done(block.num_rows)
            read += block.num_rows
        _sync(file)
    assert read == num_rows, (read, num_rows)
    np.save(directory / ENTRIES_FILE, np.frombuffer(entries, ENTRY))
    np.save(directory / FRACTIONS_FILE, np.frombuffer(fractions, np.float64))
    about = {"num_rows": num_rows, "num_broken": num_broken, "problems": problems, "num_tokens": start}
    with (directory / ABOUT_FILE).open("w", encoding="utf-8") as file:
        json.dump(about, file)
        _sync(file)


def _read(directory: pathlib.Path) -> SourceTokens:
    about = read_json(directory / ABOUT_FILE)
    tokens = directory / TOKENS_FILE
    # A file of no bytes can't be mapped.
    values = np.memmap(tokens, "<i4", mode="r") if about["num_tokens"] else np.empty(0, np.int32)
    check = Check(
        num_rows=about["num_rows"],
        num_broken=about["num_broken"],
        problems=tuple(Problem(*problem) for problem in about["problems"]),
    )
    return SourceTokens(
        table=TokenTable((values,), np.load(directory / ENTRIES_FILE, allow_pickle=False)),
        fractions=np.load(directory / FRACTIONS_FILE, allow_pickle=False),
        check=check,
    )


def _kept(directory: pathlib.Path) -> SourceTokens | None:
    """Returns what is kept in a directory, or None if that is nothing, or damaged."""
    try:
        found = _read(directory)
        entries, (values,) = found.table.entries, found.table.blocks
        ends = entries["start"] + entries["stored"]
        whole = len(entries) == len(found.fractions) and len(values) == ends.max(initial=0)
    except (OSError, ValueError, EOFError, KeyError, TypeError):
        return None
    return found if whole else None


def _make_aside(final: pathlib.Path, make: Callable[[pathlib.Path], None]) -> None:
    aside = final.with_name(f"{final.name}.making-{socket.gethostname()}-{os.getpid()}")
    aside.mkdir()
    try:
        make(aside)
        shutil.rmtree(final, ignore_errors=True)  # damaged
        aside.rename(final)
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
