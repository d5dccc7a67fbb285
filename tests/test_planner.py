from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcl_grain.metrics import cost_cv
from bcl_grain.partition import balanced_partition
from bcl_grain.planner import (
    FILLER,
    Order,
    PlannerConfig,
    cohort_start,
    finished,
    initial_state,
    plan_cycle,
    plan_digest,
    records_wanted,
    state_at,
)
from bcl_grain.simulate import pack_costs, plan_stream
from tests.policies import (
    EACH_BALANCING_POLICY,
    EACH_POLICY,
    EACH_RANDOM_ACCESS_POLICY,
    EACH_STEP_WIDTH,
    EACH_TAIL,
    POLICIES,
    PolicyCase,
)

Packs = list[list[int]]


def draw_costs(n: int, seed: int = 0, sigma: float = 1.0) -> npt.NDArray[np.float64]:
    return np.random.default_rng(seed).lognormal(0, sigma, n)


def by_step(packs: Packs, config: PlannerConfig) -> list[Packs]:
    assert len(packs) % config.packs_per_step == 0
    return [packs[i : i + config.packs_per_step] for i in range(0, len(packs), config.packs_per_step)]


def records_of(packs: Packs) -> list[int]:
    return sorted(position for pack in packs for position in pack if position != FILLER)


@given(
    policy=st.sampled_from(list(POLICIES.values())),
    pack_size=st.integers(1, 5),
    packs_per_step=st.integers(1, 3),
    lookahead=st.integers(1, 5),
    tail=st.sampled_from(["drop", "keep", "pad"]),
    num_records=st.integers(0, 120),
    seed=st.integers(0, 5),
    equal_costs=st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_every_record_comes_out_once_in_packs_of_equal_size(
    policy: PolicyCase, num_records: int, tail: Any, seed: int, equal_costs: bool, **shape: int
) -> None:
    config = policy.config(tail=tail, seed=seed, **shape)
    step = config.step_records
    costs = np.ones(num_records) if equal_costs else draw_costs(num_records, seed)
    if tail == "drop" and 0 < num_records < step:
        with pytest.raises(ValueError, match=f"the stream ended after {num_records} records, but {step} are needed"):
            plan_stream(config, costs)
        return
    packs = plan_stream(config, costs)
    by_step(packs, config)
    if tail == "drop":
        assert all(len(pack) == config.pack_size for pack in packs)
        assert records_of(packs) == list(range(num_records - num_records % step))
        return
    assert records_of(packs) == list(range(num_records))
    assert len(packs) == config.packs_per_step * math.ceil(num_records / step)
    if tail == "pad":
        assert all(len(pack) == config.pack_size for pack in packs)
    whole = num_records // step * config.packs_per_step
    assert all(len(pack) == config.pack_size and FILLER not in pack for pack in packs[:whole])
    assert all(len(pack) <= config.pack_size for pack in packs[whole:])


@EACH_POLICY
def test_positions_ascend_inside_a_pack_and_fillers_come_last(policy: PolicyCase) -> None:
    packs = plan_stream(policy.config(pack_size=4, lookahead=4, tail="pad"), draw_costs(71))
    for pack in packs:
        real = [position for position in pack if position != FILLER]
        assert real == sorted(real)
        assert pack == real + [FILLER] * (4 - len(real))


@EACH_POLICY
def test_plans_are_reproducible_and_of_plain_integers(policy: PolicyCase) -> None:
    config = policy.config(pack_size=4, packs_per_step=2, lookahead=4, seed=3)
    costs = draw_costs(400)
    packs = plan_stream(config, costs)
    assert packs == plan_stream(config, costs.tolist())
    assert all(type(position) is int for pack in packs for position in pack)


def test_arrival_keeps_the_order_of_arrival() -> None:
    config = PlannerConfig(pack_size=3, packs_per_step=2, lookahead=2, policy="arrival", order="aligned", tail="keep")
    assert plan_stream(config, draw_costs(14))[:4] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


@EACH_STEP_WIDTH
@pytest.mark.parametrize("order", ["shuffled", "aligned"])
def test_windows_are_the_balanced_partition_of_their_own_records(packs_per_step: int, order: Any) -> None:
    config = PlannerConfig(
        pack_size=4, packs_per_step=packs_per_step, lookahead=5, policy="windowed", order=order, seed=1
    )
    window = config.pool_records
    costs = draw_costs(3 * window, sigma=0.3)  # none is dearer than a mean pack
    packs = plan_stream(config, costs)
    per_window = 5 * packs_per_step
    for i in range(3):
        expected = balanced_partition(costs[i * window : (i + 1) * window], per_window)
        planned = packs[i * per_window : (i + 1) * per_window]
        assert sorted(planned) == sorted(sorted(p + i * window for p in pack) for pack in expected)


@EACH_BALANCING_POLICY
def test_packs_of_a_step_have_equal_cost(policy: PolicyCase) -> None:
    """Against drawing the step's packs at random, the spread inside a step all but vanishes."""
    config = policy.config(pack_size=16, packs_per_step=4, lookahead=8)
    costs = draw_costs(config.pool_records * 20, sigma=0.8)
    inside = pack_costs(plan_stream(config, costs), costs).reshape(-1, 4)
    arrival = costs.reshape(-1, 4, 16).sum(axis=2)
    assert (inside.std(axis=1) / inside.mean(axis=1)).mean() < 0.02 * (
        arrival.std(axis=1) / arrival.mean(axis=1)
    ).mean()


@EACH_BALANCING_POLICY
def test_packs_of_a_step_are_equal_though_records_are_dearer_than_packs(policy: PolicyCase) -> None:
    """What the dearest record makes a step cost is used by all its packs: no time is lost, though steps differ."""
    config = policy.config(pack_size=8, packs_per_step=8, lookahead=16)
    rng = np.random.default_rng(1)
    costs = rng.lognormal(0, 0.8, config.pool_records * 10)
    dear = rng.random(costs.size) < 0.01
    costs[dear] = rng.uniform(15, 35, dear.sum())  # a mean pack costs 11 to 13
    steps = pack_costs(plan_stream(config, costs), costs).reshape(-1, 8)
    dearest_record = costs[np.array(plan_stream(config, costs)).reshape(len(steps), -1)].max(axis=1)
    assert dearest_record.max() > 2.5 * steps.mean()
    assert (steps.max(axis=1) >= dearest_record).all()
    assert steps.mean(axis=1).max() > 2 * steps.mean()
    assert steps.max(axis=1).mean() < 1.015 * steps.mean()


def test_neighbours_in_cost_share_a_step() -> None:
    """Where records are too dear to balance, the dearest packs at least wait for each other alone."""
    config = PlannerConfig(pack_size=2, packs_per_step=3, lookahead=4, policy="windowed")
    for seed in range(20):
        costs = draw_costs(config.pool_records, seed, sigma=2.0)
        steps = [sorted(pack_costs(step, costs).tolist()) for step in by_step(plan_stream(config, costs), config)]
        ascending = sorted(cost for step in steps for cost in step)
        assert sorted(steps) == [ascending[i : i + 3] for i in range(0, 12, 3)]


def cost_ranks(config: PlannerConfig, costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """[cycles, steps]: at which place of its cycle each step stands in cost."""
    steps = pack_costs(plan_stream(config, costs), costs).reshape(-1, config.lookahead, config.packs_per_step)
    return steps.sum(axis=2).argsort(axis=1).argsort(axis=1)


@EACH_STEP_WIDTH
def test_aligned_order_puts_the_same_cost_rank_at_the_same_place_on_all_streams(packs_per_step: int) -> None:
    config = PlannerConfig(pack_size=4, packs_per_step=packs_per_step, lookahead=8, policy="windowed", seed=5)
    ranks = [cost_ranks(config, draw_costs(config.pool_records * 10, seed)) for seed in range(4)]
    for other in ranks[1:]:
        np.testing.assert_array_equal(ranks[0], other)
    assert len({tuple(cycle) for cycle in ranks[0].tolist()}) == 10  # another permutation in each cycle
    reseeded = dataclasses.replace(config, seed=6)
    assert not np.array_equal(cost_ranks(reseeded, draw_costs(config.pool_records * 10)), ranks[0])


def test_shuffled_order_does_not_correlate_between_streams_or_with_place() -> None:
    config = PlannerConfig(pack_size=4, lookahead=8, policy="windowed", order="shuffled", seed=5)
    ranks = np.stack([cost_ranks(config, draw_costs(config.pool_records * 500, seed, sigma=1.5)) for seed in range(6)])
    flat = ranks.reshape(6, -1)
    correlation = np.asarray(np.corrcoef(flat))[np.triu_indices(6, 1)]
    assert np.abs(correlation).max() < 5 / math.sqrt(flat.shape[1])
    # Each place of a cycle sees every rank alike: mean 3.5, standard error of 3000 draws 0.042.
    assert np.abs(ranks.mean(axis=(0, 1)) - 3.5).max() < 5 * 0.042


def test_order_only_moves_the_packs_of_a_cycle() -> None:
    costs = draw_costs(3 * 4 * 8)
    orders: tuple[Order, ...] = ("shuffled", "aligned")
    configs = [PlannerConfig(pack_size=4, lookahead=8, order=order, seed=seed) for order in orders for seed in (0, 1)]
    plans = [plan_stream(config, costs) for config in configs]
    for cycle in range(3):
        sets = [sorted(plan[cycle * 8 : (cycle + 1) * 8]) for plan in plans]
        assert sets.count(sets[0]) == 4
    assert all(plans.count(plan) == 1 for plan in plans)


@pytest.mark.parametrize(("lookahead", "windows"), [(8, 400), (32, 300)])
def test_windowed_reaches_its_statistical_ceiling(lookahead: int, windows: int) -> None:
    """Packs of a window are equal, window means are not: variability falls by 1 - 1/sqrt(k) and no more."""
    ranks = 3
    config = PlannerConfig(pack_size=64, lookahead=lookahead, policy="windowed")
    costs = [draw_costs(config.pool_records * windows, seed, sigma=0.5) for seed in range(ranks)]
    windowed, _ = cost_cv([pack_costs(plan_stream(config, stream), stream) for stream in costs])
    arrival, _ = cost_cv([stream.reshape(-1, 64).sum(axis=1) for stream in costs])
    assert 1 - windowed / arrival == pytest.approx(1 - 1 / math.sqrt(lookahead), abs=0.02)


@EACH_POLICY
@EACH_STEP_WIDTH
def test_state_counts_what_was_read_and_emitted(policy: PolicyCase, packs_per_step: int) -> None:
    config = policy.config(pack_size=3, packs_per_step=packs_per_step, lookahead=4)
    costs = draw_costs(config.pool_records * 4)
    state = initial_state(config)
    emitted: Packs = []
    for cycle in range(4):
        assert state.cycle == cycle
        assert state.emitted == len(emitted)
        wanted = records_wanted(config, state)
        plan = plan_cycle(config, state, costs[state.read : state.read + wanted], final=False)
        assert plan.dropped == 0
        emitted += plan.packs
        assert plan.state.read == state.read + wanted
        state = plan.state
        live = state.live.tolist()
        assert sorted(records_of(emitted) + live) == list(range(state.read))
        np.testing.assert_array_equal(state.costs, costs[state.live])


@EACH_POLICY
def test_a_cycle_wants_its_exact_number_of_records(policy: PolicyCase) -> None:
    config = policy.config(pack_size=2, lookahead=2)
    state = initial_state(config)
    wanted = records_wanted(config, state)
    with pytest.raises(ValueError, match=rf"the cycle wants {wanted} new records, got {wanted - 1} \(final=False\)"):
        plan_cycle(config, state, [1.0] * (wanted - 1), final=False)
    for final in (False, True):
        with pytest.raises(ValueError, match=f"the cycle wants {wanted} new records, got {wanted + 1}"):
            plan_cycle(config, state, [1.0] * (wanted + 1), final=final)


@EACH_RANDOM_ACCESS_POLICY
def test_any_pack_can_be_gone_to(policy: PolicyCase) -> None:
    config = policy.config(pack_size=2, packs_per_step=2, lookahead=3)
    costs = draw_costs(12 * 3)
    packs = plan_stream(config, costs)
    for index, pack in enumerate(packs):
        state, place = state_at(config, index)
        assert state.emitted + place == index
        wanted = records_wanted(config, state)
        plan = plan_cycle(config, state, costs[state.read : state.read + wanted], final=False)
        assert plan.packs[place] == pack
    with pytest.raises(ValueError, match="the index of a pack must be an integer of at least 0, got -1"):
        state_at(config, -1)


def test_cohorts_are_what_a_cycle_reads() -> None:
    config = PlannerConfig(pack_size=2, packs_per_step=2, lookahead=3, policy="windowed")
    assert [cohort_start(config, p) for p in (0, 11, 12, 25)] == [0, 0, 12, 24]
    assert [cohort_start(config, p, following=True) for p in (0, 11, 12, 25)] == [12, 12, 24, 36]


@EACH_POLICY
def test_scalars_and_live_records_make_a_state_again(policy: PolicyCase) -> None:
    config = policy.config(pack_size=2, lookahead=4)
    start = initial_state(config)
    state = plan_cycle(config, start, [1.0, 2.0] * (records_wanted(config, start) // 2), final=False).state
    again = type(state).from_scalars(state.scalars())
    assert again.scalars() == state.scalars()
    assert again.live.size == again.costs.size == 0


def test_digest_tells_plans_apart() -> None:
    plans: list[Packs] = [[], [[]], [[0]], [[0, 1]], [[1, 0]], [[0], [1]], [[1], [0]], [[0, -1]], [[0], []], [[], [0]]]
    assert len({plan_digest(plan) for plan in plans}) == len(plans)
    assert plan_digest([[0, 1], [2, FILLER]]) == plan_digest([[0, 1], [2, FILLER]])
    assert 0 <= plan_digest([[2**40, 7]]) < 2**32


@EACH_POLICY
@EACH_TAIL
@EACH_STEP_WIDTH
def test_finished_is_told_by_num_packs_alone(policy: PolicyCase, tail: Any, packs_per_step: int) -> None:
    config = policy.config(pack_size=2, packs_per_step=packs_per_step, lookahead=2, tail=tail, num_packs=packs_per_step)
    state = initial_state(config)
    assert not finished(config, state)
    wanted = records_wanted(config, state)
    state = plan_cycle(config, state, [1.0] * wanted, final=False).state
    assert finished(config, state)
    endless = policy.config(pack_size=2, lookahead=2, tail=tail)
    assert not finished(endless, state)
