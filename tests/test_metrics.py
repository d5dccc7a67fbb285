from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bcl_grain.metrics import check_comparable, cost_cv, measure, padding_fraction, waste

matrices = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=8),
    elements=st.floats(0.01, 1e4),
)

# Two ranks, three steps: ideal 4, the dearest packs are 6, 4 and 8.
ESTIMATED = [[6.0, 4.0, 2.0], [2.0, 2.0, 8.0]]
EXECUTED = [[7.0, 5.0, 5.0], [2.0, 2.0, 9.0]]


def test_waste_by_hand() -> None:
    assert waste(ESTIMATED) == pytest.approx(18 / 3 / 4 - 1)
    assert waste(EXECUTED, ideal=4.0) == pytest.approx(21 / 3 / 4 - 1)
    assert waste([[3.0, 3.0], [3.0, 3.0]]) == 0
    assert waste([[5.0, 1.0, 9.0]]) == 0  # one rank waits for nobody


def test_waste_is_relative_to_all_steps_together() -> None:
    """A step twice as dear on all ranks wastes nothing, and one rank's excess counts by its cost."""
    assert waste([[1.0, 2.0], [1.0, 2.0]]) == 0
    assert waste([[1.0, 3.0], [1.0, 1.0]]) == pytest.approx((1 + 3) / 2 / 1.5 - 1)


def test_cost_cv_by_hand() -> None:
    first = math.sqrt(8 / 3) / 4
    second = math.sqrt(2) / 2
    mean, error = cost_cv([[6.0, 4.0, 2.0], [1.0, 1.0, 4.0]])
    assert mean == pytest.approx((first + second) / 2)
    assert error == pytest.approx(abs(first - second) / math.sqrt(2) / math.sqrt(2))
    np.testing.assert_allclose(cost_cv([[6.0, 4.0, 2.0]]), (first, 0.0))


def test_measure_by_hand() -> None:
    arm = measure(ESTIMATED, EXECUTED)
    assert arm.sync_waste == pytest.approx(0.5)
    assert arm.total_waste == pytest.approx(0.75)
    assert arm.step_cost == pytest.approx(6.0)
    assert arm.executed_step_cost == pytest.approx(7.0)
    assert (arm.cost_cv, arm.cost_cv_error) == cost_cv(ESTIMATED)


def test_measure_without_executed_costs() -> None:
    arm = measure(ESTIMATED)
    assert arm.total_waste is None
    assert arm.executed_step_cost is None
    assert arm.sync_waste == waste(ESTIMATED)


def test_padding_fraction() -> None:
    assert padding_fraction(executed_tokens=4096, useful_tokens=1024) == 0.75
    assert padding_fraction(executed_tokens=10, useful_tokens=10) == 0


@given(matrices, st.floats(1e-3, 1e3), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=100)
def test_invariances(costs: Any, factor: float, random: Any) -> None:
    """Neither the unit nor the numbering of ranks nor the order of steps matters."""
    ranks, steps = list(range(costs.shape[0])), list(range(costs.shape[1]))
    random.shuffle(ranks)
    random.shuffle(steps)
    for other in (costs * factor, costs[ranks], costs[:, steps]):
        assert waste(other) == pytest.approx(waste(costs), rel=1e-9, abs=1e-9)
        np.testing.assert_allclose(cost_cv(other), cost_cv(costs), rtol=1e-6, atol=1e-9)
        check_comparable({"this": costs, "that": other * (costs.sum() / other.sum())})


@given(matrices)
@settings(deadline=None, max_examples=100)
def test_ranges(costs: Any) -> None:
    """Waiting costs between nothing and all but one rank's time; padding only adds to it."""
    assert -1e-12 <= waste(costs) <= len(costs) - 1 + 1e-9
    arm = measure(costs, costs * 1.25)
    assert arm.total_waste == pytest.approx(1.25 * (1 + arm.sync_waste) - 1)


def test_arms_with_the_same_records_and_steps_compare() -> None:
    check_comparable({"arrival": ESTIMATED, "windowed": [[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]})
    check_comparable({"alone": ESTIMATED})
    rounded = (np.array(ESTIMATED) * (1 + 1e-13)).tolist()
    check_comparable({"arrival": ESTIMATED, "summed in another order": rounded})


def test_arms_with_other_steps_do_not_compare() -> None:
    message = r"arms 'arrival' and 'windowed' have different \(ranks, steps\): \(2, 3\) and \(2, 2\)"
    with pytest.raises(ValueError, match=message):
        check_comparable({"arrival": ESTIMATED, "windowed": [[6.0, 6.0], [4.0, 8.0]]})


def test_arms_with_other_records_do_not_compare() -> None:
    with pytest.raises(ValueError, match=r"'a' and 'c' hold different records: total cost 24\.0 and 25\.0"):
        check_comparable({"a": ESTIMATED, "b": ESTIMATED, "c": [[4.0, 4.0, 5.0], [4.0, 4.0, 4.0]]})


@pytest.mark.parametrize("costs", [[], [1.0, 2.0], [[]], np.zeros((2, 0)), np.zeros((1, 2, 3)), 3.0])
@pytest.mark.parametrize("function", [waste, cost_cv, measure])
def test_costs_must_be_a_matrix(function: Any, costs: Any) -> None:
    with pytest.raises(ValueError, match=r"pack costs must be a non-empty \[ranks, steps\] matrix, got shape \("):
        function(costs)


def test_executed_costs_must_match() -> None:
    with pytest.raises(ValueError, match=r"executed costs have shape \(2, 2\), estimated ones \(2, 3\)"):
        measure(ESTIMATED, [[1.0, 2.0], [3.0, 4.0]])
