"""What lanes save, any number of hosts can go on with; what is no such state is refused and changes nothing."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import grain
import pytest

import bcl_grain as bcl
from tests.lane_hosts import global_steps, host_dataset, hosts, restore, saved
from tests.pipelines import ids


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
