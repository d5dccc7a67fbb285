"""The streaming policy: emit half the pool, each pack aimed at the stream's long-run mean, and carry the rest.

Windowed balancing makes the packs of a window equal, but every window has another mean, so pack costs keep
1/sqrt(lookahead) of their variation. Here the pool takes up the random walk of the arrivals instead: a cycle emits half
of its steps at a *target* cost, alike from cycle to cycle, and what the arrivals bring above or below it drifts into
the carry. All functions are pure; the planner calls `learn` and then `plan` once a cycle. docs/policies.md derives the
rules and their constants.

    arrivals --> [ pool of W records ] --> choose E = half: total on target, older first, outliers held back a little
                        ^      |                  |
                        |      | carry            v
                        +------+           partition into packs --> swap with the carry until each is on target
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bcl_grain.cost_prior import CostPrior, balanceable_ceiling
from bcl_grain.partition import balanced_partition, pack_levels

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# The constants are dimensionless; docs/policies.md gives the argument and docs/log.md the measurement behind each.
SPRING = 0.01  # share of the pool's deviation that a cycle's packs give back where the end is not in sight
RELEASE = 0.5  # the same as a share of pool / remaining records, where it is
PRIOR_STRAIN = 0.25  # how far a wrong prior may push the pool's mean, in standard deviations of a record
DRIFT_MEMORY = 0.25  # weight of the newest cohort in the drift statistic
DRIFT_BEGINS, DRIFT_ENDS = 5.0, 10.0  # where the target starts to follow the pool, and where it is the pool's mean
AGE_PULL = 0.2  # how much likelier a record is chosen for each cycle that it has waited
WAVE_CYCLES = 2  # records above the ceiling wait and come out together every so many cycles
STEP_WAVE_PULL = 3.0  # how much likelier they are chosen then where packs share a step; elsewhere like others
SWAP_ROUNDS = 2
STEP_SWAP_ROUNDS = 4  # where packs share a step: there the worst of them counts
SWAP_TOLERANCE = 1e-4  # of the target
PHASE_STEP = (math.sqrt(5) - 1) / 2  # spreads the systematic sample's phases evenly over cycles


class Memory(NamedTuple):
    """What the policy remembers of the records that have left the pool.

    Attributes:
        cost_sum: Sum of all costs read, each up to the ceiling of its time.
        ceiling: Costs above it can't be balanced; see `balanceable_ceiling`.
        drift: Mean square of the last cohorts' deviations from the long-run mean, in their standard errors: about 1
            where records come in random order.
    """

    cost_sum: float = 0.0
    ceiling: float = 0.0
    drift: float = 1.0


class Plan(NamedTuple):
    """What one cycle emits.

    Attributes:
        packs: [packs, pack_size] pool positions.
        carried: Pool positions of the rest, ascending.
        target: The cost that each pack was aimed at.
    """

    packs: IntArray
    carried: IntArray
    target: float


def learn(
    memory: Memory, costs: FloatArray, *, read: int, num_new: int, pack_size: int, prior: CostPrior | None
) -> Memory:
    """Takes in the newest arrivals.

    Args:
        memory: What was known before them.
        costs: [n] costs of the pool; the newest arrivals are its last `num_new`.
        read: Arrivals so far, with the newest.
        num_new: Number of the newest arrivals, at least 1.
        pack_size: Records in a pack.
        prior: Evidence from before the stream's start.

    Complexity: O(n log n) for the first cohort, O(n) after.
    """
    if read == num_new:
        if prior is None:
            ceiling = balanceable_ceiling(costs, pack_size)
        else:
            ceiling = math.inf if prior.ceiling is None else prior.ceiling
        # JSON has no infinity.
        ceiling = min(ceiling, float(np.finfo(np.float64).max))
        return Memory(_sum(np.minimum(costs, ceiling)), ceiling, 1.0)
    new_sum = _sum(np.minimum(costs[-num_new:], memory.ceiling))
    mean = memory.cost_sum / (read - num_new)
    variance = _variance(np.minimum(costs, memory.ceiling))
    surprise = (new_sum / num_new - mean) ** 2 * num_new / variance if variance > 0 else 1.0
    drift = memory.drift + DRIFT_MEMORY * (surprise - memory.drift)
    return Memory(memory.cost_sum + new_sum, memory.ceiling, drift)


def plan(
    memory: Memory,
    costs: FloatArray,
    ages: IntArray,
    *,
    read: int,
    remaining: int | None,
    num_packs: int,
    pack_size: int,
    packs_per_step: int,
    max_age: int,
    cycle: int,
    prior: CostPrior | None,
) -> tuple[Plan, Memory]:
    """Chooses the packs of one cycle.

    Args:
        memory: What `learn` returned for this cycle.
        costs: [n] costs of the pool, more than `num_packs * pack_size`.
        ages: [n] cycles that each record has waited.
        read: Arrivals so far.
        remaining: Records yet to emit, the pool's included, or None where the end is not in sight.
        num_packs: Packs to emit.
        pack_size: Records in a pack.
        packs_per_step: Packs in a step.
        max_age: Records that have waited as long come out now.
        cycle: Number of the cycle, alike on all streams.
        prior: Evidence from before the stream's start.

    Returns:
        The plan, and the memory for the next cycle. No record comes out later than `max_age` cycles after it was
        read if at most half of the pool is carried.

    Complexity: O(n log n), with two sorts of n numbers and one heap over the records that come out.
    """
    clipped = np.minimum(costs, memory.ceiling)
    order = np.argsort(clipped, kind="stable")
    ascending = clipped[order]
    level = _target(memory, ascending, read=read, remaining=remaining, prior=prior)
    size = num_packs * pack_size
    outliers = costs > memory.ceiling
    drifts = memory.drift > DRIFT_BEGINS
    pull = 1.0 + AGE_PULL * ages.astype(np.float64)
    overdue = ages >= max_age
    if not drifts and costs.size - np.count_nonzero(outliers) >= size:
        later = None if remaining is None else (remaining - costs.size - 1) // size
        period = max(1, min(WAVE_CYCLES, max_age // 2))  # what is not chosen at first has a second chance
        if _outliers_wait(period, cycle, later):
            pull[outliers] = 0.0
        else:
            if packs_per_step > 1:  # with one, those that stay behind even out how many each rank has
                pull[outliers] *= STEP_WAVE_PULL
            overdue |= outliers & (ages > max_age - period)  # they can't wait for the next wave; all are of the carry
    phase = cycle * PHASE_STEP % 1.0
    chosen, within_reach = _choose(ascending, pull[order], overdue[order], size, level * size, phase=phase)
    if not within_reach:  # then equal packs are worth more than a few that come nearer
        level = _sum(ascending[chosen]) / size
    emitted, carried = order[chosen], order[~chosen]
    levels, rounds = np.full(num_packs, level * pack_size), SWAP_ROUNDS
    if packs_per_step > 1:
        excess = _sum(costs[emitted] - clipped[emitted])
        levels = pack_levels(costs[emitted], num_packs, packs_per_step, total=level * size + excess)
        rounds = STEP_SWAP_ROUNDS
    packs = emitted[np.array(balanced_partition(costs[emitted], num_packs, levels[-1] - levels), np.int64)]
    packs, carried = _swapped(costs, packs, carried, levels, overdue | outliers, rounds)
    if prior is None:
        quarter = ascending[: max(1, ascending.size // 4)]
        # One step of the fixed-point iteration of `balanceable_ceiling` per cycle. In random order from the mean of
        # all records: the pool's follows the outliers that wait in it, and would carry the ceiling along.
        mean = level if drifts else memory.cost_sum / read
        ceiling = pack_size * mean - (pack_size - 1) * _sum(quarter) / quarter.size
        memory = memory._replace(ceiling=max(ceiling, float(ascending[0])))
    return Plan(packs, np.sort(carried), level * pack_size), memory


def _outliers_wait(period: int, cycle: int, later: int | None) -> bool:
    """Whether records above the ceiling stay in the pool in this cycle; they come out in one of `period`.

    The answer must be alike on all streams, so that these records meet: nothing that a stream saw goes into it.

    Args:
        period: Cycles from one time to the next.
        cycle: Number of the cycle.
        later: Cycles after this one that carry a part of the pool, or None where the end is not in sight. The last of
            them lets the records out, so that the last pool has no more of them than others.
    """
    return later % period != 0 if later is not None else cycle % period != period - 1


def _target(
    memory: Memory, ascending: FloatArray, *, read: int, remaining: int | None, prior: CostPrior | None
) -> float:
    """Returns the cost per record to aim at: the long-run mean, with a part of the pool's deviation from it."""
    n = ascending.size
    pool_mean = _sum(ascending) / n
    mean, own_share = memory.cost_sum / read, 1.0
    if prior is not None:
        variance = _variance(ascending)
        counts_for = float(prior.records)
        # How far the prior must be off, beyond two standard errors of the stream's own mean.
        error_square = (mean - prior.mean) ** 2 - 4 * variance / read
        if error_square > 0:
            counts_for = min(counts_for, PRIOR_STRAIN * n * math.sqrt(variance / error_square))
        own_share = read / (read + counts_for)
        mean = prior.mean + own_share * (mean - prior.mean)
    deviation = pool_mean - mean
    # The halves' distance from the pool's mean bounds what any choice of half the pool can make up for.
    reach = _sum(ascending[n - n // 2 :]) / (n // 2) - pool_mean
    strain = min(1.0, abs(deviation) / reach) if reach > 0 else 0.0
    for _ in range(4):
        strain *= strain  # to the 16th power: no force inside, a wall where the carry would run out of choice
    release = 0.0 if remaining is None else RELEASE * own_share * n / remaining
    follow = (memory.drift - DRIFT_BEGINS) / (DRIFT_ENDS - DRIFT_BEGINS)
    return mean + min(1.0, max(SPRING, release, follow) + strain) * deviation


def _choose(
    ascending: FloatArray, pull: FloatArray, overdue: BoolArray, size: int, total: float, *, phase: float
) -> tuple[BoolArray, bool]:
    """Chooses `size` records with a sum of about `total`: a systematic sample with unequal probabilities.

    Returns which records, in the order of `ascending`, and whether `total` is within reach; if not, the sum is as
    near to it as any tilt brings it.

    At least `size` records are overdue or have a pull; those without come out only if they are overdue.

    A record's probability is its pull times `a + b * u`, with u from -1 for the cheapest to 1 for the dearest, and a, b
    such that the expected count and sum are right (Madow, "On the theory of systematic sampling, II", 1949, has the
    sampling; the tilt is linear). Neighbours in cost share their probabilities, so the choice is as spread over the
    costs as the pool is, an older record goes before a younger one of the same cost, and the sum misses `total` by
    about one gap between neighbours.
    """
    chosen = overdue.copy()
    free = np.flatnonzero(~overdue)
    size -= ascending.size - free.size
    if size <= 0 or not free.size:
        return chosen, False
    total -= _sum(ascending[overdue]) if free.size < ascending.size else 0.0
    costs, pull = ascending[free], pull[free]
    u = np.linspace(-1.0, 1.0, costs.size)
    pulled = pull * u
    count, count_u, cost, cost_u = _sum(pull), _sum(pulled), _sum(pull * costs), _sum(pulled * costs)
    determinant = count * cost_u - count_u * cost
    a, b, within_reach = size / count, 0.0, determinant > 0
    if determinant > 0:
        a, b = (size * cost_u - total * count_u) / determinant, (count * total - cost * size) / determinant
        if abs(b) > a:  # tilt as far as no probability falls below 0
            within_reach = False
            sign = math.copysign(1.0, b)
            a = size / (count + sign * count_u)
            b = sign * a
    probability = np.minimum(a * pull + b * pulled, 1.0)
    for _ in range(2):  # what was cut at 1 goes to the others
        below = probability < 1
        missing = size - (costs.size - np.count_nonzero(below))
        within = _sum(probability[below])
        if within <= 0:
            break
        probability[below] *= missing / within
        np.minimum(probability, 1.0, out=probability)
    ticks = np.floor(np.add.accumulate(probability) + phase)
    picked = np.diff(ticks, prepend=math.floor(phase)) > 0
    surplus = int(np.count_nonzero(picked)) - size
    if surplus > 0:
        picked[np.flatnonzero(picked)[:surplus]] = False
    elif surplus < 0:
        rest = np.flatnonzero(~picked)
        rest = rest[np.argsort(probability[rest] > 0, kind="stable")]
        picked[rest[surplus:]] = True
    chosen[free[picked]] = True
    return chosen, within_reach


def _swapped(
    costs: FloatArray, packs: IntArray, carried: IntArray, levels: FloatArray, fixed: BoolArray, rounds: int
) -> tuple[IntArray, IntArray]:
    """Brings each pack onto its level by exchanging one record at a time with the carry, for some rounds.

    In a round, each pack looks for its best exchange: for every record of it the carried one nearest to the cost that
    would close the gap. Two packs that want the same carried record: the first gets it. Fixed records stay.
    """
    carried, fixed_carry = carried[~fixed[carried]], carried[fixed[carried]]
    if not carried.size:
        return packs, fixed_carry
    pack_costs = costs[packs]
    for _ in range(rounds):
        gaps = levels - np.add.accumulate(pack_costs, axis=1)[:, -1]
        open_packs = np.flatnonzero(np.abs(gaps) > SWAP_TOLERANCE * levels)
        if not open_packs.size:
            break
        carried = carried[np.argsort(costs[carried], kind="stable")]
        ladder = costs[carried]
        wanted = pack_costs[open_packs] + gaps[open_packs, None]
        above = np.minimum(np.searchsorted(ladder, wanted), ladder.size - 1)
        below = np.maximum(above - 1, 0)
        nearest = np.where(wanted - ladder[below] <= ladder[above] - wanted, below, above)
        misses = np.abs(ladder[nearest] - wanted)
        misses[fixed[packs[open_packs]]] = math.inf
        best = misses.argmin(axis=1)
        rows = np.arange(open_packs.size)
        places, errors = nearest[rows, best].tolist(), misses[rows, best].tolist()
        taken: set[int] = set()
        for pack, slot, place, error in zip(open_packs.tolist(), best.tolist(), places, errors, strict=True):
            if place in taken or error >= abs(gaps[pack]):
                continue
            taken.add(place)
            packs[pack, slot], carried[place] = carried[place], packs[pack, slot]
            pack_costs[pack, slot] = costs[packs[pack, slot]]
        if not taken:
            break
    return packs, np.concatenate([carried, fixed_carry])


def _sum(values: FloatArray) -> float:
    """Returns the sum from left to right, so that every machine rounds alike."""
    return float(np.add.accumulate(values)[-1]) if values.size else 0.0


def _variance(values: FloatArray) -> float:
    mean = _sum(values) / values.size
    deviations = values - mean
    return _sum(deviations * deviations) / values.size
