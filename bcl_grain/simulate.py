"""Runs a policy over streams of lengths, without data: the same planner, driven as the dataset drives it."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bcl_grain.costs import TransformerCost
from bcl_grain.layouts import Layout, Shape
from bcl_grain.metrics import Arm, measure, padding_fraction
from bcl_grain.planner import FILLER, Cycle, PlannerConfig, finished, initial_state, plan_cycle, records_wanted

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

Kernel = Literal["rows", "segments"]
"""What attention runs: whole rows, padding and all, or only inside each record."""


def plan_stream(config: PlannerConfig, costs: npt.ArrayLike, sizes: npt.ArrayLike | None = None) -> list[list[int]]:
    """Returns every pack that one stream gives: arrival positions, in the order in which the packs come.

    Args:
        config: The settings.
        costs: [n] costs of the stream's records, positive and finite.
        sizes: [n] their sizes in tokens, where the settings have a capacity.

    Raises:
        ValueError: If the stream is too short, or a pack stays over the capacity (see `planner.plan_cycle`).

    Complexity: O(n log W) for a pool of W records.

    >>> plan_stream(PlannerConfig(pack_size=2, policy="arrival"), [9.0, 1.0, 8.0, 2.0])
    [[0, 1], [2, 3]]
    """
    return [pack for cycle in plan_cycles(config, costs, sizes) for pack in cycle.packs]


def plan_cycles(config: PlannerConfig, costs: npt.ArrayLike, sizes: npt.ArrayLike | None = None) -> Iterator[Cycle]:
    """Yields every cycle that has packs; see `plan_stream`."""
    values = np.asarray(costs, np.float64)
    state = initial_state(config)
    while not finished(config, state):
        wanted = records_wanted(config, state)
        new_costs = values[state.read : state.read + wanted]
        new_sizes = None if sizes is None else np.asarray(sizes)[state.read : state.read + wanted]
        # As in a pipeline, the end shows only when there is less than is wanted.
        cycle = plan_cycle(config, state, new_costs, final=new_costs.size < wanted, new_sizes=new_sizes)
        if not cycle.packs:
            return
        yield cycle
        state = cycle.state


def pack_costs(packs: Sequence[Sequence[int]], costs: npt.ArrayLike) -> FloatArray:
    """Returns the estimated cost of each pack, fillers counted as nothing.

    >>> pack_costs([[0, 1], [2, -1]], [9.0, 1.0, 8.0])
    array([10.,  8.])
    """
    values = np.append(np.asarray(costs, np.float64), 0.0)  # a filler's position -1 finds the 0
    return np.array([values[list(pack)].sum() for pack in packs])


def chunks_cost(cost: TransformerCost, shapes: Sequence[Shape], sizes: npt.ArrayLike, kernel: Kernel = "rows") -> float:
    """Returns what a device runs for chunks of these shapes that hold records of these sizes.

    Args:
        cost: The cost model.
        shapes: (rows, length) of each chunk.
        sizes: [n] sizes of the records in them, in tokens.
        kernel: Whether attention runs over whole rows or only inside each record.

    >>> cost = TransformerCost(per_token=1.0, per_token_squared=0.5)
    >>> chunks_cost(cost, [(1, 8)], [2, 4]), chunks_cost(cost, [(1, 8)], [2, 4], kernel="segments")
    (40.0, 18.0)
    """
    if kernel == "rows":
        return sum((cost.of_chunk(rows, length) for rows, length in shapes), 0.0)
    squares = float((np.asarray(sizes, np.float64) ** 2).sum())
    tokens = sum(rows * length for rows, length in shapes)
    return cost.per_chunk * len(shapes) + cost.per_token * tokens + cost.per_token_squared * squares


class StreamRun(NamedTuple):
    """What a policy did with the records of one stream, or of several.

    Attributes:
        estimated: [ranks, steps] sums of record costs.
        executed: [ranks, steps] costs of the chunks, or None where nothing was laid out.
        useful_tokens: Tokens of all records that came out.
        executed_tokens: Tokens of all chunks, or None.
        records: Records that came out.
        max_wait_cycles: Most cycles that a record waited between the one that read it and the one that emitted it.
        planning_seconds: Time spent planning.
        bins: Bins of fixed capacity in all, where a policy packs such; else None.
        packs_over_capacity: Packs that hold more than the settings' capacity.
    """

    estimated: FloatArray
    executed: FloatArray | None
    useful_tokens: int
    executed_tokens: int | None
    records: int
    max_wait_cycles: int | None
    planning_seconds: float
    bins: int | None = None
    packs_over_capacity: int = 0


def simulate_stream(
    config: PlannerConfig,
    lengths: npt.NDArray[np.integer[Any]],
    cost: TransformerCost,
    layout: Layout | None = None,
    kernel: Kernel = "rows",
) -> StreamRun:
    """Plans one stream and counts what each of its ranks gets in each step.

    Args:
        config: The settings.
        lengths: [n] record lengths in tokens, in order of arrival.
        cost: Cost of a record, and of a chunk.
        layout: Turns packs into chunks; without it nothing is laid out.
        kernel: See `chunks_cost`.

    Returns:
        Figures of `packs_per_step` ranks.

    Raises:
        ValueError: If the stream is too short, or a pack does not fit the layout.
        RuntimeError: If the planner gave a record twice.

    Complexity: O(n log W) for a pool of W records.

    >>> run = simulate_stream(PlannerConfig(pack_size=2, lookahead=2), np.array([9, 1, 8, 2]), TransformerCost(1.0))
    >>> run.estimated
    array([[10., 10.]])
    """
    costs = cost.of_length(lengths)
    begin = time.perf_counter()
    cycles = list(plan_cycles(config, costs, lengths))
    planning_seconds = time.perf_counter() - begin
    packs = [pack for cycle in cycles for pack in cycle.packs]
    records = _check_once(packs)
    estimated = pack_costs(packs, costs)
    executed: FloatArray | None = None
    laid_out = 0
    if layout is not None:
        executed = np.empty(len(packs))
        for i, pack in enumerate(packs):
            sizes = lengths[[p for p in pack if p != FILLER]]
            shapes = layout.chunk_shapes(sizes)
            executed[i] = chunks_cost(cost, shapes, sizes, kernel)
            laid_out += sum(rows * length for rows, length in shapes)
    return StreamRun(
        estimated=_by_rank(estimated, config),
        executed=None if executed is None else _by_rank(executed, config),
        useful_tokens=int(lengths[records].sum()),
        executed_tokens=None if executed is None else laid_out,
        records=records.size,
        max_wait_cycles=_max_wait(cycles),
        planning_seconds=planning_seconds,
        packs_over_capacity=sum(cycle.over_capacity for cycle in cycles),
    )


def _check_once(packs: Sequence[Sequence[int]]) -> IntArray:
    """Returns the positions in `packs`, ascending, fillers left out; raises if one is there twice."""
    positions = np.fromiter(itertools.chain.from_iterable(packs), np.int64)
    positions = np.sort(positions[positions != FILLER])
    twice = positions[1:][positions[1:] == positions[:-1]]
    if twice.size:
        raise RuntimeError(f"the planner gave record {twice[0]} twice: this is a bug")
    return positions


def _max_wait(cycles: Sequence[Cycle]) -> int:
    """Returns the most cycles that a record was passed over."""
    read = [cycle.state.read for cycle in cycles]  # a record was read by the first cycle that read beyond it
    # Packs ascend, and fillers stand last.
    oldest = [
        min((pack[0] for pack in cycle.packs if pack and pack[0] != FILLER), default=cycle.state.read - 1)
        for cycle in cycles
    ]
    waits = np.arange(len(cycles)) - np.searchsorted(read, oldest, side="right")
    return int(waits.max(initial=0))


def _by_rank(values: FloatArray, config: PlannerConfig) -> FloatArray:
    """[packs] of a stream -> [packs_per_step, steps]."""
    return values.reshape(-1, config.packs_per_step).T


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a policy did with the records of all ranks.

    Attributes:
        estimated: [ranks, steps] sums of record costs.
        executed: [ranks, steps] costs of the chunks, or None where nothing was laid out.
        useful_tokens: Tokens of all records that came out.
        executed_tokens: Tokens of all chunks, or None.
        records: Records that came out.
        planning_seconds: Time spent planning.
    """

    estimated: FloatArray
    executed: FloatArray | None
    useful_tokens: int
    executed_tokens: int | None
    records: int
    planning_seconds: float

    def arm(self, first_step: int = 0, last_step: int | None = None) -> Arm:
        """Returns the figures over steps first_step..last_step-1, by default over the whole job."""
        steps = slice(first_step, last_step)
        return measure(self.estimated[:, steps], None if self.executed is None else self.executed[:, steps])

    @property
    def padding(self) -> float | None:
        """Share of executed tokens that is padding, or None where nothing was laid out."""
        return None if self.executed_tokens is None else padding_fraction(self.executed_tokens, self.useful_tokens)

    @property
    def planning_us_per_record(self) -> float:
        """Microseconds of planning per record."""
        return 1e6 * self.planning_seconds / self.records


def simulate(
    config: PlannerConfig,
    lengths: npt.ArrayLike,
    cost: TransformerCost,
    layout: Layout | None = None,
) -> Simulation:
    """Plans the streams of a job and counts what each rank gets in each step.

    Everything is kept; `bcl_grain.arms` keeps running sums, for jobs of any size.

    Args:
        config: The settings, alike for all streams.
        lengths: [streams, n] record lengths in tokens, in order of arrival. A stream feeds `packs_per_step` ranks.
        cost: Cost of a record, and of a chunk.
        layout: Turns packs into chunks; without it nothing is laid out.

    Returns:
        Figures of streams * packs_per_step ranks.

    Raises:
        ValueError: If `lengths` is not a matrix, a stream is too short, or a pack does not fit the layout.

    Complexity: O(n log W) a stream for a pool of W records.

    >>> lengths = np.random.default_rng(0).lognormal(5, 1, (4, 64 * 80)).astype(int) + 1
    >>> run = {p: simulate(PlannerConfig(pack_size=64, lookahead=8, policy=p), lengths, TransformerCost(1.0))
    ...        for p in ("arrival", "windowed")}
    >>> run["windowed"].arm().sync_waste < 0.5 * run["arrival"].arm().sync_waste
    True
    """
    sizes = np.asarray(lengths)
    if sizes.ndim != 2:
        raise ValueError(f"lengths must be a [streams, records] matrix, got shape {sizes.shape}")
    runs = [simulate_stream(config, stream, cost, layout) for stream in sizes]
    executed = [run.executed for run in runs if run.executed is not None]
    return Simulation(
        estimated=np.concatenate([run.estimated for run in runs]),
        executed=np.concatenate(executed) if executed else None,
        useful_tokens=sum(run.useful_tokens for run in runs),
        executed_tokens=sum(run.executed_tokens or 0 for run in runs) if executed else None,
        records=sum(run.records for run in runs),
        planning_seconds=sum(run.planning_seconds for run in runs),
    )
