"""Modified first-fit decreasing over the records of all ranks: the packing that BCL is measured against.

One process sees the sizes of a whole global batch, packs them into bins of a fixed capacity and deals the bins out
to the ranks. The rule is that of NeMo-RL's packer for supervised fine-tuning, phase by phase, so that a comparison
speaks of what its users run; where it departs from the literature the docstrings say so.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def pooled_mffd(sizes: npt.ArrayLike, capacity: int, ranks: int) -> list[list[list[int]]]:
    """Packs one global batch and deals its bins out to the ranks, the same number to each.

    The number of bins is raised to the next multiple of `ranks`: bins are ranked once by their number of records
    (descending, ties by the later bin), and the last record of the first ranked bin moves into a bin of its own until
    that bin is down to one record; then the next gives. Rank r gets every `ranks`-th bin, from bin r on.

    Args:
        sizes: [n] integer sizes of the records, in tokens, each between 1 and `capacity`.
        capacity: Tokens that a bin holds.
        ranks: Number of ranks.

    Returns:
        For each rank its bins; a bin is a list of positions into `sizes`.

    Raises:
        ValueError: If a size is not an integer from 1 to `capacity`, or there are fewer records than bins needed.

    Complexity: O(n log n).

    >>> pooled_mffd([4, 4, 2, 5, 2, 3, 4], capacity=12, ranks=2)
    [[[4], [3, 0]], [[1, 6, 5], [2]]]
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks!r}")
    bins = mffd(sizes, capacity)
    num_records = sum(map(len, bins))
    target = -(-max(len(bins), ranks) // ranks) * ranks
    if target > num_records:
        raise ValueError(
            f"{num_records} records can't fill {target} bins, the multiple of {ranks} ranks that they need: "
            "pass a larger global batch or fewer ranks"
        )
    for j in sorted(range(len(bins)), key=lambda j: (len(bins[j]), j), reverse=True):
        while len(bins) < target and len(bins[j]) > 1:
            bins.append([bins[j].pop()])
    return [bins[rank::ranks] for rank in range(ranks)]


def mffd(sizes: npt.ArrayLike, capacity: int) -> list[list[int]]:
    """Packs records into bins by modified first-fit decreasing.

    With C the capacity, records are large (size > C/2), medium (> C/3), small (> C/6) or tiny. Large and medium ones
    are taken in descending order, small and tiny ones in ascending order, ties by position.

    1. Every large record opens a bin.
    2. From the first bin to the last: add the largest medium record that fits, at most one.
    3. From the last bin to the first, those without a medium record: add the smallest small record and the largest
       other one that still fits, if any two fit.
    4. From the first bin to the last: add the largest record left over that fits, again and again.
    5. The rest, in descending order, goes into new bins: each record into the least loaded of them, or into one more
       where that has no room. These bins follow in ascending order of load.

    Phases 1 to 4 are those of Johnson and Garey, "A 71/60 theorem for bin packing" (Journal of Complexity 1, 1985).
    Phase 5 is worst-fit decreasing, where they use first fit; so its guarantee doesn't hold, and it may need more
    bins than plain first-fit decreasing.

    Args:
        sizes: [n] integer sizes, each between 1 and `capacity`.
        capacity: What a bin holds.

    Returns:
        The bins, none of them empty, each a list of positions in the order in which they were added.

    Raises:
        ValueError: If a size is not an integer from 1 to `capacity`.

    Complexity: O(n log n). The rooms of phase 2 and 3 are monotone, so a record that was passed over stays so; in
    phase 4 a record is found by bisection and skipped in almost constant time once it is taken.

    >>> mffd([4, 4, 2, 5, 2, 3, 4], capacity=12)
    [[4], [1, 6, 5], [3, 0, 2]]
    """
    size = checked_sizes(sizes, capacity)
    descending = sorted(range(len(size)), key=size.__getitem__, reverse=True)  # a stable sort, even in reverse
    bins = [[i] for i in descending if 2 * size[i] > capacity]
    room = [capacity - size[i] for (i,) in bins]

    def add(j: int, i: int) -> None:
        bins[j].append(i)
        room[j] -= size[i]

    shelf = _Shelf([i for i in descending if 2 * size[i] <= capacity < 3 * size[i]], size)
    for j in range(len(bins)):
        medium = shelf.take_largest(room[j])
        if medium is not None:
            add(j, medium)

    smalls = sorted((i for i in range(len(size)) if 3 * size[i] <= capacity < 6 * size[i]), key=size.__getitem__)
    first, last = 0, len(smalls) - 1
    for j in reversed(range(len(bins))):
        if len(bins[j]) > 1:
            continue
        # Room shrinks from bin to bin and the smallest record grows: what is too large now stays too large.
        while first < last and size[smalls[first]] + size[smalls[last]] > room[j]:
            last -= 1
        if first >= last:
            break
        add(j, smalls[first])
        add(j, smalls[last])
        first, last = first + 1, last - 1

    placed = {i for members in bins for i in members}
    shelf = _Shelf([i for i in descending if i not in placed], size)
    for j in range(len(bins)):
        while (largest := shelf.take_largest(room[j])) is not None:
            add(j, largest)

    placed.update(i for members in bins for i in members)
    return bins + _least_loaded([i for i in descending if i not in placed], size, capacity)


def _least_loaded(positions: Sequence[int], size: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs records, in the order given, each into the least loaded bin or a new one (phase 5).

    Among equal loads the bin that reached its load first comes first.
    """
    heap: list[tuple[int, int, list[int]]] = []  # (load, time of the last addition, positions)
    for time, i in enumerate(positions):
        if heap and heap[0][0] + size[i] <= capacity:
            load, _, members = heap[0]
            members.append(i)
            heapq.heapreplace(heap, (load + size[i], time, members))
        else:
            heapq.heappush(heap, (size[i], time, [i]))
    return [members for _, _, members in sorted(heap)]


class _Shelf:
    """Records in descending order of size, of which the largest that fits is taken, again and again.

    `_next[k]` leads from place k towards the first place from k on that still holds a record.
    """

    def __init__(self, positions: Sequence[int], size: Sequence[int]) -> None:
        self._positions = positions
        self._negative_sizes = [-size[i] for i in positions]
        self._next = list(range(len(positions) + 1))

    def take_largest(self, room: int) -> int | None:
        """Takes the first of the largest records of at most `room`; None where there is none."""
        next_ = self._next
        k = bisect_left(self._negative_sizes, -room)
        while next_[k] != k:
            next_[k] = next_[next_[k]]  # halves the path for whoever comes next
            k = next_[k]
        if k == len(self._positions):
            return None
        next_[k] = k + 1
        return self._positions[k]


def checked_sizes(sizes: npt.ArrayLike, capacity: int) -> list[int]:
    """Returns `sizes` as a list of Python integers.

    Raises:
        ValueError: If they are no vector of integers from 1 to `capacity`; the message names the first at fault.

    >>> checked_sizes([3, 20], capacity=12)
    Traceback (most recent call last):
    ...
    ValueError: size 20 of record 1 is not between 1 and the capacity 12: ...
    """
    array = np.asarray(sizes)
    if array.ndim != 1:
        raise ValueError(f"sizes must have one axis, got shape {array.shape}")
    if array.size == 0:
        return []
    if array.dtype.kind not in "iu":
        raise ValueError(f"sizes must be integers (tokens), got {array.dtype}")
    wrong = np.flatnonzero((array < 1) | (array > capacity))
    if wrong.size:
        i = int(wrong[0])
        raise ValueError(
            f"size {int(array[i])} of record {i} is not between 1 and the capacity {capacity}: "
            "cap or drop such records first, or raise the capacity"
        )
    values: list[int] = array.tolist()
    return values
