"""Planning a whole job from the sizes of its records, before anything is compiled.

A step that is one program has packs of one shape. Almost all of them fit one that holds the average and a little more,
but the last ones of a job take what the pool has left: a pack that does not fit would end the run there, hours in.
Everything that a plan depends on is known beforehand, so it is made beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from bcl_grain.cost_prior import CostPrior
from bcl_grain.costs import TransformerCost
from bcl_grain.planner import FILLER, PlannerConfig
from bcl_grain.rows import first_fit_decreasing
from bcl_grain.simulate import plan_stream
from train.config import BalanceConfig
from train.data import JobSize, arrival_sizes, planner_settings
from train.tokenizers import IntArray

T = TypeVar("T")

_TRIES = 32


def rows_that_fit(
    sizes: IntArray,
    job: JobSize,
    *,
    rows: int,
    length: int,
    fixed: bool,
    cost: TransformerCost,
    balance: BalanceConfig,
    prior: CostPrior | None,
    seed: int,
    progress: bool = False,
) -> int:
    """Returns the fewest rows of `length` tokens that hold every pack of a job, `rows` or more.

    A plan for fewer rows than its packs turn out to need says little of how many do: packs are fitted to what is there.

    Args:
        sizes: int32 [records], tokens of each record of the corpus.
        job: The job's size.
        rows: Rows to begin with.
        length: Tokens of a row.
        fixed: Whether more than `rows` are an error.
        cost: Cost of a record.
        balance: How records become packs; its lanes are settled.
        prior: What all lanes know of the mean cost.
        seed: Key of the shuffle and of the order.
        progress: Whether a bar shows how far the plan is.

    Raises:
        ValueError: If more rows are needed and `fixed`; it names the step and the remedy.

    Complexity: reading and planning the job, some 10 us a record; planning once for each number of rows that is tried.
    """
    assert balance.lanes is not None
    lanes = [
        arrival_sizes(sizes, job, seed=seed, shard=lane, num_shards=balance.lanes)
        for lane in _shown("reads sizes", range(balance.lanes), progress)
    ]
    first_needed: tuple[int, int] | None = None
    for tried in range(rows, rows + _TRIES):
        of_lanes = [
            _rows_of_steps(lane, job, (tried, length), cost, balance, prior, seed)
            for lane in _shown(f"plans the job, {tried} rows", lanes, progress)
        ]
        needed = np.max(of_lanes, axis=0)
        if needed.max() <= tried:
            break
        if first_needed is None:
            step = int(np.argmax(needed > tried))
            first_needed = step + 1, int(needed[step])
    else:
        raise ValueError(
            f"packs of this job fit no shape of {rows} to {tried} rows of {length} tokens: raise the length, or use "
            "step='decoupled' with a layout of several shapes"
        )
    if fixed and first_needed is not None:
        raise ValueError(
            f"a pack of step {first_needed[0]} of {job.steps} needs {first_needed[1]} rows of {length} tokens, but the "
            f"layout has {rows}: set layout.rows={tried}, with which every pack of the job fits"
        )
    return tried


def _shown(what: str, lanes: Iterable[T], progress: bool) -> Iterable[T]:
    shown: Iterable[T] = tqdm(lanes, desc=what, unit=" lanes", delay=2, leave=False, disable=not progress)
    return shown


def _rows_of_steps(
    lengths: IntArray,
    job: JobSize,
    capacity: tuple[int, int],
    cost: TransformerCost,
    balance: BalanceConfig,
    prior: CostPrior | None,
    seed: int,
) -> IntArray:
    """Returns the rows that a lane's largest pack of each step needs, [steps]."""
    settings = planner_settings(job, balance, prior=prior, seed=seed)
    config = PlannerConfig(**settings, capacity=capacity, on_overflow="extra_chunk")
    rows = [
        len(first_fit_decreasing(lengths[[i for i in pack if i != FILLER]].tolist(), capacity[1]))
        for pack in plan_stream(config, cost.of_length(lengths), lengths)
    ]
    return np.array(rows).reshape(job.steps, config.packs_per_step).max(axis=1)
