"""What the tables have in common: cost model, draws, pages, and a pool of processes."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bcl_grain.arms import run_policy
from bcl_grain.cost_prior import CostPrior
from bcl_grain.draws import Draws
from bcl_grain.inputs import read_lengths
from bcl_grain.job import Job
from bcl_grain.layouts import RowPackedLayout
from bcl_grain.models import KNOWN_MODELS
from bcl_grain.planner import PlannerConfig
from bcl_grain.priors import corpus_prior
from bcl_grain.simulate import chunks_cost, plan_stream
from bcl_grain.tally import Tally

MODEL = "llama-3.1-8b"
COST = KNOWN_MODELS[MODEL].cost()
PACK = 64
PAPER_CV_REDUCTION = 0.828
STEADY = (1_900, 2_900)
STEADY_JOB = 3_400
"""Steady figures are of steps 1,900 to 2,899, of a job that goes on: neither its start nor its end is in sight."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a run is made.

    Attributes:
        directory: Where pages, figures and data go.
        workers: Processes.
        scale: Steps are divided by it; 1 for published figures.
    """

    directory: Path
    workers: int
    scale: int

    def steps(self, steps: int, least: int = 128) -> int:
        """Returns `steps`, or fewer in a quick run."""
        return max(least, steps // self.scale)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Returns the results in order, from several processes, and says on standard error how far it has come."""
        todo = list(items)
        results = []
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(self.workers, mp_context=context) as pool:
            for i, result in enumerate(pool.map(function, todo), start=1):
                results.append(result)
                print(f"  {i} of {len(todo)}", file=sys.stderr, flush=True)
        return results


@dataclasses.dataclass(frozen=True)
class Page:
    """One table of the paper.

    Attributes:
        name: File name, without suffix.
        title: Its heading.
        text: Markdown below the heading.
        data: Everything in it, and more, as JSON.
        summary: One sentence for the index.
    """

    name: str
    title: str
    text: str
    data: dict[str, Any]
    summary: str


def population(workload: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the lengths of a workload's table."""
    return read_lengths(workload).values


def make_job(workload: str, *, ranks: int, steps: int, pack_size: int = PACK, seed: int = 0, **more: Any) -> Job:
    """Returns a job of independent draws from a workload, a stream for every `packs_per_step` ranks."""
    packs_per_step = more.get("packs_per_step", 1)
    draws = Draws(
        population=population(workload),
        kind="iid",
        streams=ranks // packs_per_step,
        records=steps * pack_size * packs_per_step,
        seed=seed,
    )
    return Job(draws=draws, pack_size=pack_size, cost=COST, seed=seed, **more)


def make_steady_job(workload: str, *, ranks: int, setting: Setting, **more: Any) -> Job:
    """Returns a job whose figures are steady ones."""
    steps = setting.steps(STEADY_JOB)
    first, last = (steps * step // STEADY_JOB for step in STEADY)
    return make_job(workload, ranks=ranks, steps=steps, first_step=first, last_step=last, **more)


def prior_of(workload: str, pack_size: int = PACK) -> CostPrior:
    """Returns the prior of a workload, as a user would take it from a sample of the records."""
    return corpus_prior(population(workload), COST, cost=f"transformer:{MODEL}", pack_size=pack_size).prior


def executed_by_row_length(
    policy: str, job: Job, lengths: Sequence[int], **settings: Any
) -> dict[int, np.ndarray[Any, np.dtype[np.float64]]]:
    """Returns for each row length the executed cost of the dearest rank, [steps]: plans once, lays out with each.

    Args:
        policy: One of the planner's.
        job: A trial, with a stream for each rank.
        lengths: Lengths to try.
        settings: The policy's.
    """
    config = PlannerConfig(
        policy=policy,  # type: ignore[arg-type]
        pack_size=job.pack_size,
        num_packs=job.steps,
        seed=job.seed,
        **settings,
    )
    executed = {length: np.zeros(job.steps) for length in lengths}
    for index in range(job.draws.streams):
        sizes = job.draws.stream(index).lengths
        packs = [sizes[pack] for pack in plan_stream(config, job.cost.of_length(sizes))]
        for length, dearest in executed.items():
            layout = RowPackedLayout(length=length, rows_per_chunk=1)
            costs = [chunks_cost(job.cost, layout.chunk_shapes(pack), pack, job.kernel) for pack in packs]
            np.maximum(dearest, costs, out=dearest)
    return executed


def best_row_length(executed: dict[int, np.ndarray[Any, np.dtype[np.float64]]], *, trials_per_step: int = 1) -> int:
    """Returns the row length of the least cost.

    Args:
        executed: As `executed_by_row_length` returns it.
        trials_per_step: Steps of the trial that stand for one of the job, where that has so many times as many ranks.
    """

    def cost(length: int) -> float:
        steps = executed[length]
        return float(np.maximum.reduceat(steps, range(0, steps.size, trials_per_step)).sum())

    return min(executed, key=cost)


def waste(tally: Tally) -> float:
    """Returns the sync waste over the steps of interest."""
    return tally.arm().sync_waste


def geometric_mean(values: Sequence[float]) -> float:
    """Returns the geometric mean."""
    return float(np.exp(np.mean(np.log(values))))


__all__ = [
    "COST",
    "MODEL",
    "PACK",
    "PAPER_CV_REDUCTION",
    "STEADY",
    "STEADY_JOB",
    "Page",
    "Setting",
    "best_row_length",
    "executed_by_row_length",
    "geometric_mean",
    "make_job",
    "make_steady_job",
    "population",
    "prior_of",
    "run_policy",
    "waste",
]
