"""Settings and their errors, and how a stream ends: the tail, and a given number of packs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from bcl_grain.planner import FILLER, PlannerConfig, initial_state, plan_cycle, records_wanted
from bcl_grain.simulate import plan_stream
from tests.policies import EACH_POLICY, EACH_STEP_WIDTH, EACH_TAIL, PolicyCase

PACK_SIZE = 3


def stream_costs(n: int) -> Any:
    return np.random.default_rng(n).lognormal(0, 1, n)


@EACH_POLICY
@EACH_TAIL
@EACH_STEP_WIDTH
def test_num_packs_and_the_tail(policy: PolicyCase, tail: Any, packs_per_step: int) -> None:
    """Streams with too few records, just enough, and too many, for one step and for several cycles."""
    step = PACK_SIZE * packs_per_step
    for steps, num_records in itertools.product((1, 3, 5), (0, 1, step - 1, step, step + 1, 4 * step - 1, 9 * step)):
        num_packs = steps * packs_per_step
        config = policy.config(
            pack_size=PACK_SIZE, packs_per_step=packs_per_step, lookahead=2, tail=tail, num_packs=num_packs
        )
        costs = stream_costs(num_records)
        needed = num_packs * PACK_SIZE
        if tail == "drop" and num_records < needed:
            message = f"the stream ended after {num_records} records, but {needed} are needed .*or a smaller"
            with pytest.raises(ValueError, match=message):
                plan_stream(config, costs)
            continue
        packs = plan_stream(config, costs)
        assert len(packs) == num_packs
        real = [[p for p in pack if p != FILLER] for pack in packs]
        assert sorted(p for pack in real for p in pack) == list(range(min(num_records, needed)))
        if tail == "keep":
            assert packs == real
        else:
            assert all(len(pack) == PACK_SIZE for pack in packs)
        in_steps = [
            sum(len(pack) for pack in real[i : i + packs_per_step]) for i in range(0, num_packs, packs_per_step)
        ]
        assert in_steps == sorted(in_steps, reverse=True)  # what is short comes last
        assert sum(0 < records < step for records in in_steps) <= 1


@EACH_POLICY
@EACH_TAIL
@EACH_STEP_WIDTH
@pytest.mark.parametrize("num_records", [49, 50, 51, 53, 72, 73])
def test_ranks_whose_shards_differ_by_a_record_have_the_same_steps(
    policy: PolicyCase, tail: Any, packs_per_step: int, num_records: int
) -> None:
    shards = [num_records // 2 + (rank < num_records % 2) for rank in range(2)]
    step = PACK_SIZE * packs_per_step
    steps = min(shards) // step if tail == "drop" else -(-max(shards) // step)
    config = policy.config(
        pack_size=PACK_SIZE, packs_per_step=packs_per_step, lookahead=2, tail=tail, num_packs=steps * packs_per_step
    )
    plans = [plan_stream(config, stream_costs(n)) for n in shards]
    assert [len(packs) for packs in plans] == [steps * packs_per_step] * 2
    for packs, n in zip(plans, shards, strict=True):
        records = sum(p != FILLER for pack in packs for p in pack)
        assert records == (steps * step if tail == "drop" else n)


@EACH_POLICY
def test_a_short_last_step_is_shared_among_the_devices(policy: PolicyCase) -> None:
    """Neither may one device get everything; two packs of 4 places for 5 records of equal cost take 3 and 2."""
    for tail, filled in (("keep", [2, 3]), ("pad", [4, 4])):
        config = policy.config(pack_size=4, packs_per_step=2, lookahead=2, tail=tail)
        packs = plan_stream(config, [1.0] * 13)
        assert sorted(len(pack) for pack in packs[2:]) == filled
        assert sorted(sum(p != FILLER for p in pack) for pack in packs[2:]) == [2, 3]


@EACH_POLICY
def test_dropped_arrivals_are_counted(policy: PolicyCase) -> None:
    config = policy.config(pack_size=3, packs_per_step=2, lookahead=2)
    state = initial_state(config)
    costs = stream_costs(17)
    packs, dropped, final = [], 0, False
    while not final:
        new_costs = costs[state.read : state.read + records_wanted(config, state)]
        final = new_costs.size < records_wanted(config, state)
        cycle = plan_cycle(config, state, new_costs, final=final)
        packs += cycle.packs
        dropped += cycle.dropped
        state = cycle.state
    assert (len(packs), dropped) == (4, 5)
    assert state.emitted == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pack_size": 0}, "pack_size must be an integer of at least 1, got 0"),
        ({"pack_size": -4}, "pack_size must be an integer of at least 1, got -4"),
        ({"pack_size": 2.0}, r"pack_size must be an integer of at least 1, got 2\.0"),
        ({"pack_size": "8"}, "pack_size must be an integer of at least 1, got '8'"),
        ({"pack_size": True}, "pack_size must be an integer of at least 1, got True"),
        ({"pack_size": None}, "pack_size must be an integer of at least 1, got None"),
        ({"packs_per_step": 0}, "packs_per_step must be an integer of at least 1, got 0"),
        ({"lookahead": 0}, "lookahead must be an integer of at least 1, got 0"),
        ({"lookahead": float("nan")}, "lookahead must be an integer of at least 1, got nan"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"seed": None}, "seed must be an integer of at least 0, got None"),
        ({"num_packs": 0}, "num_packs must be an integer of at least 1, got 0"),
        ({"num_packs": 1.5}, r"num_packs must be an integer of at least 1, got 1\.5"),
        ({"num_packs": 9, "packs_per_step": 2}, "num_packs 9 is not a multiple of packs_per_step 2: the last step"),
        ({"policy": "random"}, r"policy must be one of \('arrival', 'windowed'.*\), got 'random'"),
        ({"order": None}, r"order must be one of \('shuffled', 'aligned'\), got None"),
        ({"tail": "truncate"}, r"tail must be one of \('drop', 'keep', 'pad'\), got 'truncate'"),
    ],
)
def test_a_bad_setting_is_an_error_that_shows_it(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlannerConfig(**{"pack_size": 4, **change})


def test_settings_are_by_keyword() -> None:
    with pytest.raises(TypeError):
        PlannerConfig(8)  # type: ignore[call-arg]


def test_numpy_integers_become_plain_ones() -> None:
    settings = {"pack_size": 8, "packs_per_step": 2, "lookahead": 4, "seed": 3, "num_packs": 6}
    config = PlannerConfig(**{name: np.int64(value) for name, value in settings.items()})  # type: ignore[arg-type]
    assert config == PlannerConfig(**settings)  # type: ignore[arg-type]
    assert all(type(getattr(config, name)) is int for name in settings)
    assert config.describe() == PlannerConfig(**settings).describe()  # type: ignore[arg-type]


def test_derived_sizes() -> None:
    config = PlannerConfig(pack_size=8, packs_per_step=2, lookahead=4)
    assert config.step_records == 16
    assert config.pool_records == 64


def test_the_description_tells_any_two_settings_apart() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"pack_size": 5},
        {"packs_per_step": 2},
        {"lookahead": 31},
        {"policy": "arrival"},
        {"order": "shuffled"},
        {"tail": "pad"},
        {"num_packs": 10},
        {"seed": 1},
    ]
    assert len({PlannerConfig(**{"pack_size": 4, **change}).describe() for change in changes}) == len(changes)
