"""Row lengths that a pack of a certain number of records fills well."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MARGINS = (0.005, 0.015, 0.03, 0.05)
"""How much larger than the average pack its rows are together."""


def row_lengths(
    sizes: npt.NDArray[np.integer],
    *,
    pack_size: int,
    longest_row: int | None = None,
    multiple_of: int = 128,
    most: int = 12,
) -> list[int]:
    """Returns lengths for rows of `RowPackedLayout` that are worth trying, ascending.

    Balanced packs are all about as large as the average one. So rows pad least if a whole number of them is a little
    more than that; one row too many costs every step a row.

    Args:
        sizes: [n] sizes of the records, in tokens.
        pack_size: Records in a pack.
        longest_row: What memory allows; default: anything.
        multiple_of: Lengths are multiples of it.
        most: How many lengths to return at most: the shortest.

    Returns:
        At least the shortest length that holds every record, even where it is above `longest_row`.

    >>> row_lengths(np.array([100, 200, 300, 500]), pack_size=8, most=4)
    [512, 640, 768, 896]
    """
    shortest = _round_up(int(sizes.max()), multiple_of)
    average = pack_size * float(sizes.mean())
    lengths = {shortest}
    for rows in range(max(1, int(average / shortest)), 0, -1):
        for margin in MARGINS:
            length = _round_up(int(np.ceil(average * (1 + margin) / rows)), multiple_of)
            if length >= shortest and (longest_row is None or length <= longest_row):
                lengths.add(length)
    return sorted(lengths)[:most]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
