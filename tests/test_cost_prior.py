from __future__ import annotations

import math
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bcl_grain as bcl
from bcl_grain.cost_prior import EXACT_RECORDS, CostPrior, balanceable_ceiling, estimate_cost_prior


@given(costs=st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=60), pack_size=st.integers(1, 16))
@settings(deadline=None)
def test_the_ceiling_is_its_own_fixed_point(costs: list[float], pack_size: int) -> None:
    ceiling = balanceable_ceiling(costs, pack_size)
    quarter = max(1, len(costs) // 4)
    low = sum(sorted(costs)[:quarter]) / quarter
    again = pack_size * float(np.minimum(costs, ceiling).mean()) - (pack_size - 1) * low
    # 64 iterations come near even where the iteration hardly contracts.
    assert ceiling >= min(costs)
    assert again <= ceiling * (1 + 1e-6) or ceiling == min(costs)
    assert again >= 0.9 * ceiling or ceiling == min(costs)


def test_the_ceiling_parts_what_can_be_balanced_from_what_can_not() -> None:
    """Packs of 8 cost 12; with an outlier of 50 in it, a pack costs more, whatever joins it."""
    costs = [1.0, 2.0] * 198 + [50.0] * 4
    ceiling = balanceable_ceiling(costs, 8)
    assert 2 < ceiling < 6
    assert balanceable_ceiling(costs, 64) > 30  # a pack of 64 has room for more


def test_a_look_at_every_record_is_exact() -> None:
    costs = np.random.default_rng(0).lognormal(0, 1, 500)
    prior = estimate_cost_prior(costs.tolist(), float, pack_size=64, num_records=500)
    assert prior.records == EXACT_RECORDS
    assert prior.ceiling == balanceable_ceiling(costs, 64)
    assert prior.mean == pytest.approx(np.minimum(costs, prior.ceiling).mean(), rel=1e-12)


def test_a_sample_is_alike_everywhere_and_as_good_as_it_says() -> None:
    costs = np.random.default_rng(1).uniform(1, 3, 2000)
    estimate = [estimate_cost_prior(costs.tolist(), float, pack_size=64, num_records=500, seed=s) for s in range(200)]
    assert estimate[3] == estimate_cost_prior(costs.tolist(), float, pack_size=64, num_records=500, seed=3)
    assert estimate[0].records == 666  # without replacement: more than 500 independent ones
    errors = np.array([prior.mean for prior in estimate]) - costs.mean()
    assert errors.std() == pytest.approx(costs.std() / math.sqrt(500 / 0.75), rel=0.2)
    assert abs(errors.mean()) < 4 * errors.std() / math.sqrt(200)


def test_it_reads_a_map_dataset_and_leaves_filtered_records_out() -> None:
    source = grain.MapDataset.source(list(range(1, 101))).filter(lambda x: x % 2 == 0)
    prior = estimate_cost_prior(source, float, pack_size=200)
    assert prior.mean == pytest.approx(51.0)
    with pytest.raises(ValueError, match="none of the 100 records"):
        estimate_cost_prior(source.filter(lambda x: False), float, pack_size=2)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"mean": 0.0, "records": 1}, "mean of a cost prior"),
        ({"mean": math.inf, "records": 1}, "mean of a cost prior"),
        ({"mean": 1.0, "records": 0}, "an integer of at least 1, got 0"),
        ({"mean": 2.0, "records": 1, "ceiling": 1.0}, "ceiling of a cost prior"),
        ({"mean": 2.0, "records": 1, "ceiling": math.nan}, "ceiling of a cost prior"),
    ],
)
def test_a_prior_out_of_range_is_refused(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostPrior(**settings_)


def test_nothing_to_look_at_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0 records"):
        estimate_cost_prior([], float, pack_size=2)
    with pytest.raises(ValueError, match="num_records must be an integer of at least 1, got 0"):
        estimate_cost_prior([1.0], float, pack_size=2, num_records=0)
    with pytest.raises(ValueError, match="cost of record 0"):
        estimate_cost_prior([-1.0], float, pack_size=2)


def test_the_pipeline_takes_it_and_a_checkpoint_names_it() -> None:
    costs = np.random.default_rng(2).lognormal(0, 1, 600).tolist()
    records = grain.MapDataset.source(costs)
    prior = estimate_cost_prior(records, float, pack_size=4)
    direct = records.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))

    def packs(prior: CostPrior | None) -> Any:
        return iter(
            direct.pipe(
                bcl.BatchCostLookaheadIterDataset,
                pack_size=4,
                lookahead=8,
                policy="streaming",
                prior=prior,
                cost_fn=float,
            )
        )

    with_prior, without = packs(prior), packs(None)
    assert [next(with_prior) for _ in range(20)] != [next(without) for _ in range(20)]
    with pytest.raises(ValueError, match=r"prior=CostPrior\S+ became prior=None|prior"):
        without.set_state(with_prior.get_state())


def test_the_state_of_a_large_pool_is_small() -> None:
    import json

    records = grain.MapDataset.source(np.random.default_rng(3).lognormal(0, 1, 64 * 400).tolist())
    direct = records.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    packs = iter(
        direct.pipe(
            bcl.BatchCostLookaheadIterDataset,
            pack_size=64,
            lookahead=32,
            policy="streaming",
            cost_fn=float,
            prior=CostPrior(mean=1.7, records=10**9, ceiling=1e3),
        )
    )
    sizes = []
    for _ in range(400):
        next(packs)
        state = packs.get_state()
        sizes.append(len(json.dumps({key: value for key, value in state.items() if key != "parent"})))
    assert max(sizes) <= 4096
