"""What a stream's transformation knows about itself, readable while it iterates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from bcl_grain.planner import FILLER, Cycle, PlannerConfig, PoolState, oldest_wait


@dataclasses.dataclass
class Telemetry:
    """Counters of one stream, filled by the iterator of the process that reads it.

    Pass one to `BatchCostLookaheadIterDataset` and read it at any time. It starts at zero in a new process, and after
    a restore the interrupted cycle counts again. Share it with one iterator only.

    Attributes:
        cycles: Cycles planned.
        packs: Packs planned.
        records: Records planned.
        fillers: Weightless records added at the stream's end.
        records_dropped: Arrivals left out at the stream's end because they don't fill a step.
        packs_over_capacity: Packs that hold more than the capacity (`on_overflow="extra_chunk"`).
        overdue: Times that a record was kept for a further cycle beyond `max_age`, for the capacity's sake.
        planning_seconds: Time spent planning.
        reading_seconds: Time spent waiting for the parent and evaluating costs, planning aside.
        pack_cost_sum: Sum of the pack costs.
        pack_cost_square_sum: Sum of their squares.
        target: Cost that the last cycle's packs were aimed at; see `Cycle.target`.
        drift: `streaming`: how far the newest arrivals' mean is from the long-run mean, squared and in standard errors:
            about 1 where records come in random order; from 5 on the target follows the pool.
        oldest_wait: Cycles that the oldest record in the pool has been passed over.
    """

    cycles: int = 0
    packs: int = 0
    records: int = 0
    fillers: int = 0
    records_dropped: int = 0
    packs_over_capacity: int = 0
    overdue: int = 0
    planning_seconds: float = 0.0
    reading_seconds: float = 0.0
    pack_cost_sum: float = 0.0
    pack_cost_square_sum: float = 0.0
    target: float = math.nan
    drift: float = 1.0
    oldest_wait: int = 0

    @property
    def pack_cost_cv(self) -> float:
        """Coefficient of variation of the pack costs so far; NaN before the first.

        >>> Telemetry().pack_cost_cv
        nan
        """
        if not self.packs:
            return math.nan
        mean = self.pack_cost_sum / self.packs
        return math.sqrt(max(0.0, self.pack_cost_square_sum / self.packs - mean * mean)) / mean

    def figures(self) -> dict[str, float]:
        """Returns the counters by name, JSON-safe: what a training loop logs from time to time.

        >>> Telemetry(cycles=2).figures()["cycles"]
        2
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["pack_cost_cv"] = self.pack_cost_cv
        return {name: value for name, value in values.items() if not math.isnan(value)}

    def add_cycle(self, config: PlannerConfig, pool: PoolState, new_costs: Sequence[float], cycle: Cycle) -> None:
        """Counts one planned cycle: `pool` before it, and the costs of the arrivals since."""
        cost_of = dict(zip(pool.live.tolist(), pool.costs.tolist(), strict=True))
        for offset, cost in enumerate(new_costs):
            cost_of[pool.read + offset] = cost
        cost_of[FILLER] = 0.0
        sums = np.array([sum(cost_of[position] for position in pack) for pack in cycle.packs])
        fillers = sum(pack.count(FILLER) for pack in cycle.packs)
        self.cycles += 1
        self.packs += len(cycle.packs)
        self.records += sum(map(len, cycle.packs)) - fillers
        self.fillers += fillers
        self.packs_over_capacity += cycle.over_capacity
        self.overdue += cycle.overdue
        self.target = cycle.target
        self.drift = cycle.state.drift
        self.oldest_wait = oldest_wait(config, cycle.state)
        self.pack_cost_sum += float(sums.sum())
        self.pack_cost_square_sum += float((sums * sums).sum())
