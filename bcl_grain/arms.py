"""Policies and baselines over the same job: the same records, in the same number of steps, of any number of ranks."""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np

from bcl_grain.baseline_runs import BASELINES
from bcl_grain.job import Job
from bcl_grain.planner import PlannerConfig, Policy
from bcl_grain.simulate import simulate_stream
from bcl_grain.tally import Tally

Progress = Callable[[int, int], None]
"""Is told how much is done, of how much."""

_BLOCKS = 64
"""Streams are simulated in at most so many blocks, whatever the number of processes, so that sums are alike."""


def policy_names() -> tuple[str, ...]:
    """Returns the names of all policies that run here: the planner's, then the baselines'.

    >>> policy_names()[:2]
    ('arrival', 'windowed')
    """
    return (*get_args(Policy), *BASELINES)


def run_policy(
    policy: str, job: Job, *, workers: int = 1, on_progress: Progress | None = None, **settings: Any
) -> Tally:
    """Simulates one arm.

    Args:
        policy: One of `policy_names()`.
        job: The job.
        workers: Processes that simulate streams; baselines take one. The figures don't depend on it.
        on_progress: Called now and then.
        settings: Further settings of `PlannerConfig`, for the planner's policies: `lookahead`, `order`, ...

    Returns:
        Sums over all ranks.

    Raises:
        ValueError: If the policy is unknown, a stream is too short for the settings, or a pack doesn't fit the layout.
        RuntimeError: If the arm did not consume every record of the job once.

    Memory: the planner's policies take that of `_BLOCKS` blocks' sums and one stream; baselines take all lengths.

    >>> from bcl_grain.costs import TransformerCost
    >>> from bcl_grain.draws import Draws
    >>> draws = Draws(population=np.arange(1, 500), kind="iid", streams=2, records=64 * 16)
    >>> job = Job(draws=draws, pack_size=64, cost=TransformerCost(1.0))
    >>> run_policy("windowed", job, lookahead=16).arm().cost_cv < 0.01 < run_policy("kk", job).arm().cost_cv
    True
    """
    if policy in get_args(Policy):
        tally = _planned(policy, job, workers, on_progress, settings)
    elif policy in BASELINES:
        tally = Tally.of(BASELINES[policy](job, on_progress or (lambda done, total: None)), job.first_step, job.end)
    else:
        raise ValueError(f"unknown policy {policy!r}: choose among {', '.join(policy_names())}")
    if tally.records != job.records or tally.step_max.size != job.steps:
        raise RuntimeError(
            f"{policy} consumed {tally.records} records in {tally.step_max.size} steps instead of {job.records} in "
            f"{job.steps}: this is a bug"
        )
    return tally


def _planned(policy: str, job: Job, workers: int, on_progress: Progress | None, settings: dict[str, Any]) -> Tally:
    config = PlannerConfig(
        policy=policy,  # type: ignore[arg-type]
        pack_size=job.pack_size,
        packs_per_step=job.packs_per_step,
        num_packs=job.steps * job.packs_per_step,
        seed=job.seed,
        **settings,
    )
    streams = job.draws.streams
    bounds = np.linspace(0, streams, min(streams, _BLOCKS) + 1).astype(int).tolist()
    total: Tally | None = None
    for stop, part in zip(bounds[1:], _blocks(config, job, bounds, workers), strict=True):
        if total is None:
            total = part
        else:
            total.add(part)
        if on_progress is not None:
            on_progress(stop, streams)
    assert total is not None  # a job has at least one stream
    return total


def _blocks(config: PlannerConfig, job: Job, bounds: list[int], workers: int) -> Iterator[Tally]:
    if workers < 2 or len(bounds) < 3:
        yield from (_block(config, job, start, stop) for start, stop in itertools.pairwise(bounds))
        return
    # JAX, which Grain imports, runs threads: a forked child could hang.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        count = len(bounds) - 1
        yield from pool.map(_block, [config] * count, [job] * count, bounds[:-1], bounds[1:])


def _block(config: PlannerConfig, job: Job, start: int, stop: int) -> Tally:
    total: Tally | None = None
    for index in range(start, stop):
        arrivals = job.draws.stream(index)
        run = simulate_stream(config, arrivals.lengths, job.cost, job.layout, job.kernel)
        part = Tally.of(run, job.first_step, job.end)
        if total is None:
            total = part
        else:
            total.add(part)
    assert total is not None
    return total
