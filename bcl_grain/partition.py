"""Balanced partition with equal cardinality: n costs into packs of n / num_packs each, the largest one kept small.

Every pack holds the same number of records; only their costs differ. Packs are lists of positions into the
costs given.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def balanced_partition(
    costs: npt.ArrayLike, num_packs: int, offsets: Sequence[float] | FloatArray | None = None
) -> list[list[int]]:
    """Partitions `costs` into `num_packs` packs of equal cardinality and balanced sum.

    Longest processing time first with a limit on cardinality: in descending order of cost (ties by position),
    each record goes to the lightest pack (ties by index) that has room.

    The largest sum is at most `mean + (1 - 1/m) * (c_max - c_min)` for m packs of mean sum `mean`, hence at most
    (2 - 1/m) times the optimum. Proof: it is enough that two packs A and B differ by at most c_max - c_min. Write
    their records in descending order a_1.. and b_1..; let B be the one that fills first, or A if A does. From the
    moment B is full, A only gets records no larger than any of B's, so only A's records before it matter. Go down
    from the last of them, a_j, to the first: if B held at least j records when a_j came, then b_j >= a_j and a_j adds
    nothing to the difference; else A was the lighter, a_1 + .. + a_{j-1} <= b_1 + .. + b_{j-1}, and the difference
    is at most a_j - b_j.

    Args:
        costs: [n] finite costs, n a multiple of `num_packs`.
        num_packs: Number of packs, at least 1.
        offsets: What each pack weighs before it gets its first record; default 0 for each. The bound above holds
            for zero offsets.

    Returns:
        `num_packs` lists of n / num_packs positions each, in descending order of cost.

    Raises:
        ValueError: If n is not a multiple of `num_packs`, or `offsets` has another length.

    Complexity: O(n log n) time, O(n) memory.

    >>> balanced_partition([9.0, 1.0, 8.0, 2.0, 7.0, 3.0], num_packs=2)
    [[0, 5, 3], [2, 4, 1]]
    """
    values = np.asarray(costs, np.float64)
    capacity = pack_capacity(values.size, num_packs)
    order = np.argsort(-values, kind="stable")
    positions = order.tolist()
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    if offsets is not None and len(offsets) != num_packs:
        raise ValueError(f"expected {num_packs} offsets, one for each pack, got {len(offsets)}")
    heap = [(0.0 if offsets is None else float(offsets[j]), j) for j in range(num_packs)]
    heapq.heapify(heap)
    replace, pop = heapq.heapreplace, heapq.heappop
    for i, cost in zip(positions, values[order].tolist(), strict=True):
        load, j = heap[0]
        pack = packs[j]
        pack.append(i)
        if len(pack) == capacity:
            pop(heap)
        else:
            replace(heap, (load + cost, j))
    return packs


def pack_levels(costs: npt.ArrayLike, num_packs: int, packs_per_step: int, *, total: float | None = None) -> FloatArray:
    """Returns what each pack should cost, so that the packs of one step are equal even where records are very dear.

    A step lasts as long as its dearest pack. A record dearer than a mean pack makes its step dear whatever comes with
    it; at the mean, the other packs of that step would wait. So they are raised to its level, and all other steps
    become cheaper for it: the step's time is used instead of waited for. A step's level is what its dearest record
    costs together with cheap ones: with L packs a step, the (j L + 1)-th dearest record for step j = 0, 1, ...
    Steps are raised in this order while that is more than what the others would get, which share the rest evenly.

    Args:
        costs: [n] positive costs, n a positive multiple of `num_packs`.
        num_packs: Number of packs, a positive multiple of `packs_per_step`.
        packs_per_step: Packs in a step. With one there is nobody to wait: all levels are the mean.
        total: What the levels sum to; default: what the costs sum to.

    Returns:
        [num_packs] levels, not rising; those of a step are equal.

    Complexity: O(n log n).

    >>> pack_levels([9.0, 1.0, 1.0, 1.0, 5.0, 5.0, 4.0, 2.0], num_packs=4, packs_per_step=2).tolist()
    [10.0, 10.0, 4.0, 4.0]
    """
    values = np.asarray(costs, np.float64)
    pack_size, num_steps = pack_capacity(values.size, num_packs), num_packs // packs_per_step
    left = (float(np.add.accumulate(values)[-1]) if total is None else total) / packs_per_step
    share = left / num_steps
    if packs_per_step == 1:
        return np.full(num_packs, share)
    ascending = np.sort(values)
    sums = np.append(0.0, np.add.accumulate(ascending))
    raised: list[float] = []
    for step in range(num_steps - 1):
        companions, others = (step + 1) * packs_per_step * (pack_size - 1), num_steps - step - 1
        low = float(sums[companions]) / companions if companions else 0.0
        level = float(ascending[-1 - step * packs_per_step]) + (pack_size - 1) * low
        # The others can't cost less than the cheapest records do; more cheap companions are a little dearer.
        level = min([level, left - float(sums[others * packs_per_step * pack_size]) / packs_per_step, *raised[-1:]])
        if level <= share:
            break
        raised.append(level)
        left -= level
        share = left / others
    return np.repeat(np.array(raised + [share] * (num_steps - len(raised))), packs_per_step)


def pack_capacity(num_records: int, num_packs: int) -> int:
    """Returns records per pack.

    Raises:
        ValueError: If `num_packs` is not positive, or does not divide `num_records`.
    """
    if num_packs < 1:
        raise ValueError(f"num_packs must be at least 1, got {num_packs!r}")
    if num_records % num_packs:
        raise ValueError(f"{num_records} records can't be split into {num_packs} packs of equal cardinality")
    return num_records // num_packs


def lower_bound(costs: npt.ArrayLike, num_packs: int) -> float:
    """Returns a value that no partition of equal cardinality can beat with its largest pack.

    The maximum of three bounds (Dell'Amico and Martello, "Bounds for the cardinality constrained P||Cmax
    problem", Journal of Scheduling 2001, discuss such bounds):
    the mean sum; the dearest record with the p - 1 cheapest of the others; and, where p >= 2, the cheapest way in
    which two of the m + 1 dearest records meet in one pack, as some two must.

    Args:
        costs: [n] finite costs, n a multiple of `num_packs`.
        num_packs: Number of packs, at least 1.

    Raises:
        ValueError: If n is not a multiple of `num_packs`.

    Complexity: O(n log n).

    >>> lower_bound([9.0, 1.0, 1.0, 1.0], num_packs=2)
    10.0
    """
    ascending = np.sort(np.asarray(costs, np.float64))
    capacity = pack_capacity(ascending.size, num_packs)
    if not capacity:
        return 0.0
    bounds = [float(ascending.sum()) / num_packs, float(ascending[-1] + ascending[: capacity - 1].sum())]
    if capacity >= 2:
        two = ascending[-num_packs] + ascending[-num_packs - 1]
        bounds.append(float(two + ascending[: capacity - 2].sum()))
    return max(bounds)


def check_partition(packs: Sequence[Sequence[int]], num_records: int, num_packs: int) -> None:
    """Checks that `packs` is a partition of positions 0..num_records-1 into packs of equal cardinality.

    Raises:
        ValueError: If there is another number of packs, a pack of another size, a position out of range, one
            that occurs twice, or one that is missing; the message names the first found.

    >>> check_partition([[0, 1], [2, 2]], num_records=4, num_packs=2)
    Traceback (most recent call last):
    ...
    ValueError: position 2 is in pack 1 twice or in an earlier pack too
    """
    capacity = pack_capacity(num_records, num_packs)
    if len(packs) != num_packs:
        raise ValueError(f"expected {num_packs} packs, got {len(packs)}")
    seen: set[int] = set()
    for j, pack in enumerate(packs):
        if len(pack) != capacity:
            raise ValueError(f"pack {j} holds {len(pack)} records instead of {capacity}")
        for position in pack:
            if not 0 <= position < num_records:
                raise ValueError(f"position {position} of pack {j} is not in 0..{num_records - 1}")
            if position in seen:
                raise ValueError(f"position {position} is in pack {j} twice or in an earlier pack too")
            seen.add(position)
    # Equal cardinality without repetition covers every position, so nothing can be missing here.
