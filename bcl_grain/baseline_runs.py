"""Runs the baselines over a simulated job, counted as the planner's policies are."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bcl_grain.baselines import Assignment, BinAssignment, global_karmarkar_karp, length_grouped, mffd_steps
from bcl_grain.grain_packing import Algorithm, grain_packed_steps
from bcl_grain.job import Job, rank_lengths
from bcl_grain.simulate import StreamRun, chunks_cost

IntArray = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]

_RECORDS_AT_ONCE = 50_000
"""Assignments are Python lists, which are large: where a baseline goes step by step, some steps are made at a time."""


class _Part(NamedTuple):
    """Some consecutive steps of a job.

    Attributes:
        sizes: [n] lengths of the records.
        packs: Records by [rank][step], places in `sizes`.
        num_bins: Bins by [rank][step], or None where records are in packs that a layout turns into chunks.
    """

    sizes: IntArray
    packs: Assignment
    num_bins: list[list[int]] | None


def _mffd(job: Job, on_progress: Progress) -> Iterator[_Part]:
    for lengths in _some_steps(job, on_progress):
        yield _binned(lengths, mffd_steps(lengths, capacity=job.bin_capacity, pack_size=job.pack_size))


def _kk(job: Job, on_progress: Progress) -> Iterator[_Part]:
    for lengths in _some_steps(job, on_progress):
        costs = job.cost.of_length(lengths)
        yield _Part(lengths.ravel(), global_karmarkar_karp(costs, pack_size=job.pack_size), None)


def _length_grouped(job: Job, on_progress: Progress) -> Iterator[_Part]:
    lengths = rank_lengths(job)
    yield _Part(lengths.ravel(), length_grouped(lengths, pack_size=job.pack_size, seed=job.seed), None)
    on_progress(job.steps, job.steps)


def _grain_packed(job: Job, on_progress: Progress, *, algorithm: Algorithm) -> Iterator[_Part]:
    lengths = rank_lengths(job)
    bins: BinAssignment = []
    for rank, stream in enumerate(lengths):
        (steps,) = grain_packed_steps(
            stream[None], algorithm=algorithm, row_length=job.bin_capacity, num_steps=job.steps, seed=job.seed
        )
        bins.append([[[i + rank * stream.size for i in row] for row in step] for step in steps])
        on_progress(rank + 1, len(lengths))
    yield _binned(lengths, bins)


def _some_steps(job: Job, on_progress: Progress) -> Iterator[IntArray]:
    """Yields the lengths [ranks, n] of a few steps at a time."""
    lengths = rank_lengths(job)
    at_once = max(1, _RECORDS_AT_ONCE // (job.ranks * job.pack_size))
    for step in range(0, job.steps, at_once):
        yield lengths[:, step * job.pack_size : (step + at_once) * job.pack_size]
        on_progress(min(step + at_once, job.steps), job.steps)


def _binned(lengths: IntArray, bins: BinAssignment) -> _Part:
    packs = [[[i for members in step for i in members] for step in steps] for steps in bins]
    return _Part(lengths.ravel(), packs, [[len(step) for step in steps] for steps in bins])


def _run(make: Callable[[Job, Progress], Iterator[_Part]], job: Job, on_progress: Progress) -> StreamRun:
    """Counts what a baseline makes of a job."""
    estimated, executed = [], []
    records = tokens = laid_out = bins = 0
    planning_seconds = 0.0
    parts = make(job, on_progress)
    while True:
        begin = time.perf_counter()
        part = next(parts, None)
        planning_seconds += time.perf_counter() - begin
        if part is None:
            break
        _check_once(part)
        costs = job.cost.of_length(part.sizes)
        estimated.append(np.array([[costs[pack].sum() for pack in steps] for steps in part.packs]))
        records, tokens = records + part.sizes.size, tokens + int(part.sizes.sum())
        bins += sum(map(sum, part.num_bins or []))
        if part.num_bins is not None or job.layout is not None:
            run, run_tokens = _lay_out(part, job)
            executed.append(run)
            laid_out += run_tokens
    return StreamRun(
        estimated=np.concatenate(estimated, axis=1),
        executed=np.concatenate(executed, axis=1) if executed else None,
        useful_tokens=tokens,
        executed_tokens=laid_out if executed else None,
        records=records,
        max_wait_cycles=None,
        planning_seconds=planning_seconds,
        bins=bins or None,
    )


def _lay_out(part: _Part, job: Job) -> tuple[npt.NDArray[np.float64], int]:
    """Returns executed costs [ranks, steps], and executed tokens. A bin runs as one row of its capacity."""
    tokens = 0
    costs = np.empty((len(part.packs), len(part.packs[0])))
    for rank, steps in enumerate(part.packs):
        for step, pack in enumerate(steps):
            sizes = part.sizes[pack]
            if part.num_bins is not None:
                shapes = [(1, job.bin_capacity)] * part.num_bins[rank][step]
            else:
                assert job.layout is not None
                shapes = job.layout.chunk_shapes(sizes)
            costs[rank, step] = chunks_cost(job.cost, shapes, sizes, job.kernel)
            tokens += sum(rows * length for rows, length in shapes)
    return costs, tokens


def _check_once(part: _Part) -> None:
    """Raises unless every record is in one pack."""
    places = np.concatenate([pack for steps in part.packs for pack in steps]).astype(np.int64)
    if not np.array_equal(np.sort(places), np.arange(part.sizes.size)):
        raise RuntimeError("a baseline lost a record or gave one twice: this is a bug")


BASELINES: dict[str, Callable[[Job, Progress], StreamRun]] = {
    "mffd": functools.partial(_run, _mffd),
    "kk": functools.partial(_run, _kk),
    "length-grouped": functools.partial(_run, _length_grouped),
    "grain-first-fit": functools.partial(_run, functools.partial(_grain_packed, algorithm="first_fit")),
    "grain-best-fit": functools.partial(_run, functools.partial(_grain_packed, algorithm="best_fit")),
}
"""What a user would run instead, by name."""
