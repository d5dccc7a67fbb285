from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bcl_grain.partition import balanced_partition, check_partition, lower_bound, pack_capacity, pack_levels

SHAPES = [(n, m) for n in range(1, 11) for m in range(1, n + 1) if n % m == 0]
EACH_SHAPE = pytest.mark.parametrize(("num_records", "num_packs"), SHAPES)

cost_lists = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=60)


def divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


@functools.cache
def all_partitions(num_records: int, num_packs: int) -> npt.NDArray[np.int64]:
    """Returns every partition into packs of equal cardinality, the order of packs aside: [partitions, packs, size]."""
    size = num_records // num_packs

    def grow(left: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
        if not left:
            yield []
            return
        for others in itertools.combinations(left[1:], size - 1):
            pack = (left[0], *others)
            for rest in grow(tuple(i for i in left if i not in pack)):
                yield [pack, *rest]

    return np.array(list(grow(tuple(range(num_records)))))


def largest(packs: Sequence[Sequence[int]], costs: Sequence[float]) -> float:
    return max(math.fsum(costs[i] for i in pack) for pack in packs)


def plain_lpt(costs: Sequence[float], num_packs: int, offsets: Sequence[float]) -> list[list[int]]:
    """The rule, literally: descending cost, each record to the lightest pack with room, ties by index."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    loads = list(offsets)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        room = [j for j in range(num_packs) if len(packs[j]) < len(costs) // num_packs]
        j = min(room, key=lambda j: (loads[j], j))
        packs[j].append(i)
        loads[j] += costs[i]
    return packs


@EACH_SHAPE
def test_brute_force_confirms_the_bounds(num_records: int, num_packs: int) -> None:
    """lower_bound <= optimum <= LPT <= mean + (1 - 1/m)(c_max - c_min), on all multisets of four values."""
    partitions = all_partitions(num_records, num_packs)
    size = num_records // num_packs
    assert len(partitions) == math.factorial(num_records) // (math.factorial(size) ** num_packs) // math.factorial(
        num_packs
    )
    for costs in itertools.combinations_with_replacement((1, 2, 5, 9), num_records):
        values = np.array(costs)
        optimum = values[partitions].sum(axis=2).max(axis=1).min()
        packs = balanced_partition(costs, num_packs)
        check_partition(packs, num_records, num_packs)
        lpt = largest(packs, costs)
        mean = sum(costs) / num_packs
        assert lower_bound(costs, num_packs) <= optimum <= lpt, costs
        assert lpt <= mean + (1 - 1 / num_packs) * (max(costs) - min(costs)) + 1e-9, costs
        assert lpt <= (2 - 1 / num_packs) * optimum + 1e-9, costs


@EACH_SHAPE
def test_brute_force_confirms_the_bounds_for_spread_costs(num_records: int, num_packs: int) -> None:
    partitions = all_partitions(num_records, num_packs)
    rng = np.random.default_rng(num_records * 100 + num_packs)
    for sigma in (0.1, 0.5, 1.0, 2.0, 4.0):
        for _ in range(20):
            costs = rng.lognormal(0, sigma, num_records)
            optimum = costs[partitions].sum(axis=2).max(axis=1).min()
            lpt = largest(balanced_partition(costs, num_packs), costs.tolist())
            bound = costs.sum() / num_packs + (1 - 1 / num_packs) * (costs.max() - costs.min())
            assert lower_bound(costs, num_packs) <= optimum * (1 + 1e-12)
            assert optimum <= lpt * (1 + 1e-12) <= bound * (1 + 1e-9)


def test_each_of_the_three_lower_bounds_is_needed() -> None:
    assert lower_bound([4, 4, 4, 4, 4, 1], 2) == 10.5  # the mean
    assert lower_bound([9, 1, 1, 1], 2) == 10  # the dearest with the cheapest
    assert lower_bound([5, 5, 5, 1, 1, 1], 2) == 11  # two of the three dearest meet; 9 is the mean
    assert lower_bound([], 3) == 0


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_partition_follows_its_rule_and_its_bound(data: st.DataObject) -> None:
    costs = data.draw(cost_lists)
    num_packs = data.draw(st.sampled_from(divisors(len(costs))))
    packs = balanced_partition(costs, num_packs)
    check_partition(packs, len(costs), num_packs)
    assert packs == plain_lpt(costs, num_packs, [0.0] * num_packs)
    mean = math.fsum(costs) / num_packs
    bound = mean + (1 - 1 / num_packs) * (max(costs) - min(costs))
    assert lower_bound(costs, num_packs) <= largest(packs, costs) * (1 + 1e-12) <= bound * (1 + 1e-9)


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_partition_follows_its_rule_with_offsets(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(1, 4).map(float), min_size=1, max_size=24))
    num_packs = data.draw(st.sampled_from(divisors(len(costs))))
    offsets = data.draw(st.lists(st.integers(-3, 20).map(float), min_size=num_packs, max_size=num_packs))
    packs = balanced_partition(costs, num_packs, offsets)
    check_partition(packs, len(costs), num_packs)
    assert packs == plain_lpt(costs, num_packs, offsets)


def test_offsets_count_where_each_pack_gets_one_record() -> None:
    assert balanced_partition([4.0, 1.0], 2, offsets=[5.0, 0.0]) == [[1], [0]]


def test_offsets_make_room_for_a_dear_record() -> None:
    packs = balanced_partition([8.0, 1.0, 1.0, 1.0], 2, offsets=[7.0, 0.0])
    assert packs == [[1, 2], [0, 3]]


def test_ties_go_by_index() -> None:
    assert balanced_partition([1.0] * 6, 3) == [[0, 3], [1, 4], [2, 5]]
    assert balanced_partition([2, 1, 2, 1], 2) == [[0, 1], [2, 3]]


def test_the_kind_of_sequence_does_not_matter() -> None:
    costs = [3, 1, 4, 1, 5, 9, 2, 6]
    expected = balanced_partition(costs, 4)
    assert balanced_partition(tuple(costs), 4) == expected
    assert balanced_partition(np.array(costs, np.float32), 4) == expected
    assert all(type(i) is int for pack in expected for i in pack)


def test_partition_of_nothing() -> None:
    assert balanced_partition([], 3) == [[], [], []]
    check_partition([[], [], []], 0, 3)


def test_the_checker_accepts_exactly_the_permutations() -> None:
    for flat in itertools.product(range(-1, 5), repeat=4):
        packs = [list(flat[:2]), list(flat[2:])]
        if sorted(flat) == [0, 1, 2, 3]:
            check_partition(packs, 4, 2)
        else:
            with pytest.raises(ValueError, match="position"):
                check_partition(packs, 4, 2)


@pytest.mark.parametrize(
    ("packs", "message"),
    [
        ([[0, 1, 2, 3, 4, 5]], "expected 3 packs, got 1"),
        ([[0, 1], [2, 3], [4, 5], []], "expected 3 packs, got 4"),
        ([[0, 1], [2, 3, 4], [5]], "pack 1 holds 3 records instead of 2"),
        ([[0, 1], [2, 3], [4]], "pack 2 holds 1 records instead of 2"),
        ([[0, 1], [2, 6], [4, 5]], "position 6 of pack 1 is not in 0..5"),
        ([[0, 1], [2, 3], [-1, 5]], "position -1 of pack 2 is not in 0..5"),
        ([[0, 1], [2, 2], [4, 5]], "position 2 is in pack 1 twice or in an earlier pack too"),
        ([[0, 1], [2, 3], [4, 0]], "position 0 is in pack 2 twice or in an earlier pack too"),
    ],
)
def test_the_checker_names_the_fault(packs: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_partition(packs, 6, 3)


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_the_checker_rejects_every_mutation(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.floats(0.1, 10), min_size=2, max_size=30))
    num_packs = data.draw(st.sampled_from(divisors(len(costs))))
    packs = balanced_partition(costs, num_packs)
    pack = data.draw(st.integers(0, num_packs - 1))
    place = data.draw(st.integers(0, len(packs[pack]) - 1))
    mutation = data.draw(st.sampled_from(["lose", "repeat", "out of range", "move", "lose a pack"]))
    if mutation == "lose":
        packs[pack].pop(place)
    elif mutation == "repeat":
        packs[pack][place] = (packs[pack][place] + 1) % len(costs)
    elif mutation == "out of range":
        packs[pack][place] = len(costs)
    elif mutation == "move" and num_packs > 1:
        packs[(pack + 1) % num_packs].append(packs[pack].pop(place))
    else:
        packs.pop()
    with pytest.raises(ValueError, match="pack"):
        check_partition(packs, len(costs), num_packs)


@pytest.mark.parametrize("function", [balanced_partition, lower_bound])
def test_records_must_divide_into_packs(function: object) -> None:
    assert callable(function)
    with pytest.raises(ValueError, match="5 records can't be split into 2 packs of equal cardinality"):
        function([1.0] * 5, 2)
    with pytest.raises(ValueError, match="num_packs must be at least 1, got 0"):
        function([1.0] * 4, 0)


def test_offsets_must_be_one_for_each_pack() -> None:
    with pytest.raises(ValueError, match="expected 2 offsets, one for each pack, got 3"):
        balanced_partition([1.0, 2.0], 2, offsets=[0.0, 0.0, 0.0])


def test_pack_capacity() -> None:
    assert [pack_capacity(12, m) for m in (1, 2, 3, 12)] == [12, 6, 4, 1]


@example(costs=[1.0] * 2 + [98.0] + [101.0] * 6 + [153.0] * 2 + [202.0], num_steps=3, packs_per_step=2)
@given(
    costs=st.lists(st.floats(1e-2, 1e3), min_size=1, max_size=60),
    num_steps=st.integers(1, 6),
    packs_per_step=st.integers(1, 4),
)
def test_levels_sum_to_the_costs_and_are_equal_in_a_step(
    costs: list[float], num_steps: int, packs_per_step: int
) -> None:
    num_packs = num_steps * packs_per_step
    costs = (costs * num_packs)[: max(1, len(costs) // num_packs) * num_packs]
    levels = pack_levels(costs, num_packs, packs_per_step)
    assert levels.shape == (num_packs,)
    assert math.isclose(levels.sum(), math.fsum(costs), rel_tol=1e-9)
    steps = levels.reshape(num_steps, packs_per_step)
    assert (steps == steps[:, :1]).all()
    assert (np.diff(levels) <= 1e-9 * levels[0]).all()
    cheapest = math.fsum(sorted(costs)[: len(costs) // num_packs])
    assert levels.min() >= cheapest * (1 - 1e-9)
    if packs_per_step == 1:
        assert levels.min() == levels.max()
    assert pack_levels(costs, num_packs, packs_per_step, total=1e6).sum() == pytest.approx(1e6)


def test_a_step_is_raised_to_its_dearest_record_and_the_others_get_the_rest() -> None:
    costs = [30.0, 30.0, 20.0, 20.0] + [1.0] * 4 + [3.0] * 24  # 16 packs of 2, two a step, 176 in all: 11 a pack
    # The first step is as dear as 30 with a 1, the second as 20 with a 1; the others share the rest.
    expected = [31.0, 31.0, 21.0, 21.0] + [(176 - 2 * 31 - 2 * 21) / 12] * 12
    assert pack_levels(costs, num_packs=16, packs_per_step=2).tolist() == pytest.approx(expected)
    even = [2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0]
    assert pack_levels(even, num_packs=4, packs_per_step=2).tolist() == [3.0] * 4


def test_levels_leave_the_other_steps_what_they_need() -> None:
    """The one of 9 asks for 10 + 10 of the 16 in all, but the cheapest four records of the other step cost 4."""
    assert pack_levels([9.0] + [1.0] * 7, num_packs=4, packs_per_step=2).tolist() == [6.0, 6.0, 2.0, 2.0]
