"""Shapes for packs of a fixed number of records, proposed from a sample of their sizes: one static shape, or rows."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bcl_grain.checks import checked_integer, checked_number
from bcl_grain.layouts import ChunkCost, RowPackedLayout
from bcl_grain.partition import balanced_partition
from bcl_grain.rows import first_fit_decreasing

_DRAWS_AT_ONCE = 4096
_MAX_DRAWS = 64 * _DRAWS_AT_ONCE

_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96)  # of an average pack, to try
_STEPS = (1.5, 2.0, 4.0, math.inf)  # from one row length to the next longer one, to try
_FINALISTS = 12  # layouts that are tried on all packs and not on a few
_RANKS = 8  # a step waits for the dearest of about so many packs


def fit_shape(
    sample_sizes: npt.ArrayLike,
    *,
    max_length: int,
    pack_size: int,
    margin: float = 0.02,
    multiple_of: int = 128,
    max_row_length: int | None = None,
    num_packs: int = 256,
    seed: int = 0,
) -> tuple[int, int]:
    """Proposes the smallest shape in which packs of about the average size fit, for `RowPackedOneShapeLayout`.

    Draws random packs of `pack_size` sizes from the sample, with replacement, and keeps the first `num_packs` whose
    sum is within `margin` of the average: the packs that a planner makes which holds that margin. For each row
    length to try, it places them first-fit-decreasing and takes the most rows that any of them needs. The product
    rows * length decides, at a tie the shorter length, which costs attention less. A further pack within the margin
    does not fit with a probability of about 1 / (num_packs + 1) at most.

    Long rows waste less at their ends, and their product comes closer to what is needed; but attention that does not
    skip other segments is quadratic in them. So by default only one length is tried, the shortest that holds every
    record.

    Args:
        sample_sizes: [n] sizes, in tokens, none above `max_length`: apply the cap to them first.
        max_length: The cap: no record is longer.
        pack_size: Records in a pack.
        margin: How far the size of a planned pack may be from the average, as a fraction.
        multiple_of: Row lengths tried are multiples of it.
        max_row_length: Longest row tried; default `max_length`, rounded up to `multiple_of`.
        num_packs: Packs that must fit.
        seed: Seed of the draws.

    Returns:
        (rows, length).

    Raises:
        ValueError: If an option is out of range, the sample is empty or holds a size that is not in 1..max_length,
            or random packs within the margin are too rare to be found.

    Complexity: O(num_packs * pack_size * log(pack_size)) for each length tried, and at most 262,144 draws of a pack.

    >>> rng = np.random.default_rng(0)
    >>> sizes = np.clip(rng.lognormal(5.5, 0.8, 2000), 1, 1000).astype(int)
    >>> fit_shape(sizes, max_length=1000, pack_size=64)
    (21, 1024)
    >>> fit_shape(sizes, max_length=1000, pack_size=64, max_row_length=2048)
    (18, 1152)
    """
    for name, value in (
        ("max_length", max_length),
        ("pack_size", pack_size),
        ("multiple_of", multiple_of),
        ("num_packs", num_packs),
    ):
        checked_integer(name, value, 1)
    checked_number("margin", margin, above=0)
    checked_integer("seed", seed, 0)
    if max_row_length is not None:
        checked_integer("max_row_length", max_row_length, 1)
    sizes, _ = _checked_sample(sample_sizes, max_length)
    shortest = -(-max_length // multiple_of) * multiple_of
    longest = shortest if max_row_length is None else max_row_length
    if longest < shortest:
        raise ValueError(f"max_row_length {longest} is below {shortest}, the shortest row that holds max_length")
    packs = _average_packs(sizes, pack_size, margin, num_packs, seed)
    shapes = [
        (max(len(first_fit_decreasing(pack, length)) for pack in packs), length)
        for length in range(shortest, longest + 1, multiple_of)
    ]
    return min(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))


def fit_rows(
    sample_sizes: npt.ArrayLike,
    *,
    pack_size: int,
    cost: ChunkCost,
    max_length: int | None = None,
    most_shapes: int = 6,
    multiple_of: int = 64,
    num_packs: int = 256,
    seed: int = 0,
) -> RowPackedLayout:
    """Proposes a row-packed layout: a row length, with shorter ones for what is left over and longer ones for outliers.

    Long rows cost more attention where kernels don't skip other records' tokens, short ones fill worse; which is better
    depends on the corpus and on `cost`. So layouts are tried on packs as a planner makes them, balanced ones near
    the average, and the one wins whose executed cost is least, a step of 8 ranks counted by its dearest pack.

    Args:
        sample_sizes: [n] sizes, in tokens.
        pack_size: Records in a pack.
        cost: What a chunk costs, as of `TransformerCost`; its `per_chunk` speaks against many small ones.
        max_length: The cap, if the sample may miss the longest record; default: the sample's longest.
        most_shapes: Programs that one is willing to compile.
        multiple_of: Row lengths are multiples of it.
        num_packs: Packs to try.
        seed: Seed of the draws.

    Returns:
        The layout: chunks of one row, at most `most_shapes` lengths, the longest of which holds every record.

    Raises:
        ValueError: If an option is out of range, or the sample is empty or holds a size that is not in 1..max_length.

    Complexity: some 150 layouts on `num_packs / 2` packs each, a dozen on all: about a second.

    >>> from bcl_grain.costs import TransformerCost
    >>> rng = np.random.default_rng(0)
    >>> sizes = np.clip(rng.lognormal(5.5, 0.8, 2000), 1, 4000).astype(int)
    >>> layout = fit_rows(sizes, pack_size=64, cost=TransformerCost(1.0, 1e-4), num_packs=64)
    >>> layout.length, layout.lengths
    (576, (320, 896, 1344, 1984, 2880))
    """
    sizes, longest = _checked_sample(sample_sizes, max_length)
    options = {"pack_size": pack_size, "most_shapes": most_shapes, "multiple_of": multiple_of, "num_packs": num_packs}
    for name, value in options.items():
        checked_integer(name, value, 1)
    values, which = np.unique(sizes, return_inverse=True)
    costs = np.array([cost.of_chunk(1, int(value)) for value in values])[which]
    rng = np.random.default_rng(seed)
    drawn: list[npt.NDArray[np.int64]] = []
    for _ in range(2 * num_packs // _RANKS + 1):
        pool = rng.integers(sizes.size, size=pack_size * _RANKS)
        drawn += [pool[pack] for pack in balanced_partition(costs[pool], _RANKS)]
    off = [abs(float(costs[pack].sum()) - pack_size * float(costs.mean())) for pack in drawn]
    packs = [sizes[drawn[i]] for i in rng.permuted(np.argsort(off, kind="stable")[:num_packs])]
    few = max(_RANKS, num_packs // 2)

    def waiting(layout: RowPackedLayout, packs: list[npt.NDArray[np.integer]]) -> float:
        executed = np.array([layout.executed_cost(pack, cost) for pack in packs])
        steps = (
            executed[: executed.size // _RANKS * _RANKS].reshape(-1, _RANKS) if executed.size >= _RANKS else executed
        )
        return float(steps.max(axis=-1).mean())

    layouts = _row_ladders(pack_size * float(sizes.mean()), longest, multiple_of, most_shapes)
    finalists = sorted(layouts, key=lambda layout: waiting(layout, packs[:few]))[:_FINALISTS]
    return min(finalists, key=lambda layout: waiting(layout, packs))


def _row_ladders(average: float, longest: int, multiple_of: int, most_shapes: int) -> list[RowPackedLayout]:
    """Returns layouts worth trying for packs of `average` tokens."""

    def rounded(length: float) -> int:
        return -(-math.ceil(length) // multiple_of) * multiple_of

    top = rounded(longest)
    ladders: set[tuple[int, ...]] = {(top,)}
    for rows in _ROWS:
        # Packs are about as large as the average one: a whole number of rows should hold a little more than that.
        length = rounded(1.01 * average / rows)
        for halvings in range(3):
            shorter = {rounded(length / 2**i) for i in range(1, halvings + 1)} - {length}
            for factor in _STEPS:
                longer, next_length = set(), length * factor
                while length < top:
                    longer.add(min(rounded(next_length) if next_length < 0.75 * top else top, top))
                    if top in longer:
                        break
                    next_length *= factor
                ladders.add((length, *sorted(shorter | longer)))
    return [
        RowPackedLayout(length=lengths[0], rows_per_chunk=1, lengths=lengths[1:])
        for lengths in sorted(ladders)
        if len(lengths) <= most_shapes
    ]


def _checked_sample(sample_sizes: npt.ArrayLike, max_length: int | None) -> tuple[npt.NDArray[np.integer], int]:
    """Returns the sample as an array, and the longest record."""
    sizes = np.asarray(sample_sizes)
    if sizes.ndim != 1 or not sizes.size or sizes.dtype.kind not in "iu":
        raise ValueError(f"sample_sizes must be a non-empty list of integers, got {sample_sizes!r}")
    longest = int(sizes.max()) if max_length is None else max_length
    if sizes.min() < 1 or sizes.max() > longest:
        raise ValueError(
            f"sample_sizes has sizes from {sizes.min()} to {sizes.max()}, not in 1..max_length={longest}: "
            "apply the cap to the sample as to the data"
        )
    return sizes, longest


def _average_packs(
    sizes: npt.NDArray[np.integer], pack_size: int, margin: float, num_packs: int, seed: int
) -> list[list[int]]:
    """Draws `num_packs` random packs whose sum is within `margin` of the average."""
    rng = np.random.default_rng(seed)
    average = pack_size * sizes.mean()
    packs: list[list[int]] = []
    for _ in range(_MAX_DRAWS // _DRAWS_AT_ONCE):
        drawn = rng.choice(sizes, (_DRAWS_AT_ONCE, pack_size))
        near = np.abs(drawn.sum(axis=1) - average) <= margin * average
        packs += drawn[near].tolist()
        if len(packs) >= num_packs:
            return packs[:num_packs]
    raise ValueError(
        f"only {len(packs)} of {_MAX_DRAWS} random packs of {pack_size} have a sum within {margin:.2%} of the average "
        f"{average:.0f}, {num_packs} are needed: raise margin, or lower num_packs"
    )
