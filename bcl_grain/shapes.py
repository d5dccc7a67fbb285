"""One static shape for packs of a fixed number of records, proposed from a sample of their sizes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bcl_grain.rows import first_fit_decreasing

_DRAWS_AT_ONCE = 4096
_MAX_DRAWS = 64 * _DRAWS_AT_ONCE


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
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value!r}")
    if not margin > 0:
        raise ValueError(f"margin must be positive, got {margin!r}")
    sizes = np.asarray(sample_sizes)
    if sizes.ndim != 1 or not sizes.size or sizes.dtype.kind not in "iu":
        raise ValueError(f"sample_sizes must be a non-empty list of integers, got {sample_sizes!r}")
    if sizes.min() < 1 or sizes.max() > max_length:
        raise ValueError(
            f"sample_sizes has sizes from {sizes.min()} to {sizes.max()}, not in 1..max_length={max_length}: "
            "apply the cap to the sample as to the data"
        )
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
