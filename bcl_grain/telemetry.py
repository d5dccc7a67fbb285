"""What a stream's transformation knows about itself, readable while it iterates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from bcl_grain.planner import FILLER, Cycle, PoolState


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

    def add_cycle(self, pool: PoolState, new_costs: Sequence[float], cycle: Cycle) -> None:
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
        self.pack_cost_sum += float(sums.sum())
        self.pack_cost_square_sum += float((sums * sums).sum())
