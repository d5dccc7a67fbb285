"""Any use of a stream, in any order, against the naive model of `tests.stream_model`; and proof that it can fail.

BCL_EXAMPLES=5000 tries as many examples instead of 200.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from bcl_grain import planner, streaming
from bcl_grain.planner import PlannerConfig, PoolState
from tests.pipelines import Numbers, cost_of, ids, pipeline, through_json
from tests.stream_model import COST_FNS, Model, build

pytestmark = pytest.mark.usefixtures("silent_log")

EXAMPLES = int(os.environ.get("BCL_EXAMPLES", "200"))
FRESH_PROCESSES = 10
REPOSITORY = Path(__file__).parent.parent
DEPTHS = st.sampled_from([(0, False), (1, False), (3, True), (0, True)])


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """Returns JSON-safe descriptions of small pipelines whose settings fit together."""
    pack_size, packs_per_step = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    step = pack_size * packs_per_step
    tail = draw(st.sampled_from(["drop", "keep", "pad"]))
    records = draw(st.integers(step if tail == "drop" else 1, 48))
    num_packs = None
    if draw(st.booleans()):
        most = records // step if tail == "drop" else records // step + 3
        num_packs = draw(st.integers(1, max(1, most))) * packs_per_step
    return {
        "records": records,
        "epochs": draw(st.integers(1, 3)),
        "costs": draw(st.sampled_from([*COST_FNS])),
        "settings": {
            "pack_size": pack_size,
            "packs_per_step": packs_per_step,
            "lookahead": draw(st.integers(1, 5)),
            "policy": draw(st.sampled_from(["streaming", "streaming", "windowed", "arrival"])),
            "order": draw(st.sampled_from(["shuffled", "aligned"])),
            "tail": tail,
            "num_packs": num_packs,
            "max_age": draw(st.integers(1, 3)),
            "seed": draw(st.integers(0, 3)),
        },
    }


class StreamMachine(RuleBasedStateMachine):
    """Uses one pipeline at random; every pack and every state goes through the model."""

    saved = Bundle("saved")
    fresh_processes_left = 0  # of the class: real processes are dear

    @initialize(target=saved, spec=specs(), depth=DEPTHS)
    def start(self, spec: dict[str, Any], depth: tuple[int, bool]) -> Any:
        self.spec, self.model = spec, Model(spec)
        self.source = Numbers(spec["records"])
        self.open(depth)
        return json.dumps(self.iterator.get_state()), 0

    def open(self, depth: tuple[int, bool]) -> None:
        self.close()
        self.iterator: Any = iter(build(self.spec, self.source, prefetch=depth[0], read_ahead=depth[1]))
        self.position = 0

    def close(self) -> None:
        if hasattr(self, "iterator"):
            self.iterator.close()

    def take(self) -> bool:
        """Takes a pack, trying again where the source fails; returns whether there was one."""
        while True:
            try:
                pack = next(self.iterator)
                break
            except OSError:
                continue
            except StopIteration:
                self.model.check_end(self.position)
                return False
        self.model.check_pack(self.position, ids([pack])[0])
        self.position += 1
        return True

    @rule(count=st.integers(1, 12))
    def next(self, count: int) -> None:
        for _ in range(count):
            self.take()

    @rule()
    def exhaust(self) -> None:
        while self.take():
            pass

    @rule(target=saved)
    def save(self) -> Any:
        return json.dumps(self.iterator.get_state()), self.position

    @rule(saved=saved)
    def restore(self, saved: tuple[str, int]) -> None:
        self.set(saved)

    @rule(saved=saved, depth=DEPTHS)
    def restore_at_another_depth(self, saved: tuple[str, int], depth: tuple[int, bool]) -> None:
        self.open(depth)
        self.set(saved)

    def set(self, saved: tuple[str, int]) -> None:
        state, self.position = saved
        self.iterator.set_state(json.loads(state))
        assert json.dumps(self.iterator.get_state()) == state

    @rule(at=st.integers(0, 47))
    def fail(self, at: int) -> None:
        self.source.raises_at.add(at)

    @rule(saved=saved)
    def restore_in_a_fresh_process(self, saved: tuple[str, int]) -> None:
        if not StreamMachine.fresh_processes_left or not saved[1]:
            return
        StreamMachine.fresh_processes_left -= 1
        for offset, pack in enumerate(_in_a_fresh_process(self.spec, saved[0])):
            self.model.check_pack(saved[1] + offset, pack)

    @invariant()
    def states_are_sound(self) -> None:
        if hasattr(self, "iterator"):
            self.model.check_state(self.position, through_json(self.iterator.get_state()))

    def teardown(self) -> None:
        if hasattr(self, "iterator"):
            self.exhaust()
        self.close()


def _in_a_fresh_process(spec: dict[str, Any], state: str) -> list[list[int]]:
    """Returns what an interpreter that knows nothing but the state gives from there."""
    code = (
        "import json, sys\n"
        "from tests.pipelines import Numbers, ids\n"
        "from tests.stream_model import build\n"
        "spec, state = json.load(sys.stdin)\n"
        "iterator = iter(build(spec, Numbers(spec['records'])))\n"
        "iterator.set_state(json.loads(state))\n"
        "json.dump(ids(iterator), sys.stdout)\n"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command,
        input=json.dumps([spec, state]),
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    packs: list[list[int]] = json.loads(run.stdout)
    return packs


def test_any_use_of_a_stream_agrees_with_the_model() -> None:
    StreamMachine.fresh_processes_left = FRESH_PROCESSES
    run_state_machine_as_test(StreamMachine, settings=settings(max_examples=EXAMPLES, stateful_step_count=25))
    assert not StreamMachine.fresh_processes_left


def _ages_ignored(choose: Any) -> Any:
    def mutant(ascending: Any, pull: Any, overdue: Any, *more: Any, **keywords: Any) -> Any:
        return choose(ascending, pull, np.zeros_like(overdue), *more, **keywords)

    return mutant


def _carried_twice(plan: Any) -> Any:
    def mutant(*given: Any, **keywords: Any) -> Any:
        made, memory = plan(*given, **keywords)
        carried = made.carried.copy()
        carried[-1] = made.packs[0, 0]
        return made._replace(carried=np.sort(carried)), memory

    return mutant


def _carry_lost(plan: Any) -> Any:
    def mutant(*given: Any, **keywords: Any) -> Any:
        made, memory = plan(*given, **keywords)
        return made._replace(carried=made.carried[1:]), memory

    return mutant


def _last_record_lost(tail_packs: Any) -> Any:
    return lambda config, positions, costs, emitted: tail_packs(config, positions[:-1], costs[:-1], emitted)


def _dropped_too_late(tail_packs: Any) -> Any:
    def mutant(config: Any, positions: Any, costs: Any, emitted: int) -> Any:
        packs, dropped = tail_packs(config, positions, costs, emitted)
        return (packs[:-1], dropped) if config.tail == "keep" and len(packs) > 1 else (packs, dropped)

    return mutant


def _counted_twice(learn: Any) -> Any:
    def mutant(memory: Any, costs: Any, *, read: int, num_new: int, **keywords: Any) -> Any:
        learned = learn(memory, costs, read=read, num_new=num_new, **keywords)
        again = 0.0 if read == num_new else float(min(costs[-1], memory.ceiling))
        return learned._replace(cost_sum=learned.cost_sum + again)

    return mutant


def _mean_forgotten(from_scalars: Any) -> Any:
    return lambda scalars: dataclasses.replace(from_scalars(scalars), cost_sum=0.0)


MUTANTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "staleness: overdue records are no longer preferred": (streaming, "_choose", _ages_ignored),
    "carry: a record comes out and stays": (streaming, "plan", _carried_twice),
    "carry: a record is lost": (streaming, "plan", _carry_lost),
    "tail: the last record is lost": (planner, "_tail_packs", _last_record_lost),
    "tail: an empty pack is lost": (planner, "_tail_packs", _dropped_too_late),
    "running mean: a record counts twice": (streaming, "learn", _counted_twice),
    "running mean: forgotten by a restore": (PoolState, "from_scalars", _mean_forgotten),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_machine_finds_seeded_bugs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, mutate = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutate(getattr(owner, attribute)))
    only_search = settings(
        max_examples=1000, derandomize=True, database=None, phases=[Phase.generate], report_multiple_bugs=False
    )
    StreamMachine.fresh_processes_left = 0
    with pytest.raises((AssertionError, KeyError)):  # some, the transformation itself trips over
        run_state_machine_as_test(StreamMachine, settings=only_search)


def _often_seen(record: Any) -> float:
    return cost_of(int(record) % 1000)


def test_the_largest_state_of_the_recommended_size_is_small() -> None:
    """Pack 64, lookahead 32: at most 4 KiB, also where records wait as long as they may."""
    config = PlannerConfig(pack_size=64, lookahead=32, policy="streaming")
    longest = config.pool_records + config.max_age * config.pool_records // 2
    iterator = iter(
        pipeline(longest + 4 * config.pool_records, policy="streaming", pack_size=64, lookahead=32, cost_fn=_often_seen)
    )
    # No stream has to make every record wait: the bitmap is put in at its longest.
    while (state := iterator.get_state())["first"] == 0 and next(iterator, None):
        pass
    bitmap = base64.b64encode(bytes(longest // 8)).decode()
    assert len(state["live"]) <= len(bitmap)
    large = {
        **state,
        "cost_sum": 1.2345678901234567e16,
        "ceiling": 1.2345678901234567e16,
        "read": 10**9,
        "first": 10**9,
    }
    assert len(json.dumps({**large, "parent": {"next_index": 10**9}, "live": bitmap})) <= 4096
