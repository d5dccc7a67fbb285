from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcl_grain.rows import cover_rows, first_fit_decreasing


def naive_first_fit_decreasing(sizes: list[int], length: int) -> list[list[int]]:
    """The definition, in O(n * rows)."""
    rows: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        for row in rows:
            if sum(sizes[j] for j in row) + sizes[i] <= length:
                row.append(i)
                break
        else:
            rows.append([i])
    return rows


@settings(deadline=None, max_examples=300)
@given(st.data(), st.integers(1, 40))
def test_first_fit_decreasing_equals_its_definition(data: st.DataObject, length: int) -> None:
    sizes = data.draw(st.lists(st.integers(1, length), max_size=60))
    assert first_fit_decreasing(sizes, length) == naive_first_fit_decreasing(sizes, length)


@settings(deadline=None, max_examples=300)
@given(st.data(), st.integers(1, 20), st.sets(st.integers(21, 60), max_size=3))
def test_first_fit_decreasing_opens_the_shortest_row_that_holds_a_long_size(
    data: st.DataObject, length: int, longer: set[int]
) -> None:
    """Against the definition, in O(n * rows)."""
    lengths = [length, *sorted(longer)]
    sizes = data.draw(st.lists(st.integers(1, lengths[-1]), max_size=40))
    rows: list[tuple[int, list[int]]] = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fits = (row for capacity, row in rows if sum(sizes[j] for j in row) + sizes[i] <= capacity)
        row = next(fits, None)
        if row is None:
            row = []
            rows.append((min(n for n in lengths if n >= sizes[i]), row))
        row.append(i)
    assert first_fit_decreasing(sizes, length, sorted(longer)) == [row for _, row in rows]


def fewest_rows(sizes: tuple[int, ...], length: int) -> int:
    """Brute force: put each size into every row in turn."""

    def search(i: int, rooms: tuple[int, ...]) -> int:
        if i == len(sizes):
            return len(rooms)
        best = search(i + 1, (*rooms, length - sizes[i]))
        for j, room in enumerate(rooms):
            if room >= sizes[i]:
                best = min(best, search(i + 1, (*rooms[:j], room - sizes[i], *rooms[j + 1 :])))
        return best

    return search(0, ())


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7))
def test_first_fit_decreasing_keeps_its_bound(sizes: list[int]) -> None:
    optimum = fewest_rows(tuple(sizes), 12)
    assert optimum <= len(first_fit_decreasing(sizes, 12)) <= (11 * optimum + 6) / 9


@pytest.mark.parametrize("size", [0, -3, 9])
def test_first_fit_decreasing_names_a_size_that_fits_no_row(size: int) -> None:
    with pytest.raises(ValueError, match=rf"size {size} at position 1 is not in 1..8"):
        first_fit_decreasing([3, size], 8)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 14),
    st.sets(st.integers(1, 7), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.5]),
)
def test_cover_is_the_cheapest(num_rows: int, heights: set[int], overhead: float) -> None:
    cover = cover_rows(num_rows, tuple(heights), overhead)
    assert set(cover) <= heights
    assert list(cover) == sorted(cover, reverse=True)
    assert sum(cover) >= max(num_rows, 1)
    by_brute_force = min(
        (sum(candidate) + overhead * len(candidate), sum(candidate), len(candidate))
        for count in range(1, max(num_rows, 1) + 1)
        for candidate in itertools.combinations_with_replacement(sorted(heights), count)
        if sum(candidate) >= max(num_rows, 1)
    )
    assert (sum(cover) + overhead * len(cover), sum(cover), len(cover)) == by_brute_force
