from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcl_grain import streaming
from bcl_grain.cost_prior import CostPrior, balanceable_ceiling
from bcl_grain.metrics import waste
from bcl_grain.planner import (
    Cycle,
    PlannerConfig,
    PoolState,
    cohort_start,
    finished,
    initial_state,
    plan_cycle,
    records_wanted,
    state_at,
)
from bcl_grain.simulate import pack_costs, plan_stream
from bcl_grain.workloads import load_workload

FloatArray = npt.NDArray[np.float64]

COSTS: dict[str, Any] = {
    "equal": lambda rng, n: np.ones(n),
    "log-normal": lambda rng, n: rng.lognormal(0, 1, n),
    "outliers": lambda rng, n: np.where(rng.random(n) < 0.05, 100.0, rng.random(n) + 0.5),
    "two sizes": lambda rng, n: np.where(rng.random(n) < 0.3, 9.0, 1.0),
    "rising": lambda rng, n: np.arange(1.0, n + 1),
    "blocks": lambda rng, n: 1 + 8 * (np.arange(n) // 150 % 2) + rng.random(n),
}
PRIORS = (None, CostPrior(mean=1.5, records=100), CostPrior(mean=40.0, records=10**9, ceiling=50.0))

any_stream = given(
    kind=st.sampled_from(list(COSTS)),
    pack_size=st.integers(1, 6),
    packs_per_step=st.integers(1, 3),
    lookahead=st.integers(1, 7),
    max_age=st.integers(1, 6),
    prior=st.sampled_from(PRIORS),
    steps=st.integers(1, 40),
    knows_end=st.booleans(),
    seed=st.integers(0, 99),
)


def cycles_of(config: PlannerConfig, costs: FloatArray, state: PoolState | None = None) -> list[Cycle]:
    state = initial_state(config) if state is None else state
    cycles = []
    while not finished(config, state):
        wanted = records_wanted(config, state)
        new = costs[state.read : state.read + wanted]
        cycle = plan_cycle(config, state, new, final=len(new) < wanted)
        if not cycle.packs:
            break
        cycles.append(cycle)
        state = cycle.state
    return cycles


def make(kind: str, steps: int, knows_end: bool, seed: int, **shape: Any) -> tuple[PlannerConfig, FloatArray]:
    num_packs = steps * shape["packs_per_step"]
    config = PlannerConfig(policy="streaming", num_packs=num_packs if knows_end else None, **shape)
    return config, COSTS[kind](np.random.default_rng(seed), num_packs * config.pack_size)


@any_stream
@settings(deadline=None, max_examples=150)
def test_every_record_once_in_full_packs_within_its_age(**case: Any) -> None:
    config, costs = make(**case)
    cycles = cycles_of(config, costs)
    packs = [pack for cycle in cycles for pack in cycle.packs]
    assert all(len(pack) == config.pack_size for pack in packs)
    assert sorted(position for pack in packs for position in pack) == list(range(costs.size))
    # A record's cohort is the cycle that read it, found from what each cycle had read.
    read = [0, *(cycle.state.read for cycle in cycles)]
    for number, cycle in enumerate(cycles):
        for position in (p for pack in cycle.packs for p in pack):
            born = next(c for c in range(len(cycles)) if read[c] <= position < read[c + 1])
            assert number - born <= config.max_age


@any_stream
@settings(deadline=None, max_examples=60)
def test_a_state_says_all_from_every_cycle_on(**case: Any) -> None:
    config, costs = make(**case)
    cycles = cycles_of(config, costs)
    for number, cycle in enumerate(cycles):
        saved = json.loads(json.dumps(cycle.state.scalars(), allow_nan=False))
        live = cycle.state.live
        restored = dataclasses.replace(PoolState.from_scalars(saved), live=live, costs=costs[live])
        rest = cycles_of(config, costs, restored)
        assert [c.packs for c in rest] == [c.packs for c in cycles[number + 1 :]]


@any_stream
@settings(deadline=None, max_examples=60)
def test_the_pool_holds_what_was_read_and_not_emitted(**case: Any) -> None:
    config, costs = make(**case)
    out: set[int] = set()
    for cycle in cycles_of(config, costs):
        out |= {position for pack in cycle.packs for position in pack}
        live = cycle.state.live.tolist()
        assert live == sorted(set(range(cycle.state.read)) - out)
        assert cycle.state.costs.tolist() == costs[live].tolist()
        assert len(live) <= config.pool_records


def test_cohorts_are_what_cycles_read() -> None:
    config = PlannerConfig(pack_size=3, packs_per_step=2, lookahead=5, policy="streaming")
    costs = np.random.default_rng(0).lognormal(0, 1, 600)
    starts = [0, *(cycle.state.read for cycle in cycles_of(config, costs))][:-1]
    assert starts[:4] == [0, 30, 48, 66]  # the pool of 5 steps, then 3 steps each
    for position in range(starts[-1]):
        cohort = max(start for start in starts if start <= position)
        assert cohort_start(config, position) == cohort
        assert cohort_start(config, position, following=True) == min(start for start in starts if start > position)


def test_a_stream_within_one_pool_is_planned_as_a_window() -> None:
    costs = np.random.default_rng(1).lognormal(0, 1, 4 * 8)
    window = PlannerConfig(pack_size=4, lookahead=8, num_packs=8, policy="windowed")
    assert plan_stream(dataclasses.replace(window, policy="streaming"), costs) == plan_stream(window, costs)
    shorter: dict[str, Any] = {"pack_size": 4, "lookahead": 9}  # where the end is found before the pool is full
    plans = [plan_stream(PlannerConfig(policy=p, **shorter), costs) for p in ("windowed", "streaming")]
    assert plans[0] == plans[1]


def test_the_first_cycle_aims_at_the_pool_s_mean_and_hits_it() -> None:
    config = PlannerConfig(pack_size=16, lookahead=8, policy="streaming")
    costs = np.random.default_rng(2).lognormal(0, 0.5, config.pool_records)
    cycle = plan_cycle(config, initial_state(config), costs, final=False)
    assert len(cycle.packs) == 4
    np.testing.assert_allclose(pack_costs(cycle.packs, costs), 16 * costs.mean(), rtol=5e-4)


def test_with_an_exact_prior_packs_cost_the_prior_s_mean() -> None:
    """Though the first pool's own mean is far off: what the arrivals bring too much stays in the pool."""
    config = PlannerConfig(
        pack_size=16, lookahead=8, policy="streaming", prior=CostPrior(mean=1.0, records=10**9, ceiling=100.0)
    )
    costs = np.random.default_rng(3).lognormal(0, 0.5, config.pool_records)
    costs *= 1.05 / costs.mean()
    cycle = plan_cycle(config, initial_state(config), costs, final=False)
    np.testing.assert_allclose(pack_costs(cycle.packs, costs), 16.0, rtol=2e-3)
    assert cycle.state.costs.mean() > 1.08


def lognormal_waste(config: PlannerConfig, *, ranks: int = 4, sigma: float = 0.7, steps: int = 480) -> float:
    streams = np.random.default_rng(4).lognormal(0, sigma, (ranks, steps * config.pack_size))
    return waste(np.stack([pack_costs(plan_stream(config, costs), costs) for costs in streams]))


def shape(policy: str, **more: Any) -> PlannerConfig:
    return PlannerConfig(**{"pack_size": 32, "lookahead": 8, "num_packs": 480, "policy": policy, **more})


def test_waste_falls_far_below_windowed_s() -> None:
    windowed = lognormal_waste(shape("windowed"))
    mean = float(np.exp(0.7**2 / 2))
    assert lognormal_waste(shape("streaming")) < 0.45 * windowed
    assert lognormal_waste(shape("streaming", num_packs=None)) < 0.55 * windowed
    assert lognormal_waste(shape("streaming", prior=CostPrior(mean=mean, records=10**9))) < 0.25 * windowed


@pytest.mark.parametrize("share", [-0.05, -0.02, 0.02, 0.05])
def test_a_wrong_prior_gives_way(share: float) -> None:
    prior = CostPrior(mean=(1 + share) * float(np.exp(0.7**2 / 2)), records=10_000)
    assert lognormal_waste(shape("streaming", prior=prior)) < 0.7 * lognormal_waste(shape("windowed"))


@pytest.mark.parametrize("lookahead", [2, 3, 8])
def test_short_jobs_lose_nothing_against_windowed(lookahead: int) -> None:
    for steps in (1, 7, 20, 40):
        small = {"lookahead": lookahead, "num_packs": steps}
        streaming_waste = lognormal_waste(shape("streaming", **small), ranks=8, steps=steps)
        assert streaming_waste <= 1.02 * lognormal_waste(shape("windowed", **small), ranks=8, steps=steps)


def test_outliers_gather_and_meet() -> None:
    """With records dearer than a pack, equal packs are impossible: in aligned order the dear ones meet."""
    rng = np.random.default_rng(5)
    streams = np.where(
        rng.random((8, 8 * 640)) < 0.01, rng.uniform(20, 60, (8, 8 * 640)), rng.uniform(0.5, 1.5, (8, 5120))
    )
    wastes = {}
    for policy in ("windowed", "streaming"):
        for order in ("shuffled", "aligned"):
            config = PlannerConfig(pack_size=8, lookahead=32, policy=policy, order=order, num_packs=640)
            wastes[policy, order] = waste(np.stack([pack_costs(plan_stream(config, c), c) for c in streams]))
    assert wastes["streaming", "aligned"] < 0.8 * wastes["windowed", "aligned"]
    assert wastes["windowed", "aligned"] < 0.8 * wastes["windowed", "shuffled"]


def outlier_cycles(config: PlannerConfig, costs: FloatArray, above: float) -> list[int]:
    """Returns how many records above a cost each cycle gives."""
    return [int((costs[np.concatenate(cycle.packs)] > above).sum()) for cycle in cycles_of(config, costs)]


@pytest.mark.parametrize("max_age", [4, 16])
@pytest.mark.parametrize("knows_end", [False, True])
def test_outliers_come_out_every_second_cycle_on_all_streams(knows_end: bool, max_age: int) -> None:
    """With a low bound on age as well: what can't wait for the next wave comes out in this one."""
    num_packs = 480 if knows_end else None
    config = PlannerConfig(pack_size=8, lookahead=32, policy="streaming", num_packs=num_packs, max_age=max_age)
    counts = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        costs = np.where(rng.random(3840) < 0.02, rng.uniform(30, 60, 3840), rng.uniform(0.5, 1.5, 3840))
        counts.append(outlier_cycles(config, costs, 2.0))
    waves = np.array(counts)[:, :-1] > 0  # the last pool gives all that it has
    assert (waves == waves[0]).all()
    gaps = np.diff(np.flatnonzero(waves[0]))
    assert gaps.size >= 10
    assert (gaps == 2).all()
    if knows_end:  # the last pool gets the outliers of its own records, not two cycles' worth
        assert waves[0, -1]


def test_a_low_bound_on_age_shortens_the_waves() -> None:
    config = PlannerConfig(pack_size=8, lookahead=32, policy="streaming", max_age=1)
    rng = np.random.default_rng(0)
    costs = np.where(rng.random(3840) < 0.05, rng.uniform(30, 60, 3840), rng.uniform(0.5, 1.5, 3840))
    assert min(outlier_cycles(config, costs, 2.0)) > 0


@pytest.mark.parametrize("corpus", ["medquad", "p3_t0_mix"])
@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_lanes_of_several_packs_a_step_wait_no_longer_than_windowed(corpus: str, lanes: int) -> None:
    """Packs of 8 with records of up to 3.5 packs; 16 ranks in few lanes, without a prior."""
    ranks, steps = 16, 240
    lengths = load_workload(corpus).sample(ranks * 8 * steps, np.random.default_rng(12)).astype(np.float64)
    costs = lengths + lengths**2 / 30_000
    wastes = {}
    for policy in ("windowed", "streaming"):
        width = ranks // lanes
        config = PlannerConfig(pack_size=8, packs_per_step=width, num_packs=steps * width, policy=policy)
        streams = [costs[lane::lanes] for lane in range(lanes)]
        by_lane = [pack_costs(plan_stream(config, own), own).reshape(steps, width).T for own in streams]
        wastes[policy] = waste(np.concatenate(by_lane))
    # Within one lane the packs of a step are equal either way, to a fraction of a per cent.
    assert wastes["streaming"] < (wastes["windowed"] if lanes > 1 else 0.006)


def test_drift_is_seen_where_there_is_some() -> None:
    rng = np.random.default_rng(6)
    config = PlannerConfig(pack_size=8, lookahead=8, policy="streaming")
    random_order = rng.lognormal(0, 0.8, 8000)
    assert max(c.state.drift for c in cycles_of(config, random_order)) < streaming.DRIFT_BEGINS
    blocks = random_order * np.where(np.arange(8000) // 500 % 2, 5, 1)
    drift = [c.state.drift for c in cycles_of(config, blocks)]
    assert np.median(drift[20:]) > streaming.DRIFT_ENDS


@pytest.mark.parametrize(("block", "share"), [(150, 1.0), (400, 1.05), (1000, 1.25)])
def test_where_streams_drift_alike_it_follows_the_pool(block: int, share: float) -> None:
    """Blocks of records of like size, as in file order: packs at the long-run mean would be 1.1 to 1.5 times worse."""
    rng = np.random.default_rng(7)
    level = np.repeat(rng.lognormal(0, 0.6, 40), block)[:4096]
    streams = level * rng.lognormal(0, 0.4, (8, 4096))
    by_policy = {}
    for policy in ("windowed", "streaming"):
        config = PlannerConfig(pack_size=8, lookahead=16, policy=policy, num_packs=512)
        by_policy[policy] = waste(np.stack([pack_costs(plan_stream(config, c), c) for c in streams]))
    assert by_policy["streaming"] < share * by_policy["windowed"]


def test_few_records_wait_long_even_without_a_bound() -> None:
    """Of those that are chosen blindly, half a pool at a time, 1 in 41 is 6 cycles old or older."""
    config = PlannerConfig(pack_size=16, lookahead=8, policy="streaming", max_age=1000)
    costs = np.random.default_rng(11).lognormal(0, 0.7, 16 * 800)
    ages = [
        number - max(0, (position - 128) // 64 + 1)
        for number, cycle in enumerate(cycles_of(config, costs))
        for pack in cycle.packs
        for position in pack
    ]
    assert np.mean(np.array(ages) >= 6) < 1 / 60


def test_no_pack_can_be_gone_to() -> None:
    with pytest.raises(ValueError, match="can't go to pack 3"):
        state_at(PlannerConfig(pack_size=2, policy="streaming"), 3)


@given(
    costs=st.lists(st.floats(0.1, 100.0), min_size=2, max_size=40),
    ages=st.lists(st.integers(0, 9), min_size=40, max_size=40),
    share=st.floats(0.1, 0.9),
    factor=st.floats(0.2, 3.0),
    phase=st.floats(0, 0.999),
)
@settings(deadline=None, max_examples=200)
def test_a_choice_has_its_size_and_all_that_is_overdue(
    costs: list[float], ages: list[int], share: float, factor: float, phase: float
) -> None:
    ascending = np.sort(np.array(costs))
    overdue = np.array(ages[: ascending.size]) == 9
    size = max(1, int(share * ascending.size), int(overdue.sum()))
    total = factor * size * float(ascending.mean())
    pull = 1.0 + np.array(ages[: ascending.size], np.float64)
    chosen, within_reach = streaming._choose(ascending, pull, overdue, size, total, phase=phase)
    assert chosen.sum() == size
    assert chosen[overdue].all()
    if within_reach and not overdue.any() and not ages[0] and len(set(ages[: ascending.size])) == 1:
        assert abs(ascending[chosen].sum() - total) <= 2 * (ascending[-1] - ascending[0])


def test_a_choice_meets_its_sum_to_a_gap_and_prefers_the_old() -> None:
    rng = np.random.default_rng(8)
    ascending = np.sort(rng.uniform(1, 2, 400))
    young = np.zeros(400, bool)
    for factor in (0.9, 1.0, 1.1):
        total = factor * 200 * float(ascending.mean())
        chosen, within_reach = streaming._choose(ascending, np.ones(400), young, 200, total, phase=0.5)
        assert within_reach
        assert abs(ascending[chosen].sum() / total - 1) < 2e-3
    old = rng.random(400) < 0.5
    chosen, _ = streaming._choose(
        ascending, np.where(old, 3.0, 1.0), young, 200, 200 * float(ascending.mean()), phase=0.5
    )
    assert chosen[old].mean() > 2.5 * chosen[~old].mean()


def test_a_choice_of_all_that_is_free() -> None:
    """Overdue records may leave as many free ones as there are places for them: all are certain."""
    overdue = np.array([True, False, False, True, False])
    chosen, _ = streaming._choose(np.arange(1.0, 6), np.ones(5), overdue, 5, 15.0, phase=0.5)
    assert chosen.all()


def test_swaps_lose_nothing_and_bring_packs_nearer() -> None:
    rng = np.random.default_rng(9)
    costs = rng.lognormal(0, 0.6, 128)
    order = rng.permutation(128)
    packs, carried = order[:64].reshape(8, 8), order[64:]
    overdue = np.zeros(128, bool)
    overdue[packs[:, 0]] = True
    levels = np.full(8, float(costs.mean()) * 8)
    after, left = streaming._swapped(costs, packs.copy(), carried.copy(), levels, overdue, rounds=2)
    assert sorted([*after.ravel().tolist(), *left.tolist()]) == list(range(128))
    assert (after[:, 0] == packs[:, 0]).all()
    before, now = (np.abs(costs[p].sum(axis=1) - levels) for p in (packs, after))
    assert (now <= before).all()
    assert now.max() < 0.1 * before.max()
    unmoved, _ = streaming._swapped(costs, packs.copy(), carried.copy(), levels, np.ones(128, bool), rounds=2)
    assert (unmoved == packs).all()  # fixed records stay, in the packs
    fixed_carry = np.zeros(128, bool)
    fixed_carry[carried[::2]] = True
    _, rest = streaming._swapped(costs, packs.copy(), carried.copy(), levels, fixed_carry, rounds=2)
    assert set(carried[::2].tolist()) <= set(rest.tolist())  # and in the carry


def test_two_packs_never_count_on_the_same_carried_record() -> None:
    costs = np.array([1.0, 5.0, 2.0, 5.0, 3.0])  # both packs want the 3 in place of their first record
    packs, carried = streaming._swapped(  # a second round would mend it
        costs, np.array([[0, 1], [2, 3]]), np.array([4]), np.full(2, 8.0), np.zeros(5, bool), rounds=1
    )
    assert (packs.tolist(), carried.tolist()) == ([[4, 1], [2, 3]], [0])


def test_the_ceiling_settles_at_the_fixed_point() -> None:
    config = PlannerConfig(pack_size=8, lookahead=32, policy="streaming")
    costs = COSTS["outliers"](np.random.default_rng(10), 8 * 1000)
    last = cycles_of(config, costs)[-2].state
    assert last.ceiling == pytest.approx(balanceable_ceiling(costs, 8), rel=0.25)
    assert last.cost_sum / last.read == pytest.approx(np.minimum(costs, last.ceiling).mean(), rel=0.1)
