"""One rank of `benchmarks.straggler`: runs the arms that a file describes, on one core, and writes when it did what.

`python -m benchmarks.straggler_rank JOB RANK`, started by the driver.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bcl_grain.chunks import Block, fill_chunks, pack_columns
from benchmarks.straggler_arms import SPMD, Work
from train.calibration import full_chunk
from train.compiling import CompileCounter
from train.model import ModelConfig
from train.processes import wait_for_all
from train.programs import compile_programs
from train.state import make_optimizer
from train.step import Chunk, init_state, train_step


class Rank:
    """Programs and state of this process.

    Attributes:
        config: Dimensions.
        programs: The decoupled step's, for every shape.
        spmd: The step as one program, by the rows of its shape.
        full: A chunk of each shape, without padding.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.config = ModelConfig(**job["model"])
        optimizer = make_optimizer(total_steps=10_000, learning_rate=1e-4)
        self.programs = compile_programs(self.config, optimizer, [tuple(shape) for shape in job["shapes"]])
        self.spmd = {
            rows: compile_programs(self.config, optimizer, [(rows, length)], spmd_packs=1)
            for rows, length in sorted({tuple(shape) for shape in job["spmd_shapes"]})
        }
        self.full = [full_chunk(shape, vocab_size=self.config.vocab_size) for shape in self.programs.shapes]
        self._state = init_state(self.programs, seed=0)

    def step(self, chunks: Sequence[Chunk], *, arm: str = "", observe: Any = None) -> Mapping[str, Any]:
        """Makes a step; returns its metrics before they are there."""
        programs = self.spmd[len(chunks[0]["tokens"])] if arm == SPMD else self.programs
        self._state, metrics = train_step(programs, self._state, [chunks], observe=observe)
        return metrics

    def timed_step(self, chunks: Sequence[Chunk], *, arm: str = "") -> StepTimes:
        """Makes a step, waiting after the local part and at the end."""
        local = busy = None
        begin, busy_begin = time.monotonic(), time.process_time()

        def observe(arrays: Sequence[jax.Array]) -> None:
            nonlocal local, busy
            wait(arrays)
            local, busy = time.monotonic(), time.process_time() - busy_begin

        metrics = self.step(chunks, arm=arm, observe=observe)
        self.wait()
        end = time.monotonic()
        # One program has no local part that could be told apart.
        return StepTimes(begin, end if local is None else local, end, busy, float(metrics["tokens"]))

    def wait(self) -> None:
        """Returns when the last step is over."""
        wait(self._state)

    def barrier(self) -> None:
        """Returns when all ranks have come here: a step without a chunk needs them all."""
        self.step([])
        self.wait()


class StepTimes(NamedTuple):
    """When a step began, when its local part was over and when the whole of it, in the machine's monotonic seconds.

    Attributes:
        begin: Its start.
        local: End of the local part.
        end: Its end.
        busy: Processor seconds of the local part, None where it can't be told apart.
        tokens: That the programs of all ranks counted.
    """

    begin: float
    local: float
    end: float
    busy: float | None
    tokens: float


def wait(tree: Any) -> Any:
    """Returns the arrays when they are there."""
    return jax.block_until_ready(tree)  # type: ignore[no-untyped-call]


def make_chunks(work: Work, vocab_size: int, seed: int) -> list[Chunk]:
    """Makes records of random tokens and lays them out as the work says."""
    rng = np.random.default_rng(seed)
    records = [
        {"tokens": rng.integers(0, vocab_size, n).astype(np.int32), "loss_mask": np.ones(n, np.float32)}
        for n in work.sizes
    ]
    columns = pack_columns(records, "tokens")
    blocks = (Block(length, tuple(heights), rows) for length, heights, rows in work.blocks)
    return [chunk for block in blocks for chunk in fill_chunks(block, columns, "tokens", 0)]


CALLS = 2
"""Chunks in a row that are timed together."""


def calibrate(rank: Rank, repeats: int) -> dict[str, Any]:
    """Times every chunk shape, all ranks at once as in a step, and the update."""
    seconds: list[list[float]] = [[] for _ in rank.full]
    busy: list[list[float]] = [[] for _ in rank.full]
    update = []
    for _ in range(repeats):
        for chunk, taken, worked in zip(rank.full, seconds, busy, strict=True):
            rank.barrier()
            times = rank.timed_step([chunk] * CALLS)
            taken.append((times.local - times.begin) / CALLS)
            worked.append((times.busy or 0.0) / CALLS)
        rank.barrier()
        times = rank.timed_step([])
        update.append(times.end - times.begin)
    return {
        "shapes": [list(shape) for shape in rank.programs.shapes],
        "seconds": seconds,
        "busy": busy,
        "update": update,
    }


def run_blocked(rank: Rank, arm: str, steps: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
    """Runs an arm, waiting after the local part and after the update."""
    rank.barrier()
    times = [rank.timed_step(chunks, arm=arm) for chunks in steps]
    columns = {name: [getattr(t, name) for t in times] for name in ("begin", "local", "end")}
    busy = [t.busy for t in times if t.busy is not None]
    return {**columns, "busy": busy, "tokens": sum(t.tokens for t in times)}


def run_free(rank: Rank, arm: str, steps: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
    """Runs an arm as a trainer does: the metrics of a step are read when the next one is under way."""
    rank.barrier()
    begin = time.monotonic()
    tokens, before = 0.0, None
    for chunks in steps:
        metrics = rank.step(chunks, arm=arm)
        if before is not None:
            tokens += float(before["tokens"])
        before = metrics
    assert before is not None
    tokens += float(before["tokens"])
    rank.wait()
    return {"seconds": time.monotonic() - begin, "tokens": tokens}


def warm_up(rank: Rank) -> None:
    """Runs every program once, in the same order on all ranks."""
    for chunk in rank.full:
        rank.timed_step([chunk])
    for rows in rank.spmd:
        rank.timed_step([next(chunk for chunk in rank.full if len(chunk["tokens"]) == rows)], arm=SPMD)
    rank.barrier()


def main() -> None:
    """Runs the job's turns in order and writes what happened."""
    job_path, index = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads(job_path.read_text())
    if job["cores"]:
        os.sched_setaffinity(0, {job["cores"][index]})
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # type: ignore[no-untyped-call]
    jax.distributed.initialize(job["coordinator"], num_processes=job["ranks"], process_id=index)
    # Ranks compile one after the other, and their first connection would not wait for more than half a minute.
    wait_for_all("start")
    begin = time.monotonic()
    rank = Rank(job)
    warm_up(rank)
    compile_seconds = time.monotonic() - begin
    counter = CompileCounter()
    calibrations, runs = [], []
    for turn in job["turns"]:
        if turn["kind"] == "calibrate":
            calibrations.append(calibrate(rank, turn["repeats"]))
            continue
        works = job["plans"][turn["corpus"]][turn["arm"]][index]
        steps = [
            make_chunks(Work(*work), rank.config.vocab_size, seed=1000 * index + s) for s, work in enumerate(works)
        ]
        run = run_blocked if turn["kind"] == "blocked" else run_free
        runs.append({**turn, **run(rank, turn["arm"], steps)})
    result = {
        "runs": runs,
        "calibrations": calibrations,
        "compile_seconds": compile_seconds,
        "late_programs": counter.programs,
        "core": sorted(os.sched_getaffinity(0)),
    }
    job_path.with_name(f"rank-{index}.json").write_text(json.dumps(result))
    jax.distributed.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
