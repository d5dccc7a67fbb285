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
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bcl_grain import streaming
from bcl_grain.capacity import FILLER_SIZE, fit_packs, overflow
from bcl_grain.partition import balanced_partition, pack_levels
from bcl_grain.planner_config import OnOverflow, Order, PlannerConfig, Policy, Tail
from bcl_grain.pool_state import (
    PoolState,
    cohort_start,
    cohorts,
    cycle_records,
    finished,
    initial_state,
    oldest_wait,
    records_wanted,
    state_at,
)

# The planner's front door: its users find settings and state here too.
__all__ = [
    "FILLER",
    "Cycle",
    "OnOverflow",
    "Order",
    "PlannerConfig",
    "Policy",
    "PoolState",
    "Tail",
    "cohort_start",
    "finished",
    "initial_state",
    "oldest_wait",
    "plan_cycle",
    "plan_digest",
    "records_wanted",
    "state_at",
]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

FILLER = -1
"""Stands for a weightless record in a pack: with `tail="pad"` where the stream has too few records."""

END_POOLS = 8  # with so many pools yet to come, a capacity makes `streaming` empty its carry of large records
END_FILL = 0.85  # how full packs of the carry would be then


class Cycle(NamedTuple):
    """One planned cycle.

    Attributes:
        packs: Arrival positions, ascending in each pack, with `FILLER` for weightless records; whole steps.
        state: What the next cycle starts from.
        dropped: Arrivals that were left out because they don't fill a step.
        over_capacity: Packs that hold more than the capacity.
        overdue: Records that stay longer than `max_age`, for the capacity's sake.
        target: The cost that each pack was aimed at: the long-run mean for `streaming`, else the pool's mean.
    """

    packs: list[list[int]]
    state: PoolState
    dropped: int
    over_capacity: int = 0
    overdue: int = 0
    target: float = 0.0


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

    >>> config = PlannerConfig(pack_size=2, lookahead=2, policy="windowed")
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
    target = float(costs[:whole].mean()) * config.pack_size if whole else 0.0
    if config.policy == "streaming" and not final and _carries(config, whole, state.read + new.size):
        steps, carried, target, state = _streaming_steps(config, state, positions, costs, read=state.read + new.size)
    else:
        steps = _STEPS[config.policy](config, costs[:whole])
    if final:
        num_packs = state.emitted + steps.size // config.pack_size
        tail, dropped = _tail_packs(config, positions[whole:], costs[whole:], num_packs)
    if config.capacity is not None and config.policy != "arrival":
        is_late = state.cycle - cohorts(config, positions) >= config.max_age
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
    return Cycle(packs, state, dropped, over_capacity, overdue, target)


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


def _memory(state: PoolState) -> streaming.Memory:
    return streaming.Memory(state.cost_sum, state.ceiling, state.drift)


def _learned(config: PlannerConfig, state: PoolState, costs: FloatArray, num_new: int) -> PoolState:
    read = state.read + num_new
    memory = streaming.learn(
        _memory(state), costs, read=read, num_new=num_new, pack_size=config.pack_size, prior=config.prior
    )
    return dataclasses.replace(state, **memory._asdict())


def _carries(config: PlannerConfig, pool_records: int, read: int) -> bool:
    """Whether this cycle leaves a part of the pool to later ones: the pool is full, and more is to come."""
    more = config.num_packs is None or read < config.num_packs * config.pack_size
    return more and pool_records == config.pool_records > cycle_records(config)


def _streaming_steps(
    config: PlannerConfig, state: PoolState, positions: IntArray, costs: FloatArray, *, read: int
) -> tuple[IntArray, IntArray, float, PoolState]:
    """Returns the cycle's steps, what is carried, as pool positions, the target, and what was learned, in the state."""
    remaining = None
    if config.num_packs is not None:
        remaining = config.num_packs * config.pack_size - read + positions.size
    plan, memory = streaming.plan(
        _memory(state),
        costs,
        state.cycle - cohorts(config, positions),
        read=read,
        remaining=remaining,
        num_packs=cycle_records(config) // config.pack_size,
        pack_size=config.pack_size,
        packs_per_step=config.packs_per_step,
        max_age=config.max_age,
        cycle=state.cycle,
        prior=config.prior,
    )
    steps = _grouped(config, costs, plan.packs)
    return steps, plan.carried, plan.target, dataclasses.replace(state, **memory._asdict())


def _arrival_steps(config: PlannerConfig, costs: FloatArray) -> IntArray:
    return np.arange(costs.size).reshape(-1, config.packs_per_step, config.pack_size)


def _windowed_steps(config: PlannerConfig, costs: FloatArray) -> IntArray:
    """Partitions the whole pool, so that the packs of a step are equal."""
    num_packs = costs.size // config.pack_size
    levels = pack_levels(costs, num_packs, config.packs_per_step) if num_packs else np.zeros(1)
    packs = np.array(balanced_partition(costs, levels.size, levels[-1] - levels), np.int64)
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
