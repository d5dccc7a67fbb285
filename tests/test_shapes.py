from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bcl_grain.costs import TransformerCost
from bcl_grain.layouts import RowPackedLayout, RowPackedOneShapeLayout
from bcl_grain.partition import balanced_partition
from bcl_grain.planner import PlannerConfig
from bcl_grain.shapes import fit_rows, fit_shape
from bcl_grain.simulate import plan_stream


@pytest.mark.parametrize("sigma", [0.3, 0.8])
@pytest.mark.parametrize("pack_size", [8, 64])
@pytest.mark.parametrize("max_row_length", [None, 4096])
def test_average_packs_fit_and_little_is_wasted(sigma: float, pack_size: int, max_row_length: int | None) -> None:
    rng = np.random.default_rng(1)
    sizes = np.clip(rng.lognormal(5.5, sigma, 20_000), 1, 1500).astype(int)
    rows, length = fit_shape(sizes[:2000], max_length=1500, pack_size=pack_size, max_row_length=max_row_length)
    layout = RowPackedOneShapeLayout(rows=rows, length=length)
    average = pack_size * sizes.mean()
    windows = rng.choice(sizes, (60, pack_size * 8))
    balanced = [window[pack] for window in windows for pack in balanced_partition(window, 8)]  # as a planner would
    fitting = [layout.fits(pack.tolist()) for pack in balanced if abs(pack.sum() - average) <= 0.02 * average]
    assert len(fitting) > 50
    assert np.mean(fitting) >= 0.99
    if max_row_length:
        assert rows * length <= 1.1 * average


def test_one_row_less_does_not_hold_every_average_pack() -> None:
    sizes = np.random.default_rng(1).integers(200, 600, 2000)  # one or two a row of 640, with much left
    rows, length = fit_shape(sizes, max_length=600, pack_size=64)
    packs = np.random.default_rng(2).choice(sizes, (20_000, 64))
    average = 64 * sizes.mean()
    packs = packs[np.abs(packs.sum(axis=1) - average) <= 0.02 * average]
    assert (rows - 1) * length > 1.02 * average, "the sum alone would fit"
    smaller = RowPackedOneShapeLayout(rows=rows - 1, length=length)
    assert 0 < sum(smaller.fits(pack.tolist()) for pack in packs) < len(packs)


def test_equal_sizes_need_exactly_their_rows() -> None:
    assert fit_shape([100] * 10, max_length=100, pack_size=6, multiple_of=50) == (6, 100)
    assert fit_shape([100] * 10, max_length=100, pack_size=6, multiple_of=50, max_row_length=250) == (6, 100)
    assert fit_shape([100] * 10, max_length=110, pack_size=6, multiple_of=100, max_row_length=900) == (3, 200)


def test_depends_on_the_seed_alone() -> None:
    sizes = np.random.default_rng(0).integers(1, 500, 300)
    shapes = {fit_shape(sizes, max_length=500, pack_size=4, multiple_of=4, max_row_length=900, seed=3) for _ in "ab"}
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pack_size": 0}, "pack_size must be an integer of at least 1, got 0"),
        ({"margin": 0.0}, "margin must be positive and finite, got 0.0"),
        ({"max_length": 8}, r"sizes from 4 to 9, not in 1..max_length=8: apply the cap"),
        ({"sample_sizes": []}, "non-empty list of integers"),
        ({"sample_sizes": [1.5]}, "non-empty list of integers"),
        ({"sample_sizes": [0, 4]}, "sizes from 0 to 4"),
        ({"max_row_length": 100}, "max_row_length 100 is below 128"),
        ({"margin": 0.001, "sample_sizes": [1, 9]}, "only 0 of 262144 random packs of 3 .* raise margin"),
    ],
)
def test_bad_input_is_named(options: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"sample_sizes": [4, 9], "max_length": 9, "pack_size": 3}
    with pytest.raises(ValueError, match=message):
        fit_shape(**{**good, **options})


def skewed(seed: int = 0, n: int = 3000) -> npt.NDArray[np.int64]:
    return np.clip(np.random.default_rng(seed).lognormal(5.5, 0.9, n), 1, 6000).astype(np.int64)


@pytest.mark.parametrize("per_token_squared", [0.0, 1e-4, 1e-3])
@pytest.mark.parametrize("pack_size", [8, 64])
def test_fitted_rows_cost_less_than_one_length_and_hold_every_record(pack_size: int, per_token_squared: float) -> None:
    """On planned packs of other draws than those that it was fitted to."""
    sizes, cost = skewed(), TransformerCost(per_token=1.0, per_token_squared=per_token_squared)
    layout = fit_rows(sizes, pack_size=pack_size, cost=cost)
    assert max(length for _, length in layout.shapes) >= sizes.max()
    assert len(layout.shapes) <= 6
    one_length = RowPackedLayout(length=6016, rows_per_chunk=1)
    stream = np.random.default_rng(9).choice(sizes, pack_size * 120)
    packs = plan_stream(PlannerConfig(pack_size=pack_size, lookahead=8), cost.of_length(stream.astype(float)))
    executed = [sum(of.executed_cost(stream[pack], cost) for pack in packs) for of in (layout, one_length)]
    assert executed[0] < 0.95 * executed[1]


def test_dear_chunks_make_few_of_them() -> None:
    chunks = []
    for per_chunk in (0.0, 1e4):
        cost = TransformerCost(per_token=1.0, per_token_squared=1e-4, per_chunk=per_chunk)
        layout = fit_rows(skewed(), pack_size=64, cost=cost)
        chunks.append(len(layout.chunk_shapes(skewed(1, 64))))
    assert chunks[1] < chunks[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pack_size": 0}, "pack_size must be an integer of at least 1, got 0"),
        ({"most_shapes": 0}, "most_shapes must be an integer of at least 1, got 0"),
        ({"num_packs": 0}, "num_packs must be an integer of at least 1, got 0"),
        ({"multiple_of": 0}, "multiple_of must be an integer of at least 1, got 0"),
        ({"max_length": 8}, r"sizes from 4 to 9, not in 1..max_length=8: apply the cap"),
        ({"sample_sizes": []}, "non-empty list of integers"),
    ],
)
def test_fit_rows_names_bad_input(options: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"sample_sizes": [4, 9], "pack_size": 3, "cost": TransformerCost(1.0)}
    with pytest.raises(ValueError, match=message):
        fit_rows(**{**good, **options})
