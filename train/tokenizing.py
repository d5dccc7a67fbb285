"""One pass over all rows of a source, in this process or, where that takes long, in several at once.

The records are the same either way, and in the rows' order.
"""

from __future__ import annotations

import collections
import concurrent.futures
import concurrent.futures.process
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
import time
import types
from collections.abc import Iterator

from train.chat_data import Block, RowReader, read_block
from train.sources import Source

BLOCK_ROWS = 64

MAX_WORKERS = 32

_PATIENCE_SECONDS = 10.0
"""Of work in this process, before others are started: they take some seconds to start."""


def read_blocks(source: Source, reader: RowReader, *, folder: str, workers: int | None = None) -> Iterator[Block]:
    """Yields the records of all rows, block by block.

    Args:
        source: The rows.
        reader: How a row becomes records.
        folder: See `read_block`.
        workers: Processes that work at once; 1 for this one. Default: this one, and if the work then takes more than
            some seconds, as many as there are CPUs for this process, at most `MAX_WORKERS`.

    Raises:
        ValueError: If a worker dies, or can't be started.
    """
    starts = range(0, len(source), BLOCK_ROWS)
    blocks = iter([range(start, min(start + BLOCK_ROWS, len(source))) for start in starts])
    patience_seconds = 0.0
    if workers is None:
        workers, patience_seconds = min(MAX_WORKERS, len(os.sched_getaffinity(0))), _PATIENCE_SECONDS
    begin = time.monotonic()
    while workers == 1 or time.monotonic() - begin < patience_seconds:
        rows = next(blocks, None)
        if rows is None:
            return
        yield read_block(source, rows, reader, folder=folder)
    yield from _read_in_parallel(source, list(blocks), reader, folder=folder, workers=workers)


def _read_in_parallel(
    source: Source, blocks: list[range], reader: RowReader, *, folder: str, workers: int
) -> Iterator[Block]:
    with concurrent.futures.ProcessPoolExecutor(
        workers,
        # A fork of a process with JAX's threads may hang.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(source, reader, folder),
    ) as pool:
        waiting: collections.deque[concurrent.futures.Future[Block]] = collections.deque()
        try:
            for rows in blocks:
                with _no_main_module():
                    waiting.append(pool.submit(_work, rows))
                if len(waiting) == 4 * workers:  # what is read must not pile up here
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except concurrent.futures.process.BrokenProcessPool as error:
            raise ValueError(
                f"one of {workers} processes that read rows died or could not start, perhaps for want of memory: lower "
                "runtime.data_workers (1 for none)"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keeps processes that are started meanwhile from importing this one's main module.

    They need nothing of it. The trainer's would cost each of them JAX: seconds, and some hundred MB.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _Worker:
    """What a worker process reads, set once."""

    source: Source
    reader: RowReader
    folder: str


def _begin(source: Source, reader: RowReader, folder: str) -> None:
    _Worker.source, _Worker.reader, _Worker.folder = source, reader, folder
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed can't end its workers, and these would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _work(rows: range) -> Block:
    return read_block(_Worker.source, rows, _Worker.reader, folder=_Worker.folder)
