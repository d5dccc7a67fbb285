"""What a stream's planner carries from cycle to cycle, and which arrivals each cycle reads: pure arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bcl_grain.checks import checked_integer
from bcl_grain.planner_config import PlannerConfig

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class PoolState:
    """What a stream's planner carries from cycle to cycle.

    Attributes:
        cycle: Cycles planned so far.
        read: Records read so far: the position of the next arrival.
        emitted: Packs emitted so far.
        live: [n] positions of records in the pool, ascending.
        costs: [n] their costs.
        cost_sum: `streaming`: see `streaming.Memory`, as for the next two.
        ceiling: Costs above it can't be balanced.
        drift: About 1 where records come in random order.
        sizes: [n] sizes of the records in the pool, in tokens; empty without a capacity.
    """

    cycle: int
    read: int
    emitted: int
    live: IntArray
    costs: FloatArray
    cost_sum: float = 0.0
    ceiling: float = 0.0
    drift: float = 1.0
    sizes: IntArray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))

    def scalars(self) -> dict[str, int | float]:
        """Returns all but the live records, JSON-safe: what a checkpoint keeps of this state."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _POOL_ARRAYS}

    @classmethod
    def from_scalars(cls, scalars: Mapping[str, Any]) -> PoolState:
        """Returns the state that `scalars` were taken from, its pool still empty."""
        names = [f.name for f in dataclasses.fields(cls) if f.name not in _POOL_ARRAYS]
        return cls(**{n: scalars[n] for n in names}, live=np.empty(0, np.int64), costs=np.empty(0, np.float64))


_POOL_ARRAYS = ("live", "costs", "sizes")


def initial_state(config: PlannerConfig) -> PoolState:
    """Returns the state before the first record."""
    del config  # every policy starts from an empty pool
    return PoolState(0, 0, 0, np.empty(0, np.int64), np.empty(0, np.float64))


def finished(config: PlannerConfig, state: PoolState) -> bool:
    """Whether `num_packs` packs were emitted. Without `num_packs` only the stream's end says so."""
    return config.num_packs is not None and state.emitted >= config.num_packs


def records_wanted(config: PlannerConfig, state: PoolState) -> int:
    """Returns how many new records the next cycle takes, unless the stream ends before."""
    size = cycle_records(config) if state.read else _first_records(config)
    if config.num_packs is not None:
        size = min(size, config.num_packs * config.pack_size - state.read)
    return size


def _first_records(config: PlannerConfig) -> int:
    """Returns what the first cycle reads."""
    return config.step_records if config.policy == "arrival" else config.pool_records


def cycle_records(config: PlannerConfig) -> int:
    """Returns what a later cycle reads; what `streaming` emits, so that the pool stays full."""
    if config.policy == "streaming":
        return config.step_records * ((config.lookahead + 1) // 2)
    return _first_records(config)


def cohort_start(config: PlannerConfig, position: int, *, following: bool = False) -> int:
    """Returns where the cohort of an arrival starts: the records that one cycle reads together.

    Args:
        config: The settings.
        position: The arrival.
        following: Return the start of the next cohort instead.

    >>> cohort_start(PlannerConfig(pack_size=2, lookahead=2), 5)
    4
    """
    return _start_of_cohort(config, int(cohorts(config, np.array([position]))[0]) + following)


def cohorts(config: PlannerConfig, positions: IntArray) -> IntArray:
    """Returns the number of each arrival's cohort, which is that of the cycle that read it."""
    first, later = _first_records(config), cycle_records(config)
    return np.maximum(0, (positions - first) // later + 1)


def oldest_wait(config: PlannerConfig, state: PoolState) -> int:
    """Returns how many cycles have passed over the oldest record in the pool; 0 for an empty pool.

    >>> oldest_wait(PlannerConfig(pack_size=2), initial_state(PlannerConfig(pack_size=2)))
    0
    """
    return int(state.cycle - cohorts(config, state.live[:1])[0]) if state.live.size else 0


def _start_of_cohort(config: PlannerConfig, cohort: int) -> int:
    return 0 if cohort == 0 else _first_records(config) + (cohort - 1) * cycle_records(config)


def state_at(config: PlannerConfig, index: int) -> tuple[PoolState, int]:
    """Returns the state at the start of the cycle that gives pack `index`, and the pack's place in the cycle.

    Raises:
        ValueError: If `index` is negative, or the policy is `streaming`: its packs depend on all records before.

    >>> state_at(PlannerConfig(pack_size=2, lookahead=4, policy="windowed"), 6)[1]
    2
    """
    index = checked_integer("the index of a pack", index, 0)
    if config.policy == "streaming":
        raise ValueError(
            f"can't go to pack {index}: with policy='streaming' packs depend on all records before; restore a saved "
            "state instead, or use policy='windowed'"
        )
    records = cycle_records(config)
    cycle, next_pack = divmod(index, records // config.pack_size)
    empty = initial_state(config)
    return dataclasses.replace(empty, cycle=cycle, read=cycle * records, emitted=index - next_pack), next_pack
