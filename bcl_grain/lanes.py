"""Lanes: streams that stay the same while the number of hosts changes.

A job has V logical *lanes*, fixed for its life. The records are dealt out to lanes, each lane is balanced on its own,
and host h of H serves lanes h, h + H, h + 2H, ...:

    lanes            0    1    2    3    4    5    6    7
    8 hosts          0    1    2    3    4    5    6    7
    4 hosts          0    1    2    3    0    1    2    3
    2 hosts          0    1    0    1    0    1    0    1

A lane knows nothing of hosts, so step s consists of the same packs, and thus of the same records, for every H that
divides V. A checkpoint is one small state a lane; whoever serves a lane next reads its state.

Grain's own mixing would end the whole stream silently with its first lane, and keeps one state for all of them.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar, get_args

import grain

from bcl_grain.checks import check_choice, checked_integer
from bcl_grain.planner_config import Tail

T = TypeVar("T")

LaneState = dict[str, Any]
"""Where one lane stands, JSON-safe: "version", "lane", "num_lanes", "packs_per_step", "step" (steps given so far) and
"state" (of the lane's own pipeline)."""

STATE_VERSION = 1


def lanes_of_host(num_lanes: int, *, host: int, num_hosts: int) -> tuple[int, ...]:
    """Returns the lanes that a host serves: host, host + num_hosts, ...

    Raises:
        ValueError: If the lanes can't be dealt out evenly; the message names the counts of hosts that work.

    >>> lanes_of_host(8, host=1, num_hosts=4)
    (1, 5)
    """
    num_lanes, num_hosts = checked_integer("num_lanes", num_lanes, 1), checked_integer("num_hosts", num_hosts, 1)
    host = checked_integer("host", host, 0)
    if host >= num_hosts:
        raise ValueError(f"host must be below num_hosts {num_hosts}, got {host}: hosts count from 0")
    if num_lanes % num_hosts:
        works = ", ".join(str(n) for n in range(1, num_lanes + 1) if num_lanes % n == 0)
        raise ValueError(
            f"{num_hosts} hosts can't share {num_lanes} lanes evenly: run on one of {works} hosts. The number of lanes "
            "is fixed when a job starts; one with many divisors leaves the choice open"
        )
    return tuple(range(host, num_lanes, num_hosts))


class LanePlan(NamedTuple):
    """How long every lane is. It follows from global numbers alone, so that all hosts agree without asking.

    Attributes:
        steps: Steps of the job.
        num_packs: Packs of each lane, for `BatchCostLookaheadIterDataset`.
        num_unused: Records, of all lanes together, that no step uses (`tail="drop"`).
        num_missing: Places in the last step, of all lanes together, without a record (`tail="keep"` or `"pad"`).
    """

    steps: int
    num_packs: int
    num_unused: int
    num_missing: int


def plan_lanes(
    num_records: int, *, num_lanes: int, pack_size: int, packs_per_step: int = 1, tail: Tail = "drop"
) -> LanePlan:
    """Returns the length of every lane, alike on all of them whatever the number of records.

    Args:
        num_records: Records of the job, all lanes and epochs together.
        num_lanes: Lanes.
        pack_size: Records in a pack.
        packs_per_step: Packs of one lane in one step.
        tail: What the lanes do with records that fill no step of all lanes: see `BatchCostLookaheadIterDataset`.

    Raises:
        ValueError: If there is no whole step under `tail="drop"`, or a value is out of range.

    >>> plan_lanes(100, num_lanes=4, pack_size=8)
    LanePlan(steps=3, num_packs=3, num_unused=4, num_missing=0)
    >>> plan_lanes(100, num_lanes=4, pack_size=8, tail="pad")
    LanePlan(steps=4, num_packs=4, num_unused=0, num_missing=28)
    """
    num_records = checked_integer("num_records", num_records, 1)
    num_lanes, pack_size = checked_integer("num_lanes", num_lanes, 1), checked_integer("pack_size", pack_size, 1)
    packs_per_step = checked_integer("packs_per_step", packs_per_step, 1)
    check_choice("tail", tail, get_args(Tail))
    global_batch = num_lanes * packs_per_step * pack_size
    steps, rest = divmod(num_records, global_batch)
    if tail != "drop" and rest:
        return LanePlan(steps + 1, (steps + 1) * packs_per_step, 0, global_batch - rest)
    if not steps:
        raise ValueError(
            f"{num_records} records don't fill one step of {global_batch} ({num_lanes} lanes, {packs_per_step} packs "
            f"of {pack_size}): lower pack_size or num_lanes, or use tail='keep' or 'pad'"
        )
    return LanePlan(steps, steps * packs_per_step, rest, 0)


class LanesIterDataset(grain.IterDataset, Generic[T]):
    """Joins the lanes that one host serves: an element is one step of them.

    >>> import grain, bcl_grain as bcl
    >>> records = grain.MapDataset.range(1, 25).shuffle(seed=0)
    >>> plan = bcl.plan_lanes(len(records), num_lanes=4, pack_size=3)
    >>> def lane(number):
    ...     return (
    ...         records[number::4]
    ...         .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    ...         .pipe(bcl.BatchCostLookaheadIterDataset, pack_size=3, num_packs=plan.num_packs, cost_fn=float)
    ...     )
    >>> ds = bcl.LanesIterDataset(
    ...     {number: lane(number) for number in bcl.lanes_of_host(4, host=0, num_hosts=2)}, num_lanes=4
    ... )
    >>> [[len(pack) for pack in packs] for packs in ds]
    [[3, 3], [3, 3]]

    An element is a list: the packs of the lowest lane first, `packs_per_step` of each. Maps and thread prefetching may
    follow, and leave the state as it is; `mp_prefetch` has its place inside the lanes.

    The lanes of all hosts must give equally many steps: `plan_lanes` says how many, and
    `BatchCostLookaheadIterDataset` keeps to its `num_packs` whatever its stream holds. A lane that ends before the
    others of its host is an error that names it.

    Args:
        lanes: The host's lanes by number; each gives packs.
        num_lanes: Lanes of the job, those of other hosts included.
        packs_per_step: Consecutive packs of a lane that belong to one step.

    Raises:
        ValueError: If there are no lanes, or a number is out of range.
    """

    def __init__(self, lanes: Mapping[int, grain.IterDataset[T]], *, num_lanes: int, packs_per_step: int = 1) -> None:
        self._num_lanes = checked_integer("num_lanes", num_lanes, 1)
        self._packs_per_step = checked_integer("packs_per_step", packs_per_step, 1)
        if not lanes:
            raise ValueError("lanes is empty: a host serves at least one, see lanes_of_host")
        for lane in lanes:
            if checked_integer("a lane", lane, 0) >= num_lanes:
                raise ValueError(f"lane {lane} is not below num_lanes {num_lanes}: lanes count from 0")
        self._lanes = tuple(sorted(operator.index(lane) for lane in lanes))
        super().__init__([lanes[lane] for lane in self._lanes])

    def __iter__(self) -> LanesIterator[T]:
        """Returns an iterator over steps; reads nothing."""
        parents = {lane: parent.__iter__() for lane, parent in zip(self._lanes, self.parents, strict=True)}
        return LanesIterator(parents, num_lanes=self._num_lanes, packs_per_step=self._packs_per_step)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Refuses: slices would cut every lane into streams of its own, with as many more states."""
        del sl, sequential_slice
        raise ValueError("mp_prefetch can't stand behind lanes, it would cut them up: use it inside each lane")

    def __str__(self) -> str:
        return f"LanesIterDataset(lanes={list(self._lanes)}, num_lanes={self._num_lanes})"

    @property
    def _element_spec(self) -> Any:
        return [parent._element_spec for parent in self.parents for _ in range(self._packs_per_step)]


class LanesIterator(grain.DatasetIterator, Generic[T]):
    """Iterates over the steps of a host's lanes; made by `LanesIterDataset`.

    If a lane raises, the step can be tried again: what the lanes before it gave is kept.
    """

    def __init__(
        self, lanes: Mapping[int, grain.DatasetIterator[T]], *, num_lanes: int, packs_per_step: int = 1
    ) -> None:
        super().__init__(list(lanes.values()))
        self._lanes = dict(lanes)
        self._num_lanes = num_lanes
        self._packs_per_step = packs_per_step
        self._step = 0  # steps given
        self._taken: dict[int, list[T]] = {}  # the next step's packs so far
        self._before: dict[int, LaneState] = {}  # the lanes' states before it, while it is incomplete

    def __next__(self) -> list[T]:
        self._assert_not_closed()
        if not self._before:
            self._before = self.get_lane_states()
        for lane, source in self._lanes.items():
            packs = self._taken.setdefault(lane, [])
            while len(packs) < self._packs_per_step:
                try:
                    packs.append(next(source))
                except StopIteration:
                    break
        short = [lane for lane, packs in self._taken.items() if len(packs) < self._packs_per_step]
        if short:
            self._end(short)
            raise StopIteration
        with self._stats.record_self_time():
            step = [pack for packs in self._taken.values() for pack in packs]
            self._begin(self._step + 1)
            return self._stats.record_output_spec(step)

    def _end(self, short: list[int]) -> None:
        """Makes sure that all lanes have come to their end together, with a whole step."""
        if len(short) < len(self._lanes) or any(self._taken.values()):
            raise ValueError(
                f"lanes {short} ended in step {self._step} with {[len(self._taken[lane]) for lane in short]} of "
                f"{self._packs_per_step} packs, while other lanes have more: "
                "give every lane the same num_packs, from plan_lanes, and tail='keep' or 'pad' where data may end early"
            )
        self._begin(self._step)

    def _begin(self, step: int) -> None:
        self._step, self._taken, self._before = step, {}, {}

    def get_lane_states(self) -> dict[int, LaneState]:
        """Returns the state of each lane by its number: as of the last whole step, alike whoever serves the lane."""
        if self._before:
            return copy.deepcopy(self._before)
        return {
            lane: {
                "version": STATE_VERSION,
                "lane": lane,
                "num_lanes": self._num_lanes,
                "packs_per_step": self._packs_per_step,
                "step": self._step,
                "state": copy.deepcopy(source.get_state()),
            }
            for lane, source in self._lanes.items()
        }

    def set_lane_states(self, states: Mapping[int, LaneState]) -> None:
        """Restores the lanes of this host; reads nothing.

        Args:
            states: By lane, at least those of this host's lanes, saved by whichever hosts served them.

        Raises:
            ValueError: If a lane's state is missing, comes from other settings, or lanes stand at different steps.
        """
        missing = [lane for lane in self._lanes if lane not in states]
        if missing:
            raise ValueError(f"no state for lanes {missing}, only for {sorted(states)}: every host saves its lanes")
        for lane in self._lanes:
            self._check_state(lane, states[lane])
        steps = {lane: states[lane]["step"] for lane in self._lanes}
        if len(set(steps.values())) > 1:
            raise ValueError(f"lanes stand at different steps {steps}: their states are not from one checkpoint")
        before = {lane: state["state"] for lane, state in self.get_lane_states().items()}
        try:
            self._set_states({lane: states[lane]["state"] for lane in self._lanes})
        except BaseException:  # all lanes or none
            self._set_states(before)
            self._taken, self._before = {}, {}
            raise
        self._begin(steps[next(iter(steps))])

    def _set_states(self, states: Mapping[int, Any]) -> None:
        for lane, source in self._lanes.items():
            source.set_state(copy.deepcopy(states[lane]))

    def _check_state(self, lane: int, state: object) -> None:
        mine = {
            "version": STATE_VERSION,
            "lane": lane,
            "num_lanes": self._num_lanes,
            "packs_per_step": self._packs_per_step,
        }
        expected = {*mine, "step", "state"}
        if not isinstance(state, Mapping) or set(state) != expected:
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"not the state of a lane: expected the keys {sorted(expected)}, got {found}")
        for name, value in mine.items():
            if state[name] != value:
                raise ValueError(
                    f"state of lane {lane} has {name} {state[name]!r}, here it is {value!r}: a job keeps its lanes for "
                    "life, and this release reads version 1"
                )

    def get_state(self) -> dict[str, Any]:
        """Returns a JSON-safe state of constant structure: all lanes of this host. See `lane_states`."""
        return join_lane_states(self.get_lane_states())

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state, or one that `join_lane_states` made of lanes that several hosts saved; reads nothing.

        Raises:
            ValueError: See `set_lane_states`.
        """
        self.set_lane_states(lane_states(state))

    def _get_next_index(self) -> int:
        return self._step

    def _set_next_index(self, index: int) -> None:
        for source in self._lanes.values():
            grain.experimental.set_next_index(source, index * self._packs_per_step)
        self._begin(index)

    def __str__(self) -> str:
        return f"LanesIterator(lanes={list(self._lanes)}, num_lanes={self._num_lanes})"


def serve_lanes(
    records: grain.MapDataset[Any],
    build: Callable[[grain.MapDataset[Any], int], grain.IterDataset[T]],
    *,
    num_lanes: int,
    host: int,
    num_hosts: int,
    packs_per_step: int = 1,
) -> LanesIterDataset[T]:
    """Deals records out to lanes and joins those of one host.

    Args:
        records: All records, shuffled as a whole, alike on every host; random maps belong here, not into the lanes.
        build: (records of a lane, its number) -> its packs.
        num_lanes: Lanes of the job.
        host: This host.
        num_hosts: All of them; must divide `num_lanes`.
        packs_per_step: Consecutive packs of a lane that belong to one step.

    Raises:
        ValueError: See `lanes_of_host`.

    >>> ds = serve_lanes(
    ...     grain.MapDataset.range(8), lambda lane, _: lane.batch(2).to_iter_dataset(), num_lanes=2, host=0, num_hosts=1
    ... )
    >>> [[pack.tolist() for pack in packs] for packs in ds]
    [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
    """
    lanes = lanes_of_host(num_lanes, host=host, num_hosts=num_hosts)
    return LanesIterDataset(
        {lane: build(records[lane::num_lanes], lane) for lane in lanes},
        num_lanes=num_lanes,
        packs_per_step=packs_per_step,
    )


def lane_states(state: Mapping[str, Any]) -> dict[int, LaneState]:
    """Returns the lanes in the state of a `LanesIterator`, or of a map or thread prefetching behind it.

    Raises:
        ValueError: If it is not such a state.
    """
    if not isinstance(state, Mapping) or state.keys() != {"lanes"} or not isinstance(state["lanes"], Mapping):
        raise ValueError(
            "not a state of lanes: only maps and thread prefetching may stand behind LanesIterDataset, and what a "
            f"pipeline without lanes saved can't be read (got {str(state)[:80]})"
        )
    return {int(lane): lane_state for lane, lane_state in state["lanes"].items()}


def join_lane_states(states: Mapping[int, LaneState]) -> dict[str, Any]:
    """Returns the state of an iterator that serves these lanes; more of them do no harm."""
    return {"lanes": {str(lane): states[lane] for lane in sorted(states)}}
