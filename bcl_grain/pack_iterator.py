"""The pool of one stream, as a Grain iterator: reads records, plans, gives packs, saves and restores.

    parent iterator --> pool (records by arrival position) --> plan_cycle --> packs, one at a time
                          ^ `pack_size` records are read at every `next()`, so that the pool for the
                            next cycle is full just when the current one has come out

A checkpoint holds no record. It says where the parent stood before the oldest record that is still in the pool,
which records since are still there, and how far the current cycle has come; restoring reads those records again
and plans again.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import grain
import numpy as np
from absl import logging

from bcl_grain.capacity import SizeFn, checked_size
from bcl_grain.costs import CostFn, checked_cost
from bcl_grain.planner import (
    FILLER,
    Cycle,
    PlannerConfig,
    PoolState,
    cohort_start,
    finished,
    initial_state,
    plan_cycle,
    plan_digest,
    records_wanted,
    state_at,
)
from bcl_grain.saved_state import check_state, cycle_part, decode_live, encode_live, full_state
from bcl_grain.telemetry import Telemetry

T = TypeVar("T")


class PackIterator(grain.DatasetIterator, Generic[T]):
    """Holds the pool of one stream. Positions are arrival positions, counted from the stream's start."""

    def __init__(
        self,
        parent: grain.DatasetIterator[T],
        config: PlannerConfig,
        may_differ: bool,
        cost_fn: CostFn,
        size_fn: SizeFn | None,
        pad_record: T | None,
        telemetry: Telemetry,
    ) -> None:
        super().__init__(parent)
        self._source = parent
        self._config = config
        self._may_differ = may_differ
        self._cost_fn = cost_fn
        self._size_fn = size_fn
        self._pad_record = pad_record
        self._telemetry = telemetry
        self._start(initial_state(config), config)

    def _start(
        self,
        pool: PoolState,
        settings: PlannerConfig,
        *,
        first: int = 0,
        live: str = "",
        next_pack: int = 0,
        digest: int = 0,
        packs_before: int = 0,
        finish_at: int = -1,
    ) -> None:
        """Sets out from the start of a cycle with an unread pool; the parent stands before position `first`.

        `pool.live` is yet unknown: the positions are in the bitmap `live`, their costs are known once they are read.
        """
        self._settings = settings
        self._packs_before = packs_before
        self._finish_at = finish_at
        left = None if settings.num_packs is None else settings.num_packs - packs_before
        self._planning = dataclasses.replace(settings, num_packs=left) if left else settings
        self._pool = pool
        self._after = pool  # what `_pool` becomes when the cycle is over
        self._packs: list[list[int]] | None = None  # the planned cycle
        self._next_pack = next_pack
        self._digest = digest
        self._records: dict[int, T] = {}
        self._new_costs: list[float] = []  # of the arrivals from `_after.read` on
        self._new_sizes: list[int] = []  # of the same; none without a size_fn
        self._position = first  # of the record that the parent gives next
        self._ended = False  # whether the parent has no more records
        self._exhausted = left == 0  # whether there are no more packs
        self._astray = False  # whether the parent may stand elsewhere
        self._snapshots = {first: copy.deepcopy(self._source.get_state())}  # parent states at cohort starts
        self._boundary = -1
        self._unread = (first, live) if first < pool.read else None
        self._cycle_part = self._part(first, live)

    def __next__(self) -> list[T]:
        self._assert_not_closed()
        begin_ns = time.perf_counter_ns()
        planning_ns = 0
        if self._astray:
            self._recover()
        if self._packs is None:
            planning_ns = self._plan()
        # Reading comes before emitting: if the source raises, no pack is lost and next() can be tried again.
        self._read(min(len(self._new_costs) + self._config.pack_size, self._wanted(self._after)))
        reading_ns = time.perf_counter_ns() - begin_ns - planning_ns
        self._telemetry.reading_seconds += reading_ns * 1e-9
        with self._stats.record_self_time(offset_ns=planning_ns):
            return self._stats.record_output_spec(self._emit())

    def _plan(self) -> int:
        """Fills the pool and plans a cycle; returns the nanoseconds that planning took."""
        if self._exhausted or finished(self._planning, self._pool):
            raise StopIteration
        if self._unread is not None:
            self._read_again(*self._unread)
        wanted = self._wanted(self._pool)
        self._read(wanted)
        begin_ns = time.perf_counter_ns()
        config, final = self._planning, len(self._new_costs) < wanted
        if self._finish_at == self._pool.read:  # the rest of the old pool, whole steps, and nothing after it
            config, final = dataclasses.replace(config, num_packs=None, tail="keep"), True
        cycle = self._plan_cycle(config, final)
        digest = plan_digest(cycle.packs)
        if self._next_pack and self._digest not in (0, digest):
            raise ValueError(
                f"after restoring, cycle {self._pool.cycle} was planned otherwise than before (checksum {digest}, not "
                f"{self._digest}): {self._why_planned_otherwise()}"
            )
        if cycle.dropped:
            arrivals = self._pool.read + len(self._new_costs)
            logging.warning("%d of %d records don't fill a step and are dropped (tail='drop')", cycle.dropped, arrivals)
            self._telemetry.records_dropped += cycle.dropped
        if self._next_pack >= len(cycle.packs):  # the end, or a next index beyond it
            self._exhausted = True
            raise StopIteration
        self._telemetry.add_cycle(self._config, self._pool, self._new_costs, cycle)
        for pack in cycle.packs[: self._next_pack]:
            for position in pack:
                self._records.pop(position, None)
        self._packs, self._after, self._digest = cycle.packs, cycle.state, digest
        self._new_costs, self._new_sizes = [], []
        planning_ns = time.perf_counter_ns() - begin_ns
        self._telemetry.planning_seconds += planning_ns * 1e-9
        return planning_ns

    def _plan_cycle(self, config: PlannerConfig, final: bool) -> Cycle:
        rest = len(self._new_costs)
        ends_at_once = final and not self._pool.read and rest < config.step_records
        if ends_at_once and self._packs_before and config.tail == "drop" and config.num_packs is None:
            # Not a stream without a step, which is an error, but one that ended just after its settings had changed.
            return Cycle([], self._pool, dropped=rest)
        return plan_cycle(config, self._pool, self._new_costs, final=final, new_sizes=self._new_sizes)

    def _why_planned_otherwise(self) -> str:
        """Asks for all costs of the pool once more: one that changes has its record named."""
        pool = self._pool
        positions = [*pool.live.tolist(), *range(pool.read, pool.read + len(self._new_costs))]
        for position, cost in zip(positions, [*pool.costs.tolist(), *self._new_costs], strict=True):
            again = checked_cost(self._cost_fn, self._records[position], position)
            if again != cost:
                return (
                    f"cost_fn is not deterministic, record {position} of the stream cost {cost!r} and then {again!r}. "
                    "Make it depend on the record alone, and go on from a checkpoint at the start of a cycle"
                )
        return (
            "the records, cost_fn, size_fn or capacity have changed since the state was saved. Restore with what they "
            "were, or go on from a checkpoint at the start of a cycle"
        )

    def _wanted(self, pool: PoolState) -> int:
        """Returns how many records the cycle after `pool` reads."""
        wanted = records_wanted(self._planning, pool)
        return wanted if self._finish_at < 0 else min(wanted, self._finish_at - pool.read)

    def _read(self, count: int) -> None:
        """Reads until `count` new arrivals are there, or the stream ends."""
        while len(self._new_costs) < count:
            position = self._after.read + len(self._new_costs)
            # A record may be there already: its cost could not be told, and next() is tried again.
            if position == self._position and not self._fetch():
                return
            cost = checked_cost(self._cost_fn, self._records[position], position)
            if self._size_fn is not None:
                self._new_sizes.append(checked_size(self._size_fn, self._records[position], position))
            self._new_costs.append(cost)

    def _fetch(self) -> bool:
        """Takes one record from the parent; returns whether there was one."""
        position = self._position
        if self._ended:
            return False
        if position >= self._boundary:
            start = cohort_start(self._planning, position)
            if start == position and start not in self._snapshots:
                self._snapshots[start] = copy.deepcopy(self._source.get_state())
            self._boundary = cohort_start(self._planning, position, following=True)
        try:
            self._records[position] = next(self._source)
        except StopIteration:
            self._ended = True
            return False
        except BaseException:
            self._astray = True
            raise
        self._position += 1
        return True

    def _recover(self) -> None:
        """Puts the parent back before `_position`.

        Once it has raised, it may have moved past the record, or may count as exhausted; Grain's prefetchers lose one.
        """
        start = max(start for start in self._snapshots if start <= self._position)
        self._source.set_state(copy.deepcopy(self._snapshots[start]))
        for position in range(start, self._position):
            try:
                next(self._source)
            except StopIteration:
                raise _shrunk(position) from None
        self._astray = False

    def _read_again(self, first: int, live: str) -> None:
        """Reads the records that were in the pool at the checkpoint, and drops those that were out already."""
        positions = decode_live(live, first=first, read=self._pool.read)
        kept = frozenset(positions.tolist())
        for position in range(self._position, self._pool.read):
            if not self._fetch():
                raise _shrunk(position)
            if position not in kept:
                del self._records[position]
        costs = [checked_cost(self._cost_fn, self._records[p], p) for p in positions.tolist()]
        sizes: list[int] = []
        if self._size_fn is not None:
            sizes = [checked_size(self._size_fn, self._records[p], p) for p in positions.tolist()]
        self._pool = dataclasses.replace(
            self._pool, live=positions, costs=np.array(costs, np.float64), sizes=np.array(sizes, np.int64)
        )
        self._after = self._pool
        self._unread = None

    def _emit(self) -> list[T]:
        assert self._packs is not None
        pack = [
            copy.deepcopy(self._pad_record) if position == FILLER else self._records.pop(position)
            for position in self._packs[self._next_pack]
        ]
        self._next_pack += 1
        if self._next_pack == len(self._packs):
            self._roll()
        return pack  # type: ignore[return-value]

    def _roll(self) -> None:
        """Goes on to the next cycle at once, so that a position has one state and not two."""
        self._pool, self._packs, self._next_pack, self._digest = self._after, None, 0, 0
        live = self._pool.live
        if self._finish_at >= 0 and not live.size:
            self._take_new_settings()
            return
        first = cohort_start(self._planning, int(live[0])) if live.size else self._pool.read
        if first not in self._snapshots:  # nothing was read ahead: the parent stands there
            self._snapshots[first] = copy.deepcopy(self._source.get_state())
        self._snapshots = {start: state for start, state in self._snapshots.items() if start >= first}
        self._cycle_part = self._part(first, encode_live(live, first=first, read=self._pool.read))

    def _take_new_settings(self) -> None:
        """Starts with the settings of this iterator where the pool of earlier ones has come out."""
        self._start(initial_state(self._config), self._config, packs_before=self._packs_before + self._pool.emitted)

    def _part(self, first: int, live: str) -> dict[str, Any]:
        return cycle_part(
            self._settings,
            self._pool,
            packs_before=self._packs_before,
            finish_at=self._finish_at,
            parent=self._snapshots[first],
            first=first,
            live=live,
        )

    def get_state(self) -> dict[str, Any]:
        """Returns a JSON-safe state of constant structure that holds no record."""
        digest = self._digest if self._next_pack else 0  # the plan of an untouched cycle binds nobody
        return full_state(self._cycle_part, next_pack=self._next_pack, digest=digest)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state; reads nothing.

        Raises:
            ValueError: If the state is not one of ours, comes from other settings, or is damaged.
        """
        settings = check_state(state, self.get_state(), self._config, may_differ=self._may_differ)
        self._astray = True  # until it is done: if the parent refuses its state, this iterator goes on where it was
        self._source.set_state(copy.deepcopy(state["parent"]))
        names = ("first", "live", "next_pack", "digest", "packs_before", "finish_at")
        place = {name: state[name] for name in names}
        pool = PoolState.from_scalars(state)
        self._start(pool, settings, **place)
        if settings.describe() == self._config.describe() or self._finish_at >= 0:
            return
        if self._unread is None and not self._next_pack:
            self._take_new_settings()
        else:  # a cycle that has begun reads what it wants, and then nobody does
            place["finish_at"] = pool.read + (records_wanted(self._planning, pool) if self._next_pack else 0)
            self._start(pool, settings, **place)

    def _get_next_index(self) -> int:
        return self._packs_before + self._pool.emitted + self._next_pack

    def _set_next_index(self, index: int) -> None:
        if self._packs_before or self._finish_at >= 0:
            raise ValueError(
                f"can't go to pack {index}: the settings have changed on the way here; restore a saved state instead"
            )
        pool, next_pack = state_at(self._config, index)
        self._astray = True
        grain.experimental.set_next_index(self._source, pool.read)
        self._start(pool, self._config, first=pool.read, next_pack=next_pack)

    def close(self) -> None:
        """Closes this iterator and its parents, and frees the pool."""
        self._records.clear()
        super().close()

    def __str__(self) -> str:
        return f"BatchCostLookaheadDatasetIterator({self._config.describe()})"


def _shrunk(position: int) -> ValueError:
    return ValueError(
        f"the stream ended before record {position}, which had been read before: the data is not the same any more"
    )
