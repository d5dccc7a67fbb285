"""Runs a policy over streams of lengths, without data: the same planner, driven as the dataset drives it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bcl_grain.costs import TransformerCost
from bcl_grain.layouts import Layout
from bcl_grain.metrics import Arm, measure, padding_fraction
from bcl_grain.planner import FILLER, PlannerConfig, finished, initial_state, plan_cycle, records_wanted

FloatArray = npt.NDArray[np.float64]


def plan_stream(config: PlannerConfig, costs: npt.ArrayLike) -> list[list[int]]:
    """Returns every pack that one stream gives: arrival positions, in the order in which the packs come.

    Args:
        config: The settings.
        costs: [n] costs of the stream's records, positive and finite.

    Raises:
        ValueError: If the stream is too short (see `planner.plan_cycle`).

    Complexity: O(n log W) for a pool of W records.

    >>> plan_stream(PlannerConfig(pack_size=2, policy="arrival"), [9.0, 1.0, 8.0, 2.0])
    [[0, 1], [2, 3]]
    """
    values = np.asarray(costs, np.float64)
    packs: list[list[int]] = []
    state = initial_state(config)
    while not finished(config, state):
        wanted = records_wanted(config, state)
        new_costs = values[state.read : state.read + wanted]
        # As in a pipeline, the end shows only when there is less than is wanted.
        cycle = plan_cycle(config, state, new_costs, final=new_costs.size < wanted)
        if not cycle.packs:
            break
        packs += cycle.packs
        state = cycle.state
    return packs


def pack_costs(packs: Sequence[Sequence[int]], costs: npt.ArrayLike) -> FloatArray:
    """Returns the estimated cost of each pack, fillers counted as nothing.

    >>> pack_costs([[0, 1], [2, -1]], [9.0, 1.0, 8.0])
    array([10.,  8.])
    """
    values = np.append(np.asarray(costs, np.float64), 0.0)  # a filler's position -1 finds the 0
    return np.array([values[list(pack)].sum() for pack in packs])


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
    estimated: list[FloatArray] = []
    executed: list[FloatArray] = []
    useful = laid_out = records = 0
    planning_seconds = 0.0
    for stream in sizes:
        costs = cost.of_length(stream)
        begin = time.perf_counter()
        packs = plan_stream(config, costs)
        planning_seconds += time.perf_counter() - begin
        estimated.append(_by_rank(pack_costs(packs, costs), config))
        pack_sizes = [stream[[p for p in pack if p != FILLER]] for pack in packs]
        useful += sum(int(s.sum()) for s in pack_sizes)
        records += sum(map(len, pack_sizes))
        if layout is not None:
            shapes = [layout.chunk_shapes(s) for s in pack_sizes]
            run = [sum(cost.of_chunk(rows, length) for rows, length in chunks) for chunks in shapes]
            executed.append(_by_rank(np.array(run), config))
            laid_out += sum(rows * length for chunks in shapes for rows, length in chunks)
    return Simulation(
        estimated=np.concatenate(estimated),
        executed=np.concatenate(executed) if executed else None,
        useful_tokens=useful,
        executed_tokens=laid_out if executed else None,
        records=records,
        planning_seconds=planning_seconds,
    )


def _by_rank(values: FloatArray, config: PlannerConfig) -> FloatArray:
    """[packs] of a stream -> [packs_per_step, steps]."""
    return values.reshape(-1, config.packs_per_step).T
