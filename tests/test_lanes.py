"""Lanes: the same global batches whoever serves them, saved by so many hosts and restored by others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bcl_grain as bcl
from benchmarks import lanes as lanes_benchmark
from tests.lane_hosts import LANES, divisors, global_steps, host_dataset, hosts, restore, saved
from tests.pipelines import DIRECT, PAD, Numbers, chain, ids
from tests.policies import EACH_POLICY, PolicyCase


@pytest.mark.parametrize(("num_lanes", "num_hosts"), [(1, 1), (4, 4), (4, 2), (12, 3), (6, 1)])
def test_every_lane_has_one_host(num_lanes: int, num_hosts: int) -> None:
    served = [bcl.lanes_of_host(num_lanes, host=host, num_hosts=num_hosts) for host in range(num_hosts)]
    assert sorted(lane for lanes in served for lane in lanes) == list(range(num_lanes))
    assert {len(lanes) for lanes in served} == {num_lanes // num_hosts}


def test_a_count_of_hosts_that_does_not_work_names_those_that_do() -> None:
    with pytest.raises(ValueError, match="16 hosts can't share 12 lanes evenly: run on one of 1, 2, 3, 4, 6, 12 hosts"):
        bcl.lanes_of_host(12, host=0, num_hosts=16)
    with pytest.raises(ValueError, match="host must be below num_hosts 2, got 2"):
        bcl.lanes_of_host(4, host=2, num_hosts=2)


@given(
    num_records=st.integers(1, 200),
    num_lanes=st.integers(1, 6),
    pack_size=st.integers(1, 5),
    packs_per_step=st.integers(1, 3),
    tail=st.sampled_from(["drop", "keep", "pad"]),
)
def test_a_plan_accounts_for_every_record(
    num_records: int, num_lanes: int, pack_size: int, packs_per_step: int, tail: Any
) -> None:
    global_batch = num_lanes * pack_size * packs_per_step
    if tail == "drop" and num_records < global_batch:
        with pytest.raises(ValueError, match=f"{num_records} records don't fill one step of {global_batch}"):
            bcl.plan_lanes(num_records, num_lanes=num_lanes, pack_size=pack_size, packs_per_step=packs_per_step)
        return
    plan = bcl.plan_lanes(
        num_records, num_lanes=num_lanes, pack_size=pack_size, packs_per_step=packs_per_step, tail=tail
    )
    assert plan.num_packs == plan.steps * packs_per_step
    assert plan.steps * global_batch + plan.num_unused - plan.num_missing == num_records
    assert 0 <= plan.num_unused < global_batch
    assert 0 <= plan.num_missing < global_batch
    assert plan.num_missing == 0 if tail == "drop" else plan.num_unused == 0
    for lane in range(num_lanes):  # each has, or lacks at the end, what its share of the step needs
        share = len(range(lane, num_records, num_lanes))
        needed = plan.num_packs * pack_size
        assert share >= needed if tail == "drop" else needed >= share


@EACH_POLICY
@pytest.mark.parametrize("tail", ["drop", "keep", "pad"])
@pytest.mark.parametrize("packs_per_step", [1, 3])
def test_global_batches_do_not_depend_on_the_number_of_hosts(
    policy: PolicyCase, tail: Any, packs_per_step: int
) -> None:
    settings: dict[str, Any] = {"tail": tail, "packs_per_step": packs_per_step, **policy.settings}
    plan = bcl.plan_lanes(
        101,
        num_lanes=LANES,
        pack_size=2,
        packs_per_step=packs_per_step,
        tail=tail,
    )
    batches = [list(global_steps(hosts(n, 101, **settings))) for n in divisors(LANES)]
    assert all(other == batches[0] for other in batches)
    assert len(batches[0]) == plan.steps
    records = [record for packs in batches[0] for pack in packs for record in pack if record != PAD]
    assert len(set(records)) == len(records) == 101 - plan.num_unused
    assert sum(len(pack) for packs in batches[0] for pack in packs) - len(records) == (
        plan.num_missing if tail == "pad" else 0
    )


@settings(max_examples=40)
@given(
    num_lanes=st.sampled_from([1, 2, 4, 6, 12]),
    policy=st.sampled_from(["arrival", "windowed", "streaming"]),
    tail=st.sampled_from(["drop", "pad"]),
    records_per_lane=st.integers(4, 16),
    rest=st.integers(0, 5),
    schedule=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=5),
)
def test_any_schedule_of_resizes_gives_the_undisturbed_batches(
    num_lanes: int,
    policy: str,
    tail: str,
    records_per_lane: int,
    rest: int,
    schedule: list[tuple[int, int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    more: dict[str, Any] = {"num_lanes": num_lanes, "policy": policy, "tail": tail}
    num_records = num_lanes * records_per_lane + rest
    expected = list(global_steps(hosts(1, num_records, **more)))
    counts = divisors(num_lanes)
    iterators, batches = hosts(counts[-1], num_records, **more), []
    for steps, choice in schedule:
        batches += list(itertools.islice(global_steps(iterators), steps))
        directory = tmp_path_factory.mktemp("checkpoint")
        saved(iterators, directory)
        iterators = hosts(counts[choice % len(counts)], num_records, **more)
        restore(iterators, num_lanes, directory)
    assert batches + list(global_steps(iterators)) == expected


def test_a_step_can_be_gone_to_by_its_index() -> None:
    dataset = host_dataset(60, host=0, num_hosts=2, packs_per_step=2, policy="windowed")
    steps = [ids(packs) for packs in dataset]
    iterator = iter(dataset)
    grain.experimental.set_next_index(iterator, 2)
    assert grain.experimental.get_next_index(iterator) == 2
    assert [ids(packs) for packs in iterator] == steps[2:]
    assert grain.experimental.get_next_index(iterator) == len(steps)


def test_a_lane_whose_source_raises_can_be_tried_again() -> None:
    def lanes(raises_at: Iterable[int] = ()) -> Any:
        def lane(number: int) -> Any:
            source = Numbers(24, raises_at if number == 1 else ())
            return chain(grain.MapDataset.source(source).to_iter_dataset(DIRECT), num_packs=12)

        return iter(bcl.LanesIterDataset({0: lane(0), 1: lane(1)}, num_lanes=2))

    expected = [ids(packs) for packs in lanes()]
    iterator = lanes({0, 7, 13})
    steps, errors = [], 0
    while True:
        before = iterator.get_state()
        try:
            steps.append(ids(next(iterator)))
        except OSError:
            errors += 1
            assert iterator.get_state() == before  # as of the last whole step, lane 0's pack not lost
        except StopIteration:
            break
    assert (steps, errors) == (expected, 3)


def test_a_lane_that_ends_early_is_filled_up_or_named() -> None:
    """An upstream filter leaves one lane with less than a plan from the record count expects."""

    def lanes(tail: str, num_packs: int | None) -> Any:
        def lane(number: int) -> Any:
            records = grain.MapDataset.range(24).to_iter_dataset(DIRECT)
            kept = records.filter(lambda record: number == 0 or record < 9)
            return chain(kept, tail=tail, num_packs=num_packs)

        return bcl.LanesIterDataset({0: lane(0), 1: lane(1)}, num_lanes=2)

    padded = [ids(packs) for packs in lanes("pad", 12)]
    assert len(padded) == 12
    assert sorted(record for packs in padded for record in packs[1]) == [PAD] * 15 + list(range(9))
    kept = [ids(packs) for packs in lanes("keep", 12)]
    assert [len(packs[1]) for packs in kept] == [2, 2, 2, 2, 1] + [0] * 7
    with pytest.raises(ValueError, match="the stream ended after 9 records, but 24 are needed"):
        list(lanes("drop", 12))
    with pytest.raises(ValueError, match=r"lanes \[1\] ended in step 5 with \[0\] of 1 packs, while other lanes have"):
        list(lanes("keep", None))
    iterator = iter(lanes("keep", None))
    for _ in range(5):
        next(iterator)
    for _ in range(2):  # it stays so, and nothing is lost
        with pytest.raises(ValueError, match=r"lanes \[1\] ended in step 5"):
            next(iterator)
    assert {state["step"] for state in iterator.get_lane_states().values()} == {5}


def test_lanes_that_end_within_a_step_are_an_error() -> None:
    lanes = {0: grain.MapDataset.range(3).to_iter_dataset(), 1: grain.MapDataset.range(3).to_iter_dataset()}
    with pytest.raises(ValueError, match=r"lanes \[0, 1\] ended in step 1 with \[1, 1\] of 2 packs"):
        list(bcl.LanesIterDataset(lanes, num_lanes=2, packs_per_step=2))


def test_multiprocess_prefetch_behind_lanes_is_refused() -> None:
    with pytest.raises(ValueError, match="mp_prefetch can't stand behind lanes"):
        host_dataset(60, host=0, num_hosts=1).set_slice(slice(0, None, 2))


@pytest.mark.parametrize(
    ("given_lanes", "num_lanes", "packs_per_step", "message"),
    [
        ((), 4, 1, "lanes is empty"),
        ((4,), 4, 1, "lane 4 is not below num_lanes 4"),
        ((-1,), 4, 1, "a lane must be an integer of at least 0, got -1"),
        ((0,), 0, 1, "num_lanes must be an integer of at least 1, got 0"),
        ((0,), 4, 0, "packs_per_step must be an integer of at least 1, got 0"),
        ((0,), 4, 1.5, "packs_per_step must be an integer of at least 1, got 1.5"),
    ],
)
def test_bad_settings_are_errors(given_lanes: Any, num_lanes: int, packs_per_step: Any, message: str) -> None:
    lanes = {lane: grain.MapDataset.range(3).to_iter_dataset() for lane in given_lanes}
    with pytest.raises(ValueError, match=message):
        bcl.LanesIterDataset(lanes, num_lanes=num_lanes, packs_per_step=packs_per_step)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_records": 0}, "num_records must be an integer of at least 1, got 0"),
        ({"num_lanes": True}, "num_lanes must be an integer of at least 1, got True"),
        ({"pack_size": "2"}, "pack_size must be an integer of at least 1, got '2'"),
        ({"tail": "cut"}, "tail must be one of .*, got 'cut'"),
    ],
)
def test_a_plan_of_bad_numbers_is_an_error(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"num_records": 100, "num_lanes": 4, "pack_size": 2}
    with pytest.raises(ValueError, match=message):
        bcl.plan_lanes(**{**good, **change})


def test_no_plan_splits_a_record() -> None:
    """Two ranks, two steps of packs of 2: (9 1 | 1 1) and (1 1 | 1 1) last 10 + 2, the work shared evenly 8."""
    costs = np.array([1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0])
    assert lanes_benchmark.least_waste(costs, ranks=2, pack_size=2) == pytest.approx(12 / 8 - 1)
    assert lanes_benchmark.least_waste(np.ones(8), ranks=2, pack_size=2) == 0


def test_many_lanes_cost_what_their_small_pools_lose() -> None:
    """The benchmark behind docs/elastic.md, small: the same records each time, and never better with more lanes."""
    (by_policy,) = lanes_benchmark.run(8, 20, ["medquad"], shapes=((16, 8),)).values()
    bound = by_policy.pop("no plan below")["any"]
    assert bound == 0  # few records are so dear that the work can't be shared evenly
    for wastes in by_policy.values():
        assert list(wastes) == ["1", "2", "4", "8"]
        assert wastes["1"] < wastes["2"] < wastes["8"]
