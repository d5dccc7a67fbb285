"""The planner: which records of a stream make which pack, and in which order the packs come.

Pure and deterministic: no Grain, no JAX, no clock, no I/O. The Grain dataset, the simulator and the benchmarks
call the same functions:

    state = initial_state(config)
    while not finished(config, state):
        new_costs = costs of the next records_wanted(config, state) arrivals, or of fewer where the stream ends
        cycle = plan_cycle(config, state, new_costs, final=stream has ended)
        ... cycle.packs holds arrival positions, counted from the start of the stream ...
        state = cycle.state

A *cycle* is what one call plans. `packs_per_step` consecutive packs make a *step*: they go to the local devices of
one host at the same time.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from bcl_grain import streaming
from bcl_grain.capacity import FILLER_SIZE, Capacity, checked_capacity, fit_packs, overflow
from bcl_grain.cost_prior import CostPrior
from bcl_grain.partition import balanced_partition

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

Policy = Literal["arrival", "windowed", "streaming"]
Order = Literal["shuffled", "aligned"]
Tail = Literal["drop", "keep", "pad"]
OnOverflow = Literal["error", "extra_chunk"]

FILLER = -1
"""Stands for a weightless record in a pack: with `tail="pad"` where the stream has too few records."""


END_POOLS = 8  # with so many pools yet to come, a capacity makes `streaming` empty its carry of large records
END_FILL = 0.85  # how full packs of the carry would be then


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """What a plan depends on, besides the costs.

    Attributes:
        pack_size: Records in a pack.
        packs_per_step: Packs of this stream that one step consumes: the local devices it feeds.
        lookahead: Pool length in steps. The pool holds `pack_size * packs_per_step * lookahead` records.
        policy: `arrival` takes consecutive records (the baseline); `windowed` partitions one full pool after the
            other into packs of balanced cost; `streaming` aims every pack at the long-run mean and carries half of
            the pool from cycle to cycle (see `bcl_grain.streaming`).
        order: In which order a cycle's steps come. `shuffled`: independently on every stream. `aligned`: ranked by
            cost and placed by a permutation that is alike on all streams with the same seed, so that the dearest
            steps of all ranks meet. Arrival keeps the order of arrival.
        tail: What happens to arrivals that don't fill a step when the stream ends: `drop` them before planning,
            `keep` them as a short last step, or `pad` the last step with weightless records.
        num_packs: Packs that the stream gives in all, a multiple of `packs_per_step`; the same on every rank, from
            the global record count. Default: as many as the stream fills.
        seed: Key of the order.
        max_age: `streaming`: a record comes out at most so many cycles after it was read.
        prior: `streaming`: what is known of the mean cost beforehand, alike on all streams.
        capacity: What a pack may hold, cost being the objective: a number of tokens in all, or the (rows, length)
            of a `RowPackedOneShapeLayout`, which then holds every pack. It goes before `max_age`. Arrival, which
            moves no record, is only checked. With `num_packs`, `streaming` prepares for its last pool, which can
            exchange with nothing: without it that one is over the capacity more often.
        on_overflow: What happens if no packs within the capacity are found: an `error` before any pack of the
            cycle comes out, or packs that are too large and need an `extra_chunk` of a layout that has such.

    Raises:
        ValueError: If a value is out of range; the message shows it.
    """

    pack_size: int
    packs_per_step: int = 1
    lookahead: int = 32
    policy: Policy = "windowed"
    order: Order = "shuffled"
    tail: Tail = "drop"
    num_packs: int | None = None
    seed: int = 0
    max_age: int = 16
    prior: CostPrior | None = None
    capacity: Capacity | None = None
    on_overflow: OnOverflow = "error"

    def __post_init__(self) -> None:
        least_values = (("pack_size", 1), ("packs_per_step", 1), ("lookahead", 1), ("seed", 0), ("max_age", 1))
        for name, least in least_values:
            object.__setattr__(self, name, _integer(name, getattr(self, name), least))
        choices = (("policy", Policy), ("order", Order), ("tail", Tail), ("on_overflow", OnOverflow))
        for name, allowed in choices:
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {get_args(allowed)}, got {getattr(self, name)!r}")
        if self.capacity is not None:
            object.__setattr__(self, "capacity", checked_capacity(self.capacity))
        if self.num_packs is not None:
            object.__setattr__(self, "num_packs", _integer("num_packs", self.num_packs, 1))
            if self.num_packs % self.packs_per_step:
                raise ValueError(
                    f"num_packs {self.num_packs} is not a multiple of packs_per_step {self.packs_per_step}: the "
                    "last step would not feed every device"
                )

    @property
    def step_records(self) -> int:
        """Records that one step consumes."""
        return self.pack_size * self.packs_per_step

    @property
    def pool_records(self) -> int:
        """Records that the pool holds, W in the formulas."""
        return self.step_records * self.lookahead

    def describe(self) -> str:
        """Returns the settings as one line, `name=value` apart by spaces: a checkpoint's fingerprint.

        `capacity` and `on_overflow` are left out: they may change from cycle to cycle.

        >>> PlannerConfig(pack_size=4, lookahead=2).describe()[:73]
        'pack_size=4 packs_per_step=1 lookahead=2 policy=windowed order=shuffled t'
        """
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("capacity", "on_overflow")]
        return " ".join(f"{name}={str(getattr(self, name)).replace(' ', '')}" for name in names)


def _integer(name: str, value: object, least: int) -> int:
    """Returns `value` as a Python int: states are JSON, which NumPy's integers are not."""
    try:
        if isinstance(value, bool) or operator.index(value) < least:  # type: ignore[arg-type]
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}") from None


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


class Cycle(NamedTuple):
    """One planned cycle.

    Attributes:
        packs: Arrival positions, ascending in each pack, with `FILLER` for weightless records; whole steps.
        state: What the next cycle starts from.
        dropped: Arrivals that were left out because they don't fill a step.
        over_capacity: Packs that hold more than the capacity.
        overdue: Records that stay longer than `max_age`, for the capacity's sake.
    """

    packs: list[list[int]]
    state: PoolState
    dropped: int
    over_capacity: int = 0
    overdue: int = 0


def initial_state(config: PlannerConfig) -> PoolState:
    """Returns the state before the first record."""
    del config  # every policy starts from an empty pool
    return PoolState(0, 0, 0, np.empty(0, np.int64), np.empty(0, np.float64))


def finished(config: PlannerConfig, state: PoolState) -> bool:
    """Whether `num_packs` packs were emitted. Without `num_packs` only the stream's end says so."""
    return config.num_packs is not None and state.emitted >= config.num_packs


def records_wanted(config: PlannerConfig, state: PoolState) -> int:
    """Returns how many new records the next cycle takes, unless the stream ends before."""
    size = _cycle_records(config) if state.read else _first_records(config)
    if config.num_packs is not None:
        size = min(size, config.num_packs * config.pack_size - state.read)
    return size


def _first_records(config: PlannerConfig) -> int:
    """Returns what the first cycle reads."""
    return config.step_records if config.policy == "arrival" else config.pool_records


def _cycle_records(config: PlannerConfig) -> int:
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
    return _start_of_cohort(config, int(_cohorts(config, np.array([position]))[0]) + following)


def _cohorts(config: PlannerConfig, positions: IntArray) -> IntArray:
    """Returns the number of each arrival's cohort, which is that of the cycle that read it."""
    first, later = _first_records(config), _cycle_records(config)
    return np.maximum(0, (positions - first) // later + 1)


def _start_of_cohort(config: PlannerConfig, cohort: int) -> int:
    return 0 if cohort == 0 else _first_records(config) + (cohort - 1) * _cycle_records(config)


def state_at(config: PlannerConfig, index: int) -> tuple[PoolState, int]:
    """Returns the state at the start of the cycle that gives pack `index`, and the pack's place in the cycle.

    Raises:
        ValueError: If `index` is negative, or the policy is `streaming`: its packs depend on all records before.

    >>> state_at(PlannerConfig(pack_size=2, lookahead=4), 6)[1]
    2
    """
    index = _integer("the index of a pack", index, 0)
    if config.policy == "streaming":
        raise ValueError(
            f"can't go to pack {index}: with policy='streaming' packs depend on all records before; restore a saved "
            "state instead, or use policy='windowed'"
        )
    records = _cycle_records(config)
    cycle, next_pack = divmod(index, records // config.pack_size)
    empty = initial_state(config)
    return dataclasses.replace(empty, cycle=cycle, read=cycle * records, emitted=index - next_pack), next_pack


def plan_cycle(
    config: PlannerConfig,
    state: PoolState,
    new_costs: npt.ArrayLike,
    *,
    final: bool,
    new_sizes: npt.ArrayLike | None = None,
) -> Cycle:
    """Plans one cycle.

    Args:
        config: The settings.
        state: What the last cycle returned, or `initial_state(config)`.
        new_costs: [n] costs of the arrivals since, positive and finite; n is `records_wanted(config, state)`, or
            less if `final`.
        final: Whether the stream has no more records.
        new_sizes: [n] sizes of the same arrivals, in tokens: positive integers. Needed with a capacity only.

    Returns:
        The packs and the next state. No packs mean that the stream is at its end.

    Raises:
        ValueError: If a stream that is not final brings too few records, or one with `tail="drop"` ends before its
            first step is full, or before `num_packs` packs are; or if a pack stays over the capacity and
            `on_overflow` is "error". The state is as it was, so that the cycle can be planned again.

    Complexity: O(W log W) for a pool of W records; see `capacity.fit_packs` for what a capacity adds.

    >>> config = PlannerConfig(pack_size=2, lookahead=2)
    >>> plan_cycle(config, initial_state(config), [9.0, 1.0, 8.0, 2.0], final=False).packs
    [[2, 3], [0, 1]]
    """
    new = np.asarray(new_costs, np.float64)
    wanted = records_wanted(config, state)
    if new.size != wanted and not (final and new.size < wanted):
        raise ValueError(f"the cycle wants {wanted} new records, got {new.size} (final={final})")
    positions = np.concatenate([state.live, np.arange(state.read, state.read + new.size)])
    costs = np.concatenate([state.costs, new])
    sizes = _pool_sizes(config, state, new_sizes, new.size)
    left_over = positions.size % config.step_records
    whole = positions.size - left_over
    if config.policy == "streaming" and new.size:
        state = _learned(config, state, costs, new.size)
    carried = np.empty(0, np.int64)
    tail: list[list[int]] = []
    over_capacity = overdue = dropped = 0
    if config.policy == "streaming" and not final and _carries(config, whole, state.read + new.size):
        steps, carried, state = _streaming_steps(config, state, positions, costs, read=state.read + new.size)
    else:
        steps = _STEPS[config.policy](config, costs[:whole])
    if final:
        num_packs = state.emitted + steps.size // config.pack_size
        tail, dropped = _tail_packs(config, positions[whole:], costs[whole:], num_packs)
    if config.capacity is not None and config.policy != "arrival":
        is_late = state.cycle - _cohorts(config, positions) >= config.max_age
        steps, tail, carried = _within_capacity(config, costs, sizes, positions, steps, tail, carried, is_late)
        overdue = int(np.count_nonzero(is_late[carried]))
    steps = _ordered(config, state.cycle, steps, costs)
    packs = [pack for step in steps for pack in positions[step].tolist()] + tail
    if config.capacity is not None:
        over_capacity = _check_capacity(config, sizes, positions, packs, state.emitted)
    state = dataclasses.replace(
        state,
        cycle=state.cycle + 1,
        read=state.read + new.size,
        emitted=state.emitted + len(packs),
        live=positions[carried],
        costs=costs[carried],
        sizes=sizes[carried] if sizes.size else sizes,
    )
    return Cycle(packs, state, dropped, over_capacity, overdue)


def _pool_sizes(config: PlannerConfig, state: PoolState, new_sizes: npt.ArrayLike | None, num_new: int) -> IntArray:
    """Returns the sizes of the pool, the newest arrivals last; none without a capacity."""
    if config.capacity is None:
        return state.sizes[:0]
    new = np.asarray([] if new_sizes is None else new_sizes)
    if new.shape != (num_new,) or (new.size and (new.dtype.kind not in "iu" or new.min() < 1)):
        raise ValueError(f"with a capacity, new_sizes must be {num_new} positive integers, got {new_sizes!r}")
    sizes = np.concatenate([state.sizes, new.astype(np.int64)])
    longest = sizes.max(initial=0)
    if isinstance(config.capacity, tuple) and longest > config.capacity[1]:
        raise ValueError(
            f"a record has {longest} tokens, but a row of the capacity {config.capacity} only {config.capacity[1]}: "
            "cap records upstream (cap_oversize), or take a longer row"
        )
    return sizes


def _within_capacity(
    config: PlannerConfig,
    costs: FloatArray,
    sizes: IntArray,
    positions: IntArray,
    steps: IntArray,
    tail: list[list[int]],
    carried: IntArray,
    is_late: BoolArray,
) -> tuple[IntArray, list[list[int]], IntArray]:
    """Returns the steps, the tail and what is carried, with records exchanged so that packs fit."""
    assert config.capacity is not None
    real = [[p for p in pack if p != FILLER] for pack in tail]
    fillers = [len(pack) - len(kept) for pack, kept in zip(tail, real, strict=True)]
    whole = steps.reshape(-1, config.pack_size).tolist()
    packs, carried, changed = fit_packs(
        config.capacity,
        costs,
        sizes,
        whole + [np.searchsorted(positions, np.array(pack, np.int64)).tolist() for pack in real],
        carried=carried,
        pinned=is_late,
        fillers=[0] * len(whole) + fillers,
        carry_at_most=_carry_at_most(config, read=int(positions[-1]) + 1) * carried.size if carried.size else math.inf,
    )
    if not changed:
        return steps, tail, carried
    tail_packs = zip(packs[len(whole) :], fillers, strict=True)
    tail = [positions[pack].tolist() + [FILLER] * count for pack, count in tail_packs]
    return _grouped(config, costs, np.array(packs[: len(whole)], np.int64).reshape(-1, config.pack_size)), tail, carried


def _carry_at_most(config: PlannerConfig, *, read: int) -> float:
    """Returns how many tokens a carried record should have on average, so that the last pool fits.

    The last pool has nothing to exchange with, and its second half is yet unknown: the first must be light.
    """
    if config.num_packs is None or config.num_packs * config.pack_size - read > END_POOLS * config.pool_records:
        return math.inf
    assert config.capacity is not None
    tokens = config.capacity if isinstance(config.capacity, int) else math.prod(config.capacity)
    return END_FILL * tokens / config.pack_size


def _check_capacity(
    config: PlannerConfig, sizes: IntArray, positions: IntArray, packs: list[list[int]], emitted: int
) -> int:
    """Returns how many packs are over the capacity, or raises if they must not be."""
    assert config.capacity is not None
    size_of = dict(zip(positions.tolist(), sizes.tolist(), strict=True)) | {FILLER: FILLER_SIZE}
    excesses = [overflow(config.capacity, [size_of[p] for p in pack]) for pack in packs]
    over = [i for i, excess in enumerate(excesses) if excess]
    if over and config.on_overflow == "error":
        worst = max(over, key=excesses.__getitem__)
        mean = sum(size_of[p] for pack in packs for p in pack) / len(packs)
        raise ValueError(
            f"pack {emitted + worst} is over the capacity {config.capacity} by {excesses[worst]} tokens, as are "
            f"{len(over)} of the cycle's {len(packs)} packs, which hold {mean:.0f} tokens on average; nothing of the "
            "cycle has come out. Raise capacity (a saved state goes on with another), or use "
            "on_overflow='extra_chunk' with a layout that can add chunks"
        )
    return len(over)


def _learned(config: PlannerConfig, state: PoolState, costs: FloatArray, num_new: int) -> PoolState:
    memory = streaming.Memory(state.cost_sum, state.ceiling, state.drift)
    read = state.read + num_new
    memory = streaming.learn(memory, costs, read=read, num_new=num_new, pack_size=config.pack_size, prior=config.prior)
    return dataclasses.replace(state, **memory._asdict())


def _carries(config: PlannerConfig, pool_records: int, read: int) -> bool:
    """Whether this cycle leaves a part of the pool to later ones: the pool is full, and more is to come."""
    more = config.num_packs is None or read < config.num_packs * config.pack_size
    return more and pool_records == config.pool_records > _cycle_records(config)


def _streaming_steps(
    config: PlannerConfig, state: PoolState, positions: IntArray, costs: FloatArray, *, read: int
) -> tuple[IntArray, IntArray, PoolState]:
    """Returns the cycle's steps and what is carried, as pool positions, and the state with what was learned."""
    remaining = None
    if config.num_packs is not None:
        remaining = config.num_packs * config.pack_size - read + positions.size
    plan, memory = streaming.plan(
        streaming.Memory(state.cost_sum, state.ceiling, state.drift),
        costs,
        state.cycle - _cohorts(config, positions),
        read=read,
        remaining=remaining,
        num_packs=_cycle_records(config) // config.pack_size,
        pack_size=config.pack_size,
        max_age=config.max_age,
        cycle=state.cycle,
        prior=config.prior,
    )
    return _grouped(config, costs, plan.packs), plan.carried, dataclasses.replace(state, **memory._asdict())


def _arrival_steps(config: PlannerConfig, costs: FloatArray) -> IntArray:
    return np.arange(costs.size).reshape(-1, config.packs_per_step, config.pack_size)


def _windowed_steps(config: PlannerConfig, costs: FloatArray) -> IntArray:
    """Partitions the whole pool."""
    packs = np.array(balanced_partition(costs, max(1, costs.size // config.pack_size)), np.int64)
    return _grouped(config, costs, packs.reshape(-1, config.pack_size))


def _grouped(config: PlannerConfig, costs: FloatArray, packs: IntArray) -> IntArray:
    """Groups packs into steps: neighbours in cost, so that a host's devices wait for each other least."""
    if config.packs_per_step > 1:
        packs = packs[np.argsort(-_sums(costs, packs), kind="stable")]
    return packs.reshape(-1, config.packs_per_step, config.pack_size)


_STEPS: dict[str, Callable[[PlannerConfig, FloatArray], IntArray]] = {
    "arrival": _arrival_steps,
    "windowed": _windowed_steps,
    "streaming": _windowed_steps,  # the last pool, of which nothing is carried
}
"""How a policy groups a pool of whole steps: costs -> pool positions [steps, packs_per_step, pack_size]."""


def _ordered(config: PlannerConfig, cycle: int, steps: IntArray, costs: FloatArray) -> IntArray:
    """Puts a cycle's steps into the order in which they come, and everything inside a step in order of arrival."""
    steps = np.sort(steps, axis=2)
    if config.packs_per_step > 1:
        by_arrival = np.argsort(steps[:, :, 0], axis=1, kind="stable")
        steps = np.take_along_axis(steps, by_arrival[:, :, None], axis=1)
    if config.policy == "arrival" or len(steps) < 2:
        return steps
    # The partition numbers packs by their dearest record: going by arrival forgets that, so that a permutation
    # alike on all streams still shuffles each independently.
    steps = steps[np.argsort(steps[:, 0, 0], kind="stable")]
    if config.order == "aligned":
        steps = steps[np.argsort(-_sums(costs, steps.reshape(len(steps), -1)), kind="stable")]
    return steps[_permutation(config.seed, cycle, len(steps))]


def _permutation(seed: int, cycle: int, n: int) -> IntArray:
    """Returns a permutation keyed by its arguments; raw bits are stable between NumPy's versions, methods aren't."""
    return np.argsort(np.random.PCG64([seed, cycle, n]).random_raw(n), kind="stable")


def _sums(costs: FloatArray, groups: IntArray) -> FloatArray:
    """Returns the sum of each row of `groups`, added from left to right so that every machine rounds alike."""
    return np.add.accumulate(costs[groups], axis=1)[:, -1]


def _tail_packs(
    config: PlannerConfig, positions: IntArray, costs: FloatArray, emitted: int
) -> tuple[list[list[int]], int]:
    """Returns the packs of the last, incomplete step and of those still missing, and how many arrivals to drop."""
    missing = 0 if config.num_packs is None else config.num_packs - emitted
    if config.tail == "drop":
        if missing or (positions.size and not emitted):
            needed = config.step_records if config.num_packs is None else config.num_packs * config.pack_size
            raise ValueError(
                f"the stream ended after {emitted * config.pack_size + positions.size} records, but {needed} are "
                f"needed ({config.describe()}): use tail='keep' or tail='pad', or a smaller pack_size or num_packs"
            )
        return [], int(positions.size)
    steps = max(missing // config.packs_per_step, 1 if positions.size else 0)
    packs: list[list[int]] = []
    for step in range(steps):
        real = positions if step == 0 else positions[:0]
        padded = np.concatenate([real, np.full(config.step_records - real.size, FILLER)])
        weights = np.concatenate([costs[: real.size], np.zeros(config.step_records - real.size)])
        for pack in balanced_partition(weights, config.packs_per_step):
            records = sorted(int(p) for p in padded[pack] if p != FILLER)
            filler = [FILLER] * (config.pack_size - len(records)) if config.tail == "pad" else []
            packs.append(records + filler)
    return packs, 0


def plan_digest(packs: list[list[int]]) -> int:
    """Returns a checksum of a plan (CRC-32): a restored pipeline compares it with the plan it makes again."""
    digest = 0
    for pack in packs:
        digest = zlib.crc32(np.asarray(pack, "<i8").tobytes(), zlib.crc32(len(pack).to_bytes(4, "little"), digest))
    return digest
