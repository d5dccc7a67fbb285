"""Placement of sizes into rows of a fixed length, and of rows into chunks of a few heights. Numbers only."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence


def first_fit_decreasing(sizes: Sequence[int], length: int, longer: Sequence[int] = ()) -> list[list[int]]:
    """Places sizes into as few rows as first-fit-decreasing finds.

    In descending order of size (ties by position), each goes to the first row that has room, or opens a new one.
    Needs at most 11/9 of the fewest possible rows, plus 6/9 (Dosa, "The tight bound of first fit decreasing
    bin-packing algorithm", 2007). The first row with room is found in a tree of the largest room below each
    node (Johnson, "Near-optimal bin packing algorithms", 1973).

    Args:
        sizes: n sizes, each in 1..length, or up to the longest of `longer`.
        length: Size of a row.
        longer: Further sizes that a row may have, ascending, all above `length`: a size above `length` that finds no
            room opens a row of the smallest of them that holds it. What room is left in it serves as any other.

    Returns:
        For each row the positions placed in it, left to right. No row is empty.

    Raises:
        ValueError: If a size is too large for all rows, or below 1.

    Complexity: O(n log n) time, O(n) memory; with k sizes above `length`, O(k^2) for these.

    >>> first_fit_decreasing([2, 5, 4, 7, 1], length=8)
    [[3, 4], [1, 0], [2]]
    >>> first_fit_decreasing([2, 5, 4, 7, 1], length=5, longer=[10])
    [[3, 0, 4], [1], [2]]
    """
    n = len(sizes)
    if not n:
        return []
    longest = longer[-1] if longer else length
    if min(sizes) < 1 or max(sizes) > longest:
        i = next(i for i, size in enumerate(sizes) if not 1 <= size <= longest)
        raise ValueError(f"size {sizes[i]} at position {i} is not in 1..{longest}")
    order = sorted(range(n), key=sizes.__getitem__, reverse=True)  # reverse keeps the order of ties
    rows, rooms = _open_long_rows(sizes, order, length, longer)
    done = sum(map(len, rows))
    # Any two rows hold more than one row's length together, or the later one would not have been opened.
    max_rows = len(rows) + min(n - done, 2 * sum(sizes[i] for i in order[done:]) // length + 1)
    leaves = 1 << (max_rows - 1).bit_length()
    room = [length] * (2 * leaves)  # room[k] = the larger of room[2k] and room[2k + 1]; the rows are the leaves
    if rooms:
        room[leaves : leaves + len(rooms)] = rooms
        for node in range(leaves - 1, 0, -1):
            room[node] = max(room[2 * node], room[2 * node + 1])
    rows += [[] for _ in range(max_rows - len(rows))]
    for i in order[done:]:
        size = sizes[i]
        node = 1
        while node < leaves:
            node += node
            if room[node] < size:
                node += 1
        rows[node - leaves].append(i)
        largest = room[node] - size
        room[node] = largest
        while node > 1:
            other = room[node ^ 1]
            if other > largest:  # a call of max() takes longer
                largest = other
            node >>= 1
            if room[node] == largest:
                break
            room[node] = largest
    return [row for row in rows if row]


def _open_long_rows(
    sizes: Sequence[int], order: Sequence[int], length: int, longer: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """Places the sizes above `length`, which come first in `order`; returns their rows and the room left in each."""
    rows: list[list[int]] = []
    rooms: list[int] = []
    for i in order:
        size = sizes[i]
        if size <= length:
            break
        place = next((place for place, room in enumerate(rooms) if room >= size), None)
        if place is None:
            place = len(rows)
            rows.append([])
            rooms.append(longer[bisect.bisect_left(longer, size)])
        rows[place].append(i)
        rooms[place] -= size
    return rows, rooms


@functools.lru_cache(maxsize=4096)
def cover_rows(num_rows: int, heights: tuple[int, ...], chunk_overhead_rows: float = 0.0) -> tuple[int, ...]:
    """Chooses the cheapest chunk heights whose sum is at least `num_rows`.

    A cover costs its rows, plus `chunk_overhead_rows` for each chunk. Of equal ones the one with fewer rows wins.

    Args:
        num_rows: Rows to cover; 0 is covered by one chunk of the smallest height.
        heights: Heights to choose from, each any number of times.
        chunk_overhead_rows: What one more chunk costs, in rows.

    Returns:
        Heights in descending order.

    Complexity: O(num_rows * len(heights)), once for each combination of arguments.

    >>> cover_rows(7, (1, 2, 4))
    (4, 2, 1)
    >>> cover_rows(7, (1, 2, 4), chunk_overhead_rows=1.5)
    (4, 4)
    """
    descending = sorted(set(heights), reverse=True)
    # best[r] = (cost, rows, chunks, first height) of the cheapest cover of r rows
    best: list[tuple[float, int, int, int]] = [(0.0, 0, 0, 0)]
    for r in range(1, max(num_rows, 1) + 1):
        choices = []
        for height in descending:
            _, rows, chunks, _ = best[max(r - height, 0)]
            rows, chunks = rows + height, chunks + 1
            choices.append((rows + chunk_overhead_rows * chunks, rows, chunks, height))
        best.append(min(choices, key=lambda choice: choice[:3]))
    cover = []
    r = max(num_rows, 1)
    while r > 0:
        cover.append(best[r][3])
        r -= best[r][3]
    return tuple(sorted(cover, reverse=True))
