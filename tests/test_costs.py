from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bcl_grain.costs import TransformerCost, checked_cost, fit_cost, fit_record_cost, token_cost


def multiply_flops(rows: int, inner: int, columns: int) -> int:
    """A [rows, inner] @ [inner, columns]: a multiplication and an addition for each of rows * inner * columns."""
    return 2 * rows * inner * columns


def step_flops(
    n: int,
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    vocab_size: int,
    gated: bool,
    causal: bool,
    remat: bool,
) -> float:
    """FLOPs of one step over n tokens, matrix by matrix; backward multiplies twice for each forward matrix."""
    projections = [
        multiply_flops(n, width, heads * head_dim),  # queries
        multiply_flops(n, width, kv_heads * head_dim),  # keys
        multiply_flops(n, width, kv_heads * head_dim),  # values
        multiply_flops(n, heads * head_dim, width),  # output
    ]
    feed_forward = [multiply_flops(n, width, hidden), multiply_flops(n, hidden, width)]
    if gated:
        feed_forward.append(multiply_flops(n, width, hidden))
    attention = heads * (multiply_flops(n, head_dim, n) + multiply_flops(n, n, head_dim)) * (0.5 if causal else 1.0)
    layer = sum(projections) + sum(feed_forward) + attention
    logits = multiply_flops(n, width, vocab_size)
    recomputed = layers * layer if remat else 0
    return 3 * (layers * layer + logits) + recomputed


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [3, 5])
def test_flops_of_a_tiny_transformer(gated: bool, causal: bool, remat: bool, kv_heads: int, head_dim: int) -> None:
    dims: dict[str, Any] = {
        "layers": 2,
        "width": 12,
        "heads": 4,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "hidden": 7,
        "vocab_size": 11,
        "gated": gated,
        "causal": causal,
        "remat": remat,
    }
    cost = TransformerCost.from_dims(**dims)
    for n in (1, 2, 17):
        assert cost.of_length(n) == step_flops(n, **dims)
        assert cost({"tokens": np.zeros(n)}) == step_flops(n, **dims)
    assert cost.per_chunk == 0


def test_dimensions_have_defaults() -> None:
    cost = TransformerCost.from_dims(layers=1, width=8, heads=2, hidden=16, vocab_size=10)
    spelled_out = TransformerCost.from_dims(
        layers=1,
        width=8,
        heads=2,
        kv_heads=2,
        head_dim=4,
        hidden=16,
        vocab_size=10,
        gated=True,
        causal=True,
        remat=False,
        feature="tokens",
    )
    assert cost == spelled_out


@pytest.mark.parametrize("name", ["layers", "width", "heads", "kv_heads", "hidden", "vocab_size"])
def test_dimensions_must_be_positive(name: str) -> None:
    dims: dict[str, Any] = {"layers": 1, "width": 8, "heads": 2, "kv_heads": 2, "hidden": 16, "vocab_size": 10}
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
        TransformerCost.from_dims(**{**dims, name: 0})


def test_width_must_divide_into_heads() -> None:
    dims: dict[str, Any] = {"layers": 1, "width": 10, "heads": 4, "hidden": 16, "vocab_size": 10}
    with pytest.raises(ValueError, match="width 10 is not a multiple of heads 4: pass head_dim"):
        TransformerCost.from_dims(**dims)
    with pytest.raises(ValueError, match="head_dim must be an integer of at least 1, got -1"):
        TransformerCost.from_dims(**dims, head_dim=-1)
    assert TransformerCost.from_dims(**dims, head_dim=2).per_token > 0


@pytest.mark.parametrize("name", ["per_token", "per_token_squared", "per_chunk"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_coefficients_must_be_finite_and_not_negative(name: str, value: float) -> None:
    coefficients: dict[str, Any] = {"per_token": 1.0, name: value}
    with pytest.raises(ValueError, match=f"{name} must be finite and at least 0, got {value}"):
        TransformerCost(**coefficients)


def test_some_coefficient_must_be_positive() -> None:
    with pytest.raises(ValueError, match="both 0: every record would cost nothing"):
        TransformerCost(per_token=0.0, per_chunk=5.0)


def test_a_chunk_costs_its_full_rows_and_a_launch() -> None:
    cost = TransformerCost(per_token=2.0, per_token_squared=0.5, per_chunk=100.0)
    assert cost.of_chunk(rows=3, length=10) == 100 + 3 * (2 * 10 + 0.5 * 100)
    assert cost.of_chunk(rows=1, length=10) - cost.per_chunk == cost({"tokens": [0] * 10})


def test_lengths_are_costed_elementwise() -> None:
    cost = TransformerCost(per_token=2.0, per_token_squared=0.5)
    costs = cost.of_length([[0, 1], [2, 100_000]])
    np.testing.assert_array_equal(costs, [[0.0, 2.5], [6.0, 200_000 + 5e9]])
    assert costs.dtype == np.float64


def test_the_length_comes_from_the_feature() -> None:
    record = {"tokens": np.zeros(3), "image": np.zeros((5, 7))}
    assert token_cost()(record) == 3
    assert token_cost(feature="image")(record) == 5


@pytest.mark.parametrize("record", [{"text": [1]}, {"tokens": 3}, 17, None, [1, 2]])
def test_a_record_without_the_feature(record: Any) -> None:
    with pytest.raises(ValueError, match="record has no feature 'tokens' with a length: pass feature="):
        token_cost()(record)


Timings = list[tuple[tuple[int, int], float]]

SHAPES = [(1, 64), (1, 256), (4, 256), (2, 1024), (8, 1024), (1, 4096)]
coefficients = st.sampled_from([0.0, 1e-8, 3e-6, 2e-4])


def seconds(cost: TransformerCost) -> Timings:
    return [(shape, cost.of_chunk(*shape)) for shape in SHAPES]


@given(coefficients, st.sampled_from([0.0, 1e-11, 4e-9]), coefficients)
@settings(deadline=None, max_examples=60)
def test_fit_recovers_the_model(per_token: float, per_token_squared: float, per_chunk: float) -> None:
    if not (per_token or per_token_squared):
        return
    truth = TransformerCost(per_token, per_token_squared, per_chunk, feature="text")
    fit = fit_cost(seconds(truth), feature="text")
    assert fit.worst < 1e-9
    assert fit.cost.feature == "text"
    for shape in ((3, 100), (5, 2048), (1, 16384)):
        assert fit.cost.of_chunk(*shape) == pytest.approx(truth.of_chunk(*shape), rel=1e-6)


def noisy(noise: list[float]) -> Timings:
    truth = TransformerCost(1e-6, 1e-9, 1e-3)
    return [(shape, s * factor) for (shape, s), factor in zip(seconds(truth), noise, strict=True)]


def is_optimal(x: npt.NDArray[np.float64], timings: Timings) -> bool:
    """Whether no x >= 0 has a smaller relative error: this convex problem's gradient is 0 where x > 0, else >= 0."""
    columns = np.array([[r * n / s, r * n * n / s, 1 / s] for (r, n), s in timings])
    gradient = columns.T @ (columns @ x - 1) / np.linalg.norm(columns, axis=0)
    return all(abs(slope) < 1e-6 if value > 0 else slope > -1e-6 for value, slope in zip(x, gradient, strict=True))


@given(st.lists(st.floats(0.2, 5.0), min_size=len(SHAPES), max_size=len(SHAPES)))
@settings(deadline=None, max_examples=100)
def test_fit_is_not_negative_and_optimal(noise: list[float]) -> None:
    timings = noisy(noise)
    inverse = np.array([1 / s for _, s in timings])
    assume(not is_optimal(np.array([0.0, 0.0, inverse.sum() / (inverse @ inverse)]), timings))
    fit = fit_cost(timings)
    x = np.array([fit.cost.per_token, fit.cost.per_token_squared, fit.cost.per_chunk])
    assert (x >= 0).all()
    assert is_optimal(x, timings)
    predicted = [x[0] * r * n + x[1] * r * n * n + x[2] for (r, n), _ in timings]
    residuals = [p / s - 1 for p, (_, s) in zip(predicted, timings, strict=True)]
    np.testing.assert_allclose(fit.relative_residuals, residuals, atol=1e-9)
    assert fit.worst == max(map(abs, fit.relative_residuals))


def test_fit_never_makes_records_free() -> None:
    """A fixed cost alone fits these best, but a record must cost something; the residuals tell that it fits badly."""
    fit = fit_cost(noisy([2.0, 1.0, 1.0, 0.25, 3.0, 5.0]))
    assert fit.cost.per_token > 0
    assert fit.worst > 0.9


def test_fit_minimises_the_relative_error() -> None:
    """Between t and 2 t the least relative error is at 1.2 t; the least absolute one would be at 1.5 t."""
    fit = fit_cost([((1, 100), 1e-3), ((1, 100), 2e-3), ((100, 100), 0.1), ((100, 100), 0.2)])
    assert fit.cost.of_chunk(1, 100) == pytest.approx(1.2e-3)
    assert fit.cost.of_chunk(100, 100) == pytest.approx(0.12)


def test_fit_needs_two_shapes() -> None:
    with pytest.raises(ValueError, match=r"at least two different shapes, got \[\(\(1, 8\), 0\.5\)"):
        fit_cost([((1, 8), 0.5), ((1, 8), 0.6)])
    with pytest.raises(ValueError, match=r"at least two different shapes, got \[\]"):
        fit_cost([])


@pytest.mark.parametrize("bad", [((0, 8), 0.1), ((1, 0), 0.1), ((2, 8), 0.0), ((2, 8), -1.0), ((2, 8), math.nan)])
def test_fit_needs_positive_timings(bad: tuple[tuple[int, int], float]) -> None:
    with pytest.raises(ValueError, match=r"timing must be positive and finite, .* got \(\("):
        fit_cost([((1, 8), 0.5), bad])


@pytest.mark.parametrize("value", [0, 0.0, -1, math.nan, math.inf, -math.inf, None, "long", 10**400, [1.0, 2.0]])
def test_a_bad_cost_is_an_error_that_names_record_and_value(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"cost of record 41 of the stream is .*must be (positive and finite|one number)"
    ) as error:
        checked_cost(lambda record: value, "record", 41)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("value", [1, 2.5, np.float32(3), np.int64(4), np.array(5.0), True])
def test_a_good_cost_becomes_a_float(value: Any) -> None:
    cost = checked_cost(lambda record: value, "record", 0)
    assert type(cost) is float
    assert cost == value


def test_a_cost_function_that_raises_is_named_with_its_record() -> None:
    def cost_fn(record: dict[str, int]) -> float:
        return record["weight"]

    with pytest.raises(ValueError, match=r"cost_fn raised on record 7 of the stream: KeyError\('weight'\)") as error:
        checked_cost(cost_fn, {}, 7)
    assert isinstance(error.value.__cause__, KeyError)


def test_a_fit_of_chunks_with_equal_tokens_charges_tokens_not_chunks() -> None:
    truth = TransformerCost(per_token=1e-3, per_token_squared=1e-6)
    shapes = [(8, 128), (4, 256), (2, 512)]
    fit = fit_cost([(shape, 0.01 + truth.of_chunk(*shape)) for shape in shapes])
    assert fit.cost.per_chunk == 0
    assert fit.cost.per_token == pytest.approx(1e-3 + 0.01 / 1024)
    assert fit.worst < 1e-9


def test_a_fit_of_one_row_length_is_linear() -> None:
    fit = fit_cost([((rows, 64), 0.5 + 0.25 * rows) for rows in (1, 2, 4)])
    assert fit.cost.per_token == pytest.approx(0.25 / 64)
    assert fit.cost.per_token_squared == 0
    assert fit.cost.per_chunk == pytest.approx(0.5)


def test_fitting_records_needs_a_cost_for_each_pack() -> None:
    for packs, costs in (([[1, 2]], [1.0]), ([[1], [2]], [1.0])):
        with pytest.raises(ValueError, match=f"got {len(packs)} and 1"):
            fit_record_cost(packs, costs)
