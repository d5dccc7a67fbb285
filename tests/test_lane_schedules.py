"""Random schedules of resizes and kills over lanes: no record is lost or repeated, and every step stays what it was.

BCL_EXAMPLES=2000 tries as many schedules instead of 100.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import bcl_grain as bcl
from bcl_grain import lanes
from tests.lane_hosts import divisors, global_steps, hosts
from tests.pipelines import PAD

pytestmark = pytest.mark.usefixtures("silent_log")

SCHEDULES = int(os.environ.get("BCL_EXAMPLES", "100"))


class JobMachine(RuleBasedStateMachine):
    """One job on changing hosts. Its checkpoints are a JSON text a lane, and may be incomplete."""

    @initialize(
        num_lanes=st.sampled_from([2, 4, 6, 12]),
        settings=st.fixed_dictionaries(
            {
                "policy": st.sampled_from(["streaming", "windowed", "arrival"]),
                "packs_per_step": st.sampled_from([1, 2]),
                "tail": st.sampled_from(["drop", "keep", "pad"]),
                "lookahead": st.integers(1, 4),
                "max_age": st.integers(1, 3),
            }
        ),
        records_per_lane=st.integers(4, 30),
        rest=st.integers(0, 11),
        size=st.integers(0, 5),
    )
    def start(self, num_lanes: int, settings: dict[str, Any], records_per_lane: int, rest: int, size: int) -> None:
        self.num_lanes, self.num_records = num_lanes, num_lanes * records_per_lane + rest
        self.settings = {**settings, "num_lanes": num_lanes}
        self.batches = list(global_steps(hosts(1, self.num_records, **self.settings)))
        self.check_records()
        self.checkpoints: list[tuple[int, dict[int, str]]] = []  # (step, state by lane), the newest last
        self.begin(size)

    def check_records(self) -> None:
        """The undisturbed run itself: every record once, but for those that fill no step, and steps of one size."""
        seen = [record for packs in self.batches for pack in packs for record in pack if record != PAD]
        assert len(set(seen)) == len(seen)
        step = self.num_lanes * self.settings["packs_per_step"] * 2
        whole, left_over = divmod(self.num_records, step)
        assert len(seen) == (whole * step if self.settings["tail"] == "drop" else self.num_records)
        assert len(self.batches) == whole + (self.settings["tail"] != "drop" and left_over > 0)

    def begin(self, size: int) -> None:
        sizes = divisors(self.num_lanes)
        self.hosts = hosts(sizes[size % len(sizes)], self.num_records, **self.settings)
        self.step = 0

    @rule(count=st.integers(1, 5))
    def train(self, count: int) -> None:
        for batch in self.batches[self.step :][:count]:
            assert next(global_steps(self.hosts)) == batch
            self.step += 1

    def written(self) -> Iterator[tuple[int, str]]:
        """Yields each lane's file as its host writes it."""
        for host in self.hosts:
            for lane, state in bcl.lane_states(host.get_state()).items():
                yield lane, json.dumps(state)

    @rule()
    def save(self) -> None:
        self.checkpoints.append((self.step, dict(self.written())))

    @rule(size=st.integers(0, 5), files=st.integers(0, 11))
    def killed_while_saving(self, size: int, files: int) -> None:
        self.checkpoints.append((self.step, dict(list(self.written())[: files % self.num_lanes])))
        self.resume(size)

    @rule(size=st.integers(0, 5), unequal=st.lists(st.integers(0, 2), min_size=12, max_size=12))
    def killed(self, size: int, unequal: list[int]) -> None:
        """Hosts have come differently far; what they gave since the checkpoint counts for nothing."""
        for host, more in zip(self.hosts, unequal, strict=False):
            for _ in range(more):
                next(host, None)
        self.resume(size)

    @rule(size=st.integers(0, 5))
    def resize(self, size: int) -> None:
        self.save()
        self.resume(size)

    def resume(self, size: int) -> None:
        """Starts on other hosts, from the newest checkpoint that has all lanes."""
        self.begin(size)
        while self.checkpoints:
            step, files = self.checkpoints[-1]
            states = {lane: json.loads(text) for lane, text in files.items()}
            if len(files) == self.num_lanes:
                for host in self.hosts:
                    host.set_lane_states(states)
                self.step = step
                return
            for host in self.hosts:
                if not bcl.lane_states(host.get_state()).keys() <= states.keys():
                    with pytest.raises(ValueError, match="no state for lanes"):
                        host.set_lane_states(states)
            self.checkpoints.pop()
            self.begin(size)

    def teardown(self) -> None:
        if hasattr(self, "hosts"):
            assert list(global_steps(self.hosts)) == self.batches[self.step :]


def test_any_schedule_of_resizes_and_kills_gives_the_undisturbed_steps() -> None:
    run_state_machine_as_test(JobMachine, settings=settings(max_examples=SCHEDULES, stateful_step_count=12))


def _each_host_serves_the_first_lanes(lanes_of_host: Any) -> Any:
    return lambda num_lanes, *, host, num_hosts: lanes_of_host(num_lanes, host=0, num_hosts=num_hosts)


def _lanes_by_blocks_of_the_first_size(lanes_of_host: Any) -> Any:
    def mutant(num_lanes: int, *, host: int, num_hosts: int) -> tuple[int, ...]:
        first = host * (num_lanes // num_hosts)
        return tuple(lane % num_lanes for lane in range(first, first + num_lanes // num_hosts - (first > 0)))

    return mutant


def _states_go_to_the_next_lane(set_states: Any) -> Any:
    def mutant(self: Any, states: dict[int, Any]) -> None:
        order = list(states)
        set_states(self, {lane: states[other] for lane, other in zip(order, order[1:] + order[:1], strict=True)})

    return mutant


MUTANTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "lane mapping: hosts share lanes": (lanes, "lanes_of_host", _each_host_serves_the_first_lanes),
    "lane mapping: a lane has no host": (lanes, "lanes_of_host", _lanes_by_blocks_of_the_first_size),
    "lane mapping: states go to the next lane": (lanes.LanesIterator, "_set_states", _states_go_to_the_next_lane),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_schedules_find_seeded_bugs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, mutate = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutate(getattr(owner, attribute)))
    only_search = settings(
        max_examples=300, derandomize=True, database=None, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises((AssertionError, ValueError)):
        run_state_machine_as_test(JobMachine, settings=only_search)
