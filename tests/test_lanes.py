"""Lanes: the same global batches whoever serves them, saved by so many hosts and restored by others."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bcl_grain as bcl
from benchmarks import lanes as lanes_benchmark
from tests.pipelines import DIRECT, PAD, Numbers, chain, ids, through_json
from tests.policies import EACH_POLICY, PolicyCase

LANES = 4


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def host_dataset(
    num_records: int,
    *,
    host: int,
    num_hosts: int,
    num_lanes: int = LANES,
    pack_size: int = 2,
    packs_per_step: int = 1,
    tail: Any = "drop",
    **policy: Any,
) -> Any:
    plan = bcl.plan_lanes(
        num_records,
        num_lanes=num_lanes,
        pack_size=pack_size,
        packs_per_step=packs_per_step,
        tail=tail,
    )

    def build(records: Any, lane: int) -> Any:
        del lane
        return chain(
            records.to_iter_dataset(DIRECT),
            pack_size=pack_size,
            packs_per_step=packs_per_step,
            num_packs=plan.num_packs,
            tail=tail,
            **policy,
        )

    records = grain.MapDataset.range(num_records).shuffle(seed=1)
    return bcl.serve_lanes(
        records, build, num_lanes=num_lanes, host=host, num_hosts=num_hosts, packs_per_step=packs_per_step
    )


def hosts(num_hosts: int, num_records: int, **more: Any) -> list[Any]:
    return [iter(host_dataset(num_records, host=host, num_hosts=num_hosts, **more)) for host in range(num_hosts)]


def global_steps(iterators: Iterable[Any]) -> Iterator[list[list[int]]]:
    """Yields each step's packs over all hosts as a sorted list; that hosts end together is part of the bargain."""
    for steps in zip(*iterators, strict=True):
        yield sorted(ids(pack for packs in steps for pack in packs))


def saved(iterators: Iterable[Any], directory: Path) -> None:
    for iterator in iterators:
        bcl.write_lane_states(directory, bcl.lane_states(through_json(iterator.get_state())))


def restore(iterators: Iterable[Any], num_lanes: int, directory: Path) -> None:
    for host, iterator in enumerate(iterators := list(iterators)):
        lanes = bcl.lanes_of_host(num_lanes, host=host, num_hosts=len(iterators))
        iterator.set_state(bcl.join_lane_states(bcl.read_lane_states(directory, lanes, num_lanes=num_lanes)))


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


def test_eight_hosts_save_and_four_two_sixteen_resume(tmp_path: Path) -> None:
    more: dict[str, Any] = {"num_lanes": 16, "policy": "streaming"}
    expected = list(global_steps(hosts(8, 700, **more)))
    for number, num_hosts in enumerate((4, 2, 16)):
        directory = tmp_path / f"{number}"
        directory.mkdir()
        eight = hosts(8, 700, **more)
        first = list(itertools.islice(global_steps(eight), 5))
        saved(eight, directory)
        assert len(list(directory.iterdir())) == 16
        assert max(path.stat().st_size for path in directory.iterdir()) < 1024
        others = hosts(num_hosts, 700, **more)
        restore(others, 16, directory)
        assert first + list(global_steps(others)) == expected


@pytest.mark.parametrize("prefetch", [0, 2])
def test_grains_checkpoint_assertion(prefetch: int) -> None:
    dataset = host_dataset(60, host=0, num_hosts=2, packs_per_step=2).map(lambda packs: [sorted(p) for p in packs])
    if prefetch:
        dataset = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=prefetch)
    grain.experimental.assert_equal_output_after_checkpoint(dataset)
    iterator = iter(dataset)
    next(iterator)
    assert {state["step"] for state in bcl.lane_states(iterator.get_state()).values()} == {1}
    iterator.close()


def test_lane_states_of_an_iterator_are_those_of_its_state() -> None:
    iterator = iter(host_dataset(60, host=1, num_hosts=2))
    next(iterator)
    states = iterator.get_lane_states()
    assert list(states) == [1, 3]
    assert iterator.get_state() == bcl.join_lane_states(states)
    assert bcl.lane_states(iterator.get_state()) == states
    rest = ids(pack for packs in iterator for pack in packs)
    iterator.set_lane_states(states)  # after exhaustion, too
    assert ids(pack for packs in iterator for pack in packs) == rest


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
    ("change", "message"),
    [
        ({"num_lanes": 8}, "state of lane 0 has num_lanes 8, here it is 4: a job keeps its lanes for life"),
        ({"lane": 2}, "state of lane 0 has lane 2, here it is 0"),
        ({"packs_per_step": 2}, "state of lane 0 has packs_per_step 2, here it is 1"),
        ({"version": 9}, "state of lane 0 has version 9, here it is 1"),
        ({"step": 7}, r"lanes stand at different steps \{0: 7, 2: 3\}"),
        ({"more": 7}, "not the state of a lane: expected the keys"),
        (None, r"no state for lanes \[0\], only for \[2\]"),
        ([], "not the state of a lane: .* got list"),
    ],
)
def test_states_that_do_not_fit_are_refused_and_leave_the_iterator(change: Any, message: str) -> None:
    iterator = iter(host_dataset(60, host=0, num_hosts=2))
    for _ in range(3):
        next(iterator)
    states: dict[int, Any] = iterator.get_lane_states()
    if change is None:
        del states[0]
    else:
        states[0] = {**states[0], **change} if isinstance(change, dict) else change
    before = iterator.get_state()
    with pytest.raises(ValueError, match=message):
        iterator.set_lane_states(states)
    assert iterator.get_state() == before


def test_a_state_that_one_lane_refuses_is_taken_by_none() -> None:
    iterator, other = (iter(host_dataset(60, host=0, num_hosts=2, lookahead=n)) for n in (3, 4))
    steps = [ids(next(iterator)) for _ in range(3)]
    later = iterator.get_lane_states()
    iterator.set_state(iter(host_dataset(60, host=0, num_hosts=2, lookahead=3)).get_state())
    assert ids(next(iterator)) == steps[0]
    foreign = {lane: {**state, "step": 3} for lane, state in other.get_lane_states().items()}
    with pytest.raises(ValueError, match="lookahead=4 became lookahead=3"):
        iterator.set_lane_states({0: later[0], 2: foreign[2]})
    assert [ids(next(iterator)), ids(next(iterator))] == steps[1:]


@pytest.mark.parametrize("state", [{}, {"lanes": 3}, {"next_index": 3}, None, {"lanes": {}, "more": 1}])
def test_what_is_no_state_of_lanes_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="not a state of lanes"):
        bcl.lane_states(state)


def test_files_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    iterator = iter(host_dataset(60, host=0, num_hosts=1))
    saved([iterator], tmp_path)
    with pytest.raises(ValueError, match=r"lane_0-of-8.json is missing \(lane_0-of-4.json, .*another number of lanes"):
        bcl.read_lane_states(tmp_path, range(8), num_lanes=8)
    with pytest.raises(ValueError, match=r"lane_0-of-8.json is missing \(no lanes are there\)"):
        bcl.read_lane_states(tmp_path / "nowhere", [0], num_lanes=8)
    path = tmp_path / "lane_2-of-4.json"
    text = path.read_text()
    for broken in (text[:20], "", "[" * 100_000, "\0"):
        path.write_text(broken)
        with pytest.raises(ValueError, match=r"can't read .*lane_2-of-4.json: .*Go back to an earlier checkpoint"):
            bcl.read_lane_states(tmp_path, range(4), num_lanes=4)
    path.write_text(json.dumps({"lanes": 3}))
    with pytest.raises(ValueError, match=r"not the state of a lane: .* got \['lanes'\]"):
        restore([iterator], 4, tmp_path)


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
