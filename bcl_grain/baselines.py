"""What a user would run instead of BCL: policies that see the records of all ranks at once.

Every function takes one value per record, [ranks, n]: row r is rank r's stream in arrival order, and step s of arrival
order is columns s * pack_size to (s + 1) * pack_size. A record is named by its place in the flattened array, r * n + i,
because these policies may give it to any rank. All of them use every record once, in the n / pack_size steps of
arrival order, so their costs compare with BCL's as they are.
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from bcl_grain.mffd import pooled_mffd
from bcl_grain.partition import balanced_partition, pack_capacity

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

Assignment = list[list[list[int]]]
"""Records by [rank][step]."""

BinAssignment = list[list[list[list[int]]]]
"""Records by [rank][step][bin]."""


def step_costs(assignment: Assignment, costs: npt.ArrayLike) -> FloatArray:
    """Returns what each rank's pack of each step costs, [ranks, steps].

    Args:
        assignment: Records by [rank][step], every rank with the same number of steps.
        costs: Cost of every record, [ranks, n].

    >>> step_costs([[[0, 3]], [[1, 2]]], [[9.0, 1.0], [8.0, 2.0]])
    array([[11.],
           [ 9.]])
    """
    values = np.asarray(costs, np.float64).ravel()
    return np.array([[values[pack].sum() for pack in steps] for steps in assignment])


@dataclasses.dataclass(frozen=True)
class BinCosts:
    """What a packing costs, counted twice. A device that runs whole bins is near `padded`, and none is below `useful`.

    Attributes:
        useful: [ranks, steps] sums of the records' costs, as if padding were free.
        padded: [ranks, steps] costs with every bin as dear as a full one.
        num_bins: [ranks, steps] bins.
    """

    useful: FloatArray
    padded: FloatArray
    num_bins: IntArray

    @property
    def bins_per_rank(self) -> float:
        """Mean bins of a rank in a step. Below about 6, packing balances badly for want of bins."""
        return float(self.num_bins.mean())


def bin_costs(bins: BinAssignment, costs: npt.ArrayLike, *, full_bin_cost: float) -> BinCosts:
    """Returns both costs of a packing.

    Args:
        bins: Records by [rank][step][bin], every rank with the same number of steps.
        costs: Cost of every record, [ranks, n].
        full_bin_cost: Cost of a bin padded to its capacity, in the unit of `costs`.

    >>> bin_costs([[[[0], [2]]], [[[1], [3]]]], [[9.0, 1.0], [8.0, 2.0]], full_bin_cost=10.0)
    BinCosts(useful=array([[17.],
           [ 3.]]), padded=array([[20.],
           [20.]]), num_bins=array([[2],
           [2]]))
    """
    num_bins = np.array([[len(step) for step in steps] for steps in bins], np.int64)
    records = [[[i for members in step for i in members] for step in steps] for steps in bins]
    return BinCosts(useful=step_costs(records, costs), padded=num_bins * np.float64(full_bin_cost), num_bins=num_bins)


def mffd_steps(sizes: npt.ArrayLike, *, capacity: int, pack_size: int) -> BinAssignment:
    """Packs each global batch of ranks * pack_size records by pooled modified first-fit decreasing.

    Args:
        sizes: [ranks, n] integer sizes in tokens, n a multiple of `pack_size`.
        capacity: Tokens that a bin holds: the longest record at least, times the records of a micro-batch.
        pack_size: Records per rank and step in arrival order; a rank gets as many on average here.

    Returns:
        Records by [rank][step][bin]; in a step every rank has the same number of bins.

    Raises:
        ValueError: As `mffd.pooled_mffd`, or if n is not a multiple of `pack_size`.

    Complexity: O(N log N) for N records in all.

    >>> mffd_steps([[5, 3], [4, 2]], capacity=6, pack_size=2)
    [[[[0], [1]]], [[[2], [3]]]]
    """
    values = _streams(sizes)
    flat = values.ravel()
    bins: BinAssignment = [[] for _ in values]
    for batch in _global_batches(values.shape, pack_size):
        for rank, rank_bins in enumerate(pooled_mffd(flat[batch], capacity, len(values))):
            bins[rank].append([batch[members].tolist() for members in rank_bins])
    return bins


def karmarkar_karp(costs: npt.ArrayLike, num_packs: int) -> list[list[int]]:
    """Partitions `costs` into `num_packs` packs of equal cardinality by the largest differencing method.

    The records, in descending order of cost, are cut into groups of `num_packs`. Each group is a partial solution: a
    tuple of packs with one record each. Until one solution is left, the two with the largest spread (largest sum less
    smallest) are joined, the largest pack of one with the smallest of the other and so on; ties go to the solution
    made earlier, the dearest group first.

    Source: Karmarkar and Karp, "The differencing method of set partitioning" (1982), in its balanced form. The largest
    sum is optimal for 2 records a pack, and at most 4/3, 19/12 or 103/60 of the optimum for 3, 4 or 5; for m packs of
    any size it is at most 2 - 1/m of it (Michiels, Korst, Aarts and van Leeuwen, "Performance ratios for the
    differencing method applied to the balanced number partitioning problem", 2003).

    Args:
        costs: [n] finite costs, n a multiple of `num_packs`.
        num_packs: Number of packs, at least 1.

    Returns:
        `num_packs` lists of n / num_packs positions, in descending order of their sums.

    Raises:
        ValueError: If n is not a multiple of `num_packs`.

    Complexity: O(n log n) for packs of fixed size p; O(n (p + log n)) in general.

    >>> karmarkar_karp([9.0, 1.0, 8.0, 2.0, 7.0, 3.0], num_packs=2)
    [[1, 2, 4], [0, 3, 5]]
    """
    values = np.asarray(costs, np.float64)
    if pack_capacity(values.size, num_packs) == 0:
        return [[] for _ in range(num_packs)]
    groups = np.argsort(-values, kind="stable").reshape(-1, num_packs)
    # (negative spread, serial number, sums [num_packs] descending, members [num_packs, records])
    heap = [(float(values[g[-1]] - values[g[0]]), k, values[g], g[:, None]) for k, g in enumerate(groups)]
    heapq.heapify(heap)
    for serial in range(len(groups), 2 * len(groups) - 1):
        _, _, sums, members = heapq.heappop(heap)
        _, _, other_sums, other_members = heapq.heappop(heap)
        sums = sums + other_sums[::-1]
        members = np.concatenate([members, other_members[::-1]], axis=1)
        order = np.argsort(-sums, kind="stable")
        sums, members = sums[order], members[order]
        heapq.heappush(heap, (float(sums[-1] - sums[0]), serial, sums, members))
    packs: list[list[int]] = np.sort(heap[0][3], axis=1).tolist()
    return packs


def global_karmarkar_karp(costs: npt.ArrayLike, *, pack_size: int) -> Assignment:
    """Deals each global batch out to the ranks in packs of equal cardinality and balanced cost.

    This is what coordination buys: somebody sees all ranks' records of a step before it begins. Differencing groups is
    nearly perfect on light tails and poor on heavy ones, where every group but the first is too even to make up for the
    dearest record, and longest processing time first does well. So every batch takes the better of the two, or stays as
    it arrived where neither is better.

    Args:
        costs: [ranks, n] costs, n a multiple of `pack_size`.
        pack_size: Records per rank and step.

    Returns:
        Records by [rank][step].

    Raises:
        ValueError: If n is not a multiple of `pack_size`.

    Complexity: that of `karmarkar_karp` and `partition.balanced_partition`, once per step.

    >>> global_karmarkar_karp([[9.0, 8.0], [1.0, 2.0]], pack_size=2)
    [[[0, 2]], [[1, 3]]]
    """
    streams = _streams(costs).astype(np.float64)
    ranks, flat = len(streams), streams.ravel()
    assignment: Assignment = [[] for _ in range(ranks)]
    for batch in _global_batches(streams.shape, pack_size):
        values = flat[batch]
        arms = [
            karmarkar_karp(values, ranks),
            balanced_partition(values, ranks),
            np.arange(values.size).reshape(ranks, pack_size).tolist(),
        ]
        best = min(arms, key=lambda packs: max(values[pack].sum() for pack in packs))  # a tie goes to the first
        for rank, pack in enumerate(best):
            assignment[rank].append(batch[pack].tolist())
    return assignment


def length_grouped(sizes: npt.ArrayLike, *, pack_size: int, seed: int = 0, megabatch_steps: int = 50) -> Assignment:
    """Groups records of similar size into the same step, after one shuffle of all ranks' records.

    The shuffled records are cut into megabatches, each is sorted by descending size and cut into global batches, and
    the largest record of all changes places with the very first one, so that running out of memory shows at once. A
    batch is dealt out to the ranks one record at a time. Steps become even across ranks, at the price of a batch order
    that follows size. The rule is that of Hugging Face's length-grouped sampler, with the global batch for its batch
    and one shuffle for all ranks.

    Args:
        sizes: [ranks, n] sizes in tokens, n a multiple of `pack_size`.
        pack_size: Records per rank and step.
        seed: Of the shuffle.
        megabatch_steps: Global batches in a megabatch; at most a quarter of the steps, at least one.

    Returns:
        Records by [rank][step].

    Raises:
        ValueError: If n is not a multiple of `pack_size`.

    Complexity: O(N log N) for N records in all.

    >>> length_grouped([[9, 1, 8, 2], [7, 3, 6, 4]], pack_size=2)
    [[[0, 6], [2, 5]], [[4, 3], [7, 1]]]
    """
    values = _streams(sizes)
    flat = values.ravel()
    steps = len(_global_batches(values.shape, pack_size))
    shuffled = np.random.default_rng(seed).permutation(flat.size)
    megabatch = len(values) * pack_size * max(1, min(megabatch_steps, steps // 4))
    starts = range(megabatch, flat.size, megabatch)
    order = np.concatenate([part[np.argsort(-flat[part], kind="stable")] for part in np.split(shuffled, starts)])
    largest = int(flat[order].argmax())
    order[[0, largest]] = order[[largest, 0]]
    assignment: Assignment = order.reshape(steps, pack_size, len(values)).transpose(2, 0, 1).tolist()
    return assignment


def _streams(values: npt.ArrayLike) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"expected a value for every rank and record, [ranks, n], got shape {array.shape}")
    return array


def _global_batches(shape: tuple[int, ...], pack_size: int) -> IntArray:
    """Returns the records of every step of arrival order, [steps, ranks * pack_size], rank by rank."""
    ranks, records = shape
    if pack_size < 1 or records % pack_size:
        raise ValueError(
            f"{records} records a rank are not a whole number of packs of {pack_size} records: leave the last ones out"
        )
    places = np.arange(ranks * records, dtype=np.int64).reshape(ranks, records // pack_size, pack_size)
    return places.swapaxes(0, 1).reshape(-1, ranks * pack_size)
