"""Several processes make the same records as one; when one of them dies, or the first, nothing waits for ever."""

from __future__ import annotations

import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

import train.tokenizing
from tests.chat_formats import CHATML_TOOLS, chat_format
from train.chat_data import Block, RowReader
from train.sources import Source, open_source
from train.tokenizing import BLOCK_ROWS, read_blocks

READER = RowReader(chat_format=chat_format(CHATML_TOOLS))
ROWS = 9 * BLOCK_ROWS + 3  # more than two processes may have before them

ENDLESS = """
import itertools, sys, time
from tests.test_tokenizing import READER
from train.sources import open_source
from train.tokenizing import read_blocks

class Slow:
    def __init__(self, source): self.source = source
    def __len__(self): return 10**6
    def __getitem__(self, row): return self.source[row % len(self.source)]
    def place(self, row): return str(row)
"""


@pytest.fixture
def source(tmp_path: pathlib.Path) -> Source:
    rows = [json.dumps({"prompt": f"question {i}", "response": "hello " * (1 + i % 7)}) for i in range(ROWS)]
    rows[200] = "{"
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    return open_source(tmp_path / "data.jsonl")


def read(source: Source, workers: int | None) -> list[Block]:
    return list(read_blocks(source, READER, folder="", workers=workers))


@pytest.mark.parametrize("workers", [2, None])
def test_several_processes_make_the_same_records(
    source: Source, workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With None, others are started behind the first block."""
    monkeypatch.setattr(train.tokenizing, "_PATIENCE_SECONDS", 1e-9)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    alone, several = read(source, 1), read(source, workers)
    assert len(alone) == 10
    assert sum(block.num_rows for block in alone) == ROWS
    for one, other in zip(alone, several, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            np.testing.assert_equal(mine, theirs)
    assert [block.num_broken for block in several] == [0, 0, 0, 1, *[0] * 6]


def test_a_worker_that_dies_is_an_error(source: Source) -> None:
    blocks = read_blocks(source, READER, folder="", workers=2)
    next(blocks)
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGKILL)
    with pytest.raises(ValueError, match=r"one of 2 processes that read rows died .* lower runtime\.data_workers"):
        list(blocks)


def test_workers_end_when_the_reading_is_given_up(source: Source) -> None:
    before = set(multiprocessing.active_children())
    blocks = read_blocks(source, READER, folder="", workers=2)
    next(blocks)
    started = set(multiprocessing.active_children()) - before
    assert started
    blocks.close()  # type: ignore[attr-defined]
    assert not any(child.is_alive() for child in started)


def test_workers_end_with_a_parent_that_is_killed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "hi", "response": "yo"}\n')
    (tmp_path / "slow.py").write_text(ENDLESS)
    script = (
        "import multiprocessing, sys, slow\n"
        f"blocks = slow.read_blocks(slow.Slow(slow.open_source({str(tmp_path / 'data.jsonl')!r})), slow.READER, "
        "folder='', workers=2)\n"
        "next(blocks)\n"
        "print(*(child.pid for child in multiprocessing.active_children()), flush=True)\n"
        "for _ in blocks: pass\n"
    )
    root = pathlib.Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(tmp_path)])}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    try:
        return pathlib.Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_workers_do_not_import_the_main_module(source: Source, tmp_path: pathlib.Path) -> None:
    """A script without a guard would start itself anew in each of them; the trainer would cost each of them JAX."""
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "from tests.test_tokenizing import READER\n"
        "from train.sources import open_source\n"
        "from train.tokenizing import read_blocks\n"
        "print('main')\n"
        f"print(sum(b.num_rows for b in read_blocks(open_source({str(tmp_path / 'data.jsonl')!r}), READER, folder='', "
        "workers=2)))\n"
        "assert sys.modules['__main__'].READER is READER\n"
    )
    root = pathlib.Path(__file__).parents[1]
    done: Any = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["main", str(ROWS)]
