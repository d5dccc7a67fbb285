"""Keeps the packs of a cycle within a capacity, by exchanging records between them.

With XLA a pack must fit a static shape. Packs are planned by cost first; here those that hold too much give a larger
record for a smaller one of another pack, or of what is carried to later cycles, until all fit or no exchange helps.
Among the exchanges that do, the one that changes the planned costs least is taken. Numbers only, and deterministic.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bcl_grain.rows import first_fit_decreasing

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

Capacity = int | tuple[int, int]
"""What a pack may hold: tokens in all, or (rows, length), where rows of `length` tokens hold whole records."""

SizeFn = Callable[..., int]
"""record -> its size in tokens: a positive integer, deterministic."""

FILLER_SIZE = 1
"""Tokens of a weightless record: layouts have no place for empty ones."""

_OUTSIDE = -1  # owner of a record that takes no part
_CANDIDATES = 32  # exchanges tried before a pack is given up; rows can refuse what the sums allow
_LIGHTENING_SWAPS = 3  # exchanges per pack that lighten the carry
_RESTORING_SWAPS = 2  # exchanges per disturbed pack that bring costs back


class Fitted(NamedTuple):
    """The packs of a cycle after repair.

    Attributes:
        packs: Pool positions, ascending in each pack.
        carried: Pool positions of the rest, ascending.
        changed: Whether any record was exchanged.
    """

    packs: list[list[int]]
    carried: IntArray
    changed: bool


def checked_capacity(capacity: object) -> Capacity:
    """Returns `capacity` in Python's own integers.

    Raises:
        ValueError: If it is neither a positive integer nor a pair of such.

    >>> checked_capacity([np.int64(4), 512])
    (4, 512)
    """
    values = capacity if isinstance(capacity, tuple | list) else (capacity,)
    try:
        numbers = tuple(operator.index(value) for value in values)
    except TypeError:
        numbers = ()
    if not numbers or min(numbers) < 1 or len(values) != (2 if values is capacity else 1):
        raise ValueError(
            f"capacity must be a positive number of tokens, or (rows, length) as fit_shape proposes, got {capacity!r}"
        )
    return (numbers[0], numbers[1]) if len(numbers) == 2 else numbers[0]


def checked_size(size_fn: SizeFn, record: object, position: int) -> int:
    """Returns `size_fn(record)`, or raises an error that says which record is at fault.

    Args:
        size_fn: Tells a record's size in tokens.
        record: One record.
        position: The record's place in its stream, from 0, for the message.

    Raises:
        ValueError: If `size_fn` raises, or its value is not a positive integer.

    >>> checked_size(len, "abc", 17)
    3
    """
    try:
        value = size_fn(record)
    except Exception as error:
        raise ValueError(f"size_fn raised on record {position} of the stream: {error!r}") from error
    try:
        size = operator.index(value)
    except TypeError:
        size = 0
    if size < 1:
        raise ValueError(
            f"size of record {position} of the stream is {value!r}, but a size must be a positive integer: filter such "
            "records upstream or mend size_fn"
        )
    return size


def overflow(capacity: Capacity, sizes: Sequence[int]) -> int:
    """Returns how many tokens of a pack find no place; 0 says that it fits.

    With (rows, length), records are placed as `RowPackedOneShapeLayout` does it, and those in further rows count.

    Raises:
        ValueError: If a size is longer than a row.

    Complexity: O(n), with rows O(n log n).

    >>> overflow(14, [5, 5, 5]), overflow((2, 8), [5, 5, 5]), overflow((2, 8), [5, 3, 5])
    (1, 5, 0)
    """
    if isinstance(capacity, int):
        return max(0, sum(sizes) - capacity)
    rows = first_fit_decreasing(sizes, capacity[1])
    return sum(sizes[i] for row in rows[capacity[0] :] for i in row)


def fit_packs(
    capacity: Capacity,
    costs: FloatArray,
    sizes: IntArray,
    packs: Sequence[Sequence[int]],
    *,
    carried: IntArray,
    pinned: BoolArray,
    fillers: Sequence[int],
    carry_at_most: float = math.inf,
) -> Fitted:
    """Exchanges records until every pack fits, or no exchange helps.

    A pack that holds too much looks at every exchange of one of its records for a smaller one elsewhere that leaves
    the other side fitting. Of those that make it fit, it takes the one after which the packs' costs are nearest to
    what was planned (least squares); where none does, the one that helps most. Then packs that were disturbed look
    for exchanges that bring their costs back and keep all sizes within the capacity.

    Finding packs that fit is bin packing with equal counts, so this may fail where a plan exists.

    Args:
        capacity: What a pack may hold.
        costs: [n] costs of the pool.
        sizes: [n] sizes, in tokens.
        packs: Pool positions of each pack.
        carried: Pool positions that stay in the pool.
        pinned: [n] records that should not be carried; they are only if no other exchange makes a pack fit.
        fillers: [packs] weightless records in each pack.
        carry_at_most: Tokens that the carry should hold; packs that have room take larger records from it until then.

    Returns:
        The packs, with as many records each as before, and what is carried. Without a pack over the capacity, or too
        heavy a carry, all is as it was.

    Complexity: O(packs * n log n) to see that all fit; an exchange looks at pack_size * n pairs at most, and a pack
    makes at most twice as many exchanges as it has records.
    """
    repair = _Repair(capacity, costs, sizes, packs, carried, pinned, fillers)
    over = np.flatnonzero(repair.slack < 0)
    if over.size:
        # The worst first: it has the widest choice.
        order = over[np.argsort(repair.slack[over], kind="stable")].tolist()
        for release in (False, True) if carried.size and pinned.any() else (False,):
            for pack in order:
                for _ in range(len(packs[pack])):
                    if repair.slack[pack] >= 0 or not repair.exchange(pack, release=release):
                        break
        for pack in np.flatnonzero(repair.disturbance[:-1]).tolist():
            for _ in range(_RESTORING_SWAPS):
                if repair.slack[pack] < 0 or not repair.exchange(pack, release=False):
                    break
    repair.lighten_carry(carry_at_most)
    return Fitted(
        [np.flatnonzero(repair.owner == pack).tolist() for pack in range(len(packs))],
        np.flatnonzero(repair.owner == len(packs)),
        repair.changed,
    )


class _Repair:
    """Who holds which record, and what that means for sizes and costs. The carry counts as one more, endless pack."""

    def __init__(
        self,
        capacity: Capacity,
        costs: FloatArray,
        sizes: IntArray,
        packs: Sequence[Sequence[int]],
        carried: IntArray,
        pinned: BoolArray,
        fillers: Sequence[int],
    ) -> None:
        self.capacity, self.costs, self.sizes, self.pinned, self.fillers = capacity, costs, sizes, pinned, fillers
        self.carry = len(packs)
        self.owner = np.full(costs.size, _OUTSIDE)
        for number, pack in enumerate(packs):
            self.owner[list(pack)] = number
        self.owner[carried] = self.carry
        self.slack = np.zeros(self.carry + 1, np.int64)  # tokens that still fit; below 0: tokens that find no place
        self.slack[self.carry] = np.iinfo(np.int64).max
        for number in range(self.carry):
            self.slack[number] = self._slack(np.flatnonzero(self.owner == number), number)
        self.changed = False
        self.disturbance = np.zeros(self.carry + 1)  # each pack's cost now minus the planned one

    def _slack(self, members: IntArray, pack: int) -> int:
        if pack == self.carry:
            return int(self.slack[pack])
        sizes: list[int] = self.sizes[members].tolist() + [FILLER_SIZE] * self.fillers[pack]
        excess = overflow(self.capacity, sizes)
        if excess:
            return -excess
        tokens = self.capacity if isinstance(self.capacity, int) else self.capacity[0] * self.capacity[1]
        return tokens - sum(sizes)

    def exchange(self, pack: int, *, release: bool) -> bool:
        """Makes the best exchange for `pack`, if any; one that holds too much must gain, others' costs must."""
        mine = np.flatnonzero(self.owner == pack)
        others = np.flatnonzero((self.owner >= 0) & (self.owner != pack) & (self.slack[self.owner] >= 0))
        if not others.size:
            return False
        theirs = self.owner[others]
        relief = self.sizes[mine][:, None] - self.sizes[others]
        allowed = relief <= self.slack[theirs]
        if not release:
            allowed &= ~(self.pinned[mine][:, None] & (theirs == self.carry))
        shift = self.costs[mine][:, None] - self.costs[others]
        before, there = self.disturbance[pack], self.disturbance[theirs]
        harm = shift * (shift - 2 * before) + np.where(theirs == self.carry, 0.0, shift * (shift + 2 * there))
        needed = -int(self.slack[pack])
        if needed <= 0:
            return self._first_that_fits(pack, mine, others, harm, allowed & (relief >= needed) & (harm < 0))
        if self._first_that_fits(pack, mine, others, harm, allowed & (relief >= needed)):
            return True
        return self._first_that_fits(pack, mine, others, -relief.astype(np.float64), allowed & (relief > 0))

    def lighten_carry(self, most: float) -> None:
        """Fills up the packs from the carry, largest exchange first, until it holds `most` tokens."""
        for pack in range(self.carry):
            for _ in range(_LIGHTENING_SWAPS):
                theirs = np.flatnonzero(self.owner == self.carry)
                excess = float(self.sizes[theirs].sum()) - most
                if excess <= 0:
                    return
                mine = np.flatnonzero(self.owner == pack)
                gain = self.sizes[theirs] - self.sizes[mine][:, None]
                allowed = (gain > 0) & (gain <= min(float(self.slack[pack]), excess)) & ~self.pinned[mine][:, None]
                if not self._first_that_fits(pack, mine, theirs, -gain.astype(np.float64), allowed):
                    break

    def _first_that_fits(
        self, pack: int, mine: IntArray, others: IntArray, rank: FloatArray, allowed: BoolArray
    ) -> bool:
        """Makes the first exchange, by ascending rank, that rows allow too; returns whether there was one."""
        candidates = np.flatnonzero(allowed)
        ranks = rank.ravel()[candidates]
        if candidates.size > _CANDIDATES:
            near = ranks <= np.partition(ranks, _CANDIDATES)[_CANDIDATES]
            candidates, ranks = candidates[near], ranks[near]
        for candidate in candidates[np.argsort(ranks, kind="stable")][:_CANDIDATES].tolist():
            given, taken = mine[candidate // others.size], others[candidate % others.size]
            other = int(self.owner[taken])
            self.owner[given], self.owner[taken] = other, pack
            slack = self._slack(np.flatnonzero(self.owner == pack), pack)
            other_slack = self._slack(np.flatnonzero(self.owner == other), other)
            if other_slack >= 0 and slack > min(int(self.slack[pack]), -1):
                self.changed = True
                self.slack[pack], self.slack[other] = slack, other_slack
                shift = self.costs[given] - self.costs[taken]
                self.disturbance[pack] -= shift
                if other != self.carry:
                    self.disturbance[other] += shift
                return True
            self.owner[given], self.owner[taken] = pack, other
        return False
