"""Checkpoints: exact from every position, one state for each, lazy, small, JSON, and wary of foreign ones."""

from __future__ import annotations

import base64
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcl_grain.costs import token_cost
from bcl_grain.layouts import BucketedLayout, Layout, PaddedLayout, RowPackedLayout, RowPackedOneShapeLayout
from tests.pipelines import DIRECT, Numbers, chain, ids, pipeline, through_json
from tests.policies import EACH_POLICY, EACH_RANDOM_ACCESS_POLICY, EACH_STEP_WIDTH, EACH_TAIL, POLICIES, PolicyCase

NUM_RECORDS = 41
LAYOUTS: dict[str, Layout] = {
    "row-packed": RowPackedLayout(length=8, rows_per_chunk=2),
    "one-shape": RowPackedOneShapeLayout(rows=3, length=8),
    "bucketed": BucketedLayout(lengths=(4, 8), tokens_per_chunk=8),
    "padded": PaddedLayout(pack_size=3, length=8),
}
EACH_PREFETCH = pytest.mark.parametrize("prefetch", [0, 3], ids=["direct", "thread-prefetch"])
REPOSITORY = Path(__file__).parent.parent


def with_prefetch(dataset: Any, buffer_size: int) -> Any:
    if not buffer_size:
        return dataset
    return grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=buffer_size)


def states_and_packs(dataset: Any) -> tuple[list[Any], list[list[int]]]:
    """Returns the state before each pack and at the end, and the packs."""
    iterator = iter(dataset)
    states, packs = [], []
    while True:
        states.append(iterator.get_state())
        try:
            packs.append([int(record) for record in next(iterator)])
        except StopIteration:
            return states, packs


@EACH_POLICY
@EACH_TAIL
@EACH_STEP_WIDTH
@EACH_PREFETCH
def test_grains_checkpoint_assertion(policy: PolicyCase, tail: str, packs_per_step: int, prefetch: int) -> None:
    dataset = pipeline(NUM_RECORDS, pack_size=3, packs_per_step=packs_per_step, tail=tail, **policy.settings)
    grain.experimental.assert_equal_output_after_checkpoint(with_prefetch(dataset, prefetch))


@EACH_POLICY
@EACH_TAIL
@EACH_PREFETCH
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_grains_checkpoint_assertion_after_a_layout(
    policy: PolicyCase, tail: str, prefetch: int, layout: Layout
) -> None:
    records = [{"tokens": np.arange(1, 2 + n % 7), "loss_mask": np.ones(1 + n % 7)} for n in range(14)]
    pad_record = {"tokens": np.zeros(1, np.int64), "loss_mask": np.zeros(1)}
    parent = grain.MapDataset.source(records).to_iter_dataset(DIRECT)
    more: dict[str, Any] = {"pad_record": pad_record} if tail == "pad" else {}
    dataset = chain(parent, pack_size=3, tail=tail, cost_fn=token_cost(), **more, **policy.settings)
    grain.experimental.assert_equal_output_after_checkpoint(with_prefetch(dataset.map(layout), prefetch))


@EACH_POLICY
@EACH_TAIL
@EACH_STEP_WIDTH
@pytest.mark.parametrize("num_packs", [None, 6, 18])
def test_a_position_has_one_state(policy: PolicyCase, tail: str, packs_per_step: int, num_packs: int | None) -> None:
    """Whichever way an iterator came to a position, from whichever checkpoint, its state there is the same."""
    if tail == "drop" and num_packs == 18:
        num_packs = 12
    dataset = pipeline(
        NUM_RECORDS, pack_size=3, packs_per_step=packs_per_step, tail=tail, num_packs=num_packs, **policy.settings
    )
    states, packs = states_and_packs(dataset)
    assert len({json.dumps(state) for state in states}) == len(states)
    used = iter(dataset)
    for start, state in enumerate(states):
        used.set_state(through_json(state))
        used.set_state(through_json(state))
        for position in range(start, len(packs)):
            assert used.get_state() == states[position]
            assert ids([next(used)]) == [packs[position]]
        for _ in range(2):
            assert used.get_state() == states[-1]
            with pytest.raises(StopIteration):
                next(used)


@EACH_POLICY
def test_a_state_goes_into_an_iterator_in_the_middle_of_a_cycle(policy: PolicyCase) -> None:
    dataset = pipeline(NUM_RECORDS, lookahead=5, **policy.settings)
    states, packs = states_and_packs(dataset)
    for there in range(len(states)):
        iterator = iter(dataset)
        for _ in range(there):
            next(iterator)
        for back in (0, 4, 5, 7, len(packs) - 1, len(packs)):
            iterator.set_state(through_json(states[back]))
            assert ids([pack for pack, _ in zip(iterator, range(3), strict=False)]) == packs[back : back + 3]


def test_states_survive_json_and_a_fresh_process() -> None:
    """One process restores all states of all policies and says what comes next."""
    jobs, expected = [], []
    for name, case in POLICIES.items():
        for tail in ("drop", "keep", "pad"):
            options = {"pack_size": 3, "packs_per_step": 2, "tail": tail}
            states, packs = states_and_packs(pipeline(NUM_RECORDS, **options, **case.settings))
            jobs += [{"policy": name, "options": options, "state": state} for state in states]
            expected += [packs[i:] for i in range(len(states))]
    code = (
        "import json, sys\n"
        "from tests.pipelines import ids, pipeline\n"
        "from tests.policies import POLICIES\n"
        "answers = []\n"
        "for job in json.load(sys.stdin):\n"
        f"    dataset = pipeline({NUM_RECORDS}, **job['options'], **POLICIES[job['policy']].settings)\n"
        "    iterator = iter(dataset)\n"
        "    iterator.set_state(job['state'])\n"
        "    answers.append(ids(iterator))\n"
        "json.dump(answers, sys.stdout)\n"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, input=json.dumps(jobs), capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == expected


@EACH_POLICY
def test_states_are_small(policy: PolicyCase) -> None:
    """At most 1 KiB, the parent's state and a bit for each record that waits aside."""
    options: dict[str, Any] = {"pack_size": 64, "packs_per_step": 8, "lookahead": 4, "num_packs": 64}
    iterator = iter(pipeline(4096, **options, **policy.settings))
    for _ in range(50):
        state = iterator.get_state()
        assert len(json.dumps({**state, "parent": None, "live": ""})) <= 1024
        live_records = state["read"] - state["first"]
        assert len(state["live"]) <= 4 * -(-live_records // 24)
        next(iterator)


@EACH_POLICY
def test_restoring_reads_nothing_until_next_and_then_a_bounded_number(policy: PolicyCase) -> None:
    options: dict[str, Any] = {"pack_size": 4, "lookahead": 6, **policy.settings}
    states, _ = states_and_packs(pipeline(400, **options))
    config = policy.config(pack_size=4, lookahead=6)
    half = config.pool_records // 2  # what a cycle of a carrying policy reads
    waiting = config.pool_records + config.max_age * half if policy.settings["policy"] == "streaming" else 0
    for state in states[:-1]:
        source = Numbers(400)
        iterator = iter(pipeline(source, **options))
        iterator.set_state(state)
        assert iterator.get_state() == state
        assert source.reads == 0
        next(iterator)
        assert source.reads <= waiting + config.pool_records + 4


def test_a_returned_state_is_not_changed_later() -> None:
    iterator = iter(pipeline(NUM_RECORDS))
    states = []
    copies = []
    for _ in range(15):
        states.append(iterator.get_state())
        copies.append(through_json(states[-1]))
        next(iterator)
    assert states == copies
    given = iterator.get_state()
    before = through_json(given)
    iterator.set_state(given)
    list(iterator)
    assert given == before


@EACH_RANDOM_ACCESS_POLICY
@pytest.mark.parametrize("num_packs", [None, 9])
def test_next_index(policy: PolicyCase, num_packs: int | None) -> None:
    dataset = pipeline(NUM_RECORDS, packs_per_step=3, lookahead=2, num_packs=num_packs, **policy.settings)
    _, packs = states_and_packs(dataset)
    linear = iter(dataset)
    for index in range(len(packs)):
        assert grain.experimental.get_next_index(linear) == index
        next(linear)
    assert grain.experimental.get_next_index(linear) == len(packs)
    used = iter(dataset)
    for index in reversed(range(len(packs) + 1)):
        grain.experimental.set_next_index(used, index)
        assert grain.experimental.get_next_index(used) == index
        restored = iter(dataset)
        restored.set_state(through_json(used.get_state()))
        assert ids([pack for pack, _ in zip(used, range(2), strict=False)]) == packs[index : index + 2]
        assert ids(restored) == packs[index:]
    with pytest.raises(ValueError, match="the index of a pack must be an integer of at least 0, got -1"):
        grain.experimental.set_next_index(used, -1)
    grain.experimental.set_next_index(used, len(packs) + 1)
    assert list(used) == []


SEQUENTIAL = {name: case for name, case in POLICIES.items() if not case.random_access}


@pytest.mark.parametrize("policy", SEQUENTIAL.values(), ids=SEQUENTIAL.keys())
def test_next_index_is_refused_where_packs_depend_on_all_before(policy: PolicyCase) -> None:
    dataset = pipeline(NUM_RECORDS, **policy.settings)
    _, packs = states_and_packs(dataset)
    iterator = iter(dataset)
    next(iterator)
    assert grain.experimental.get_next_index(iterator) == 1
    with pytest.raises(ValueError, match=r"can't go to pack 3: .* restore a saved state instead"):
        grain.experimental.set_next_index(iterator, 3)
    assert ids(iterator) == packs[1:]


def test_next_index_reads_nothing_before() -> None:
    source = Numbers(400)
    iterator = iter(pipeline(source, pack_size=4, lookahead=5, policy="windowed"))
    grain.experimental.set_next_index(iterator, np.int64(63))
    assert source.reads == 0
    json.dumps(iterator.get_state())
    next(iterator)
    assert source.reads <= 5 * 4 + 4


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"pack_size": 4}, "pack_size=2 became pack_size=4"),
        ({"lookahead": 9}, "lookahead=3 became lookahead=9"),
        ({"policy": "arrival"}, "policy=streaming became policy=arrival"),
        ({"order": "shuffled"}, "order=aligned became order=shuffled"),
        ({"tail": "keep"}, "tail=drop became tail=keep"),
        ({"num_packs": 8}, "num_packs=None became num_packs=8"),
        ({"seed": 1, "packs_per_step": 2}, "packs_per_step=1 became packs_per_step=2, seed=0 became seed=1"),
    ],
)
def test_a_state_from_other_settings_names_what_changed(change: dict[str, Any], shown: str) -> None:
    state = iter(pipeline(NUM_RECORDS)).get_state()
    iterator = iter(pipeline(NUM_RECORDS, **change))
    with pytest.raises(ValueError, match=rf"state comes from other settings \({shown}\): restore with the settings"):
        iterator.set_state(state)
    assert ids(iterator) == ids(pipeline(NUM_RECORDS, **change))


@pytest.mark.parametrize(
    ("foreign", "found"),
    [
        (None, "NoneType"),
        ("state", "str"),
        ([1, 2], "list"),
        ({}, r"\[\]"),
        ({"next_index": 7}, r"\['next_index'\]"),
        ({"parent": {"next_index": 7}, "next_index_in_buffer": 0}, r"\['next_index_in_buffer', 'parent'\]"),
    ],
)
def test_a_state_that_is_not_ours_is_refused(foreign: Any, found: str) -> None:
    iterator = iter(pipeline(NUM_RECORDS))
    with pytest.raises(ValueError, match=rf"not a state of this transformation: expected the keys .*, got {found}\."):
        iterator.set_state(foreign)
    assert ids(iterator) == ids(pipeline(NUM_RECORDS))


def _bits_flipped(live: str) -> str:
    return base64.b64encode(bytes(byte ^ 1 for byte in base64.b64decode(live))).decode()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(
            (name, value)
            for name in ("first", "cycle", "read", "emitted")
            for value in (lambda v: v + 2, lambda v: -1 - v)
        ),
        ("read", float),
        ("next_pack", lambda v: v + 1),
        ("next_pack", lambda v: -v),
        ("next_pack", lambda v: 10**9),
        ("next_pack", str),
        ("digest", lambda v: v ^ 1),
        ("live", lambda v: v[4:]),
        ("live", lambda v: None),
        ("live", lambda v: "*" + v[1:]),
        ("live", _bits_flipped),
        ("cost_sum", lambda v: math.nan),
        ("drift", lambda v: v * (1 + 1e-15)),
        ("checksum", lambda v: v + 1),
    ],
)
def test_a_damaged_state_is_refused(name: str, damage: Callable[[Any], Any]) -> None:
    iterator = iter(pipeline(NUM_RECORDS, policy="streaming", lookahead=4))
    for _ in range(5):
        next(iterator)
    state = through_json(iterator.get_state())
    expected = next(iterator)
    damaged = {**state, name: damage(state[name])}
    with pytest.raises(ValueError, match=r"the state is damaged: its checksum is .* Restore an earlier checkpoint"):
        iterator.set_state(damaged)
    assert next(iterator) != expected  # it goes on where it was
    iterator.set_state(state)
    assert next(iterator) == expected


def test_a_state_with_sorted_keys_is_the_same_state() -> None:
    iterator = iter(pipeline(NUM_RECORDS))
    next(iterator)
    state = json.loads(json.dumps(iterator.get_state(), sort_keys=True))
    expected = next(iterator)
    iterator.set_state(state)
    assert next(iterator) == expected


def test_a_state_of_another_version_is_refused() -> None:
    iterator = iter(pipeline(NUM_RECORDS))
    with pytest.raises(ValueError, match="state has version 99, this release reads version 3"):
        iterator.set_state({**iterator.get_state(), "version": 99})


operations = st.lists(
    st.one_of(
        st.tuples(st.just("next"), st.integers(1, 9)),
        st.tuples(st.just("save"), st.just(0)),
        st.tuples(st.sampled_from(["restore", "restore anew"]), st.integers(0, 9)),
        st.tuples(st.just("exhaust"), st.just(0)),
    ),
    max_size=12,
)


@given(
    policy=st.sampled_from(list(POLICIES.values())),
    tail=st.sampled_from(["drop", "keep", "pad"]),
    packs_per_step=st.integers(1, 3),
    lookahead=st.integers(1, 4),
    num_packs=st.none() | st.sampled_from([6, 18]),
    prefetch=st.sampled_from([0, 2]),
    operations=operations,
)
@settings(deadline=None, max_examples=60)
def test_any_use_agrees_with_a_list(
    policy: PolicyCase, prefetch: int, operations: list[tuple[str, int]], num_packs: int | None, **options: Any
) -> None:
    """The model is the list of packs and a position in it."""
    if options["tail"] == "drop" and num_packs == 18:
        num_packs = None
    dataset = pipeline(NUM_RECORDS, num_packs=num_packs, **options, **policy.settings)
    packs = ids(dataset)
    iterator, position = iter(with_prefetch(dataset, prefetch)), 0
    saved: list[tuple[str, int]] = [(json.dumps(iterator.get_state()), 0)]
    for operation, number in operations:
        if operation == "next":
            assert ids([pack for _, pack in zip(range(number), iterator, strict=False)]) == packs[position:][:number]
            position = min(position + number, len(packs))
        elif operation == "exhaust":
            assert ids(iterator) == packs[position:]
            position = len(packs)
        elif operation == "save":
            saved.append((json.dumps(iterator.get_state()), position))
        else:
            if operation == "restore anew":
                iterator = iter(with_prefetch(dataset, prefetch))
            state, position = saved[number % len(saved)]
            iterator.set_state(json.loads(state))
            assert json.dumps(iterator.get_state()) == state
    assert ids(iterator) == packs[position:]
