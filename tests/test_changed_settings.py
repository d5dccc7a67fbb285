"""Other settings after a restart: the old pool comes out as it was planned, then the new settings take over."""

from __future__ import annotations

import itertools
from typing import Any

import grain
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcl_grain.cost_prior import CostPrior
from bcl_grain.planner_config import PlannerConfig
from tests.lane_hosts import global_steps, hosts
from tests.pipelines import DIRECT, Numbers, chain, cost_of, ids, pipeline, through_json
from tests.policies import POLICIES

NUM_RECORDS = 61
OTHERS = st.fixed_dictionaries(
    {
        "policy": st.sampled_from([case.settings for case in POLICIES.values()]),
        "lookahead": st.integers(1, 5),
        "seed": st.integers(0, 1),
    }
).map(lambda drawn: {**drawn.pop("policy"), **drawn})


def changed(source: Any = NUM_RECORDS, **options: Any) -> Any:
    return pipeline(source, on_changed_settings="finish_pool", **options)


@given(
    old=OTHERS,
    new=OTHERS,
    lasting=st.sampled_from([{"pack_size": 2}, {"pack_size": 3, "packs_per_step": 2}]),
    num_steps=st.none() | st.integers(4, 9),
    tail=st.sampled_from(["drop", "keep", "pad"]),
    taken=st.integers(0, 31),
)
@settings(max_examples=150)
def test_nothing_is_lost_or_repeated_and_the_new_settings_start_after_the_old_pool(
    old: dict[str, Any], new: dict[str, Any], lasting: dict[str, Any], num_steps: int | None, tail: str, taken: int
) -> None:
    if num_steps is not None:
        lasting = {**lasting, "num_packs": num_steps * lasting.get("packs_per_step", 1)}
    before = iter(pipeline(NUM_RECORDS, tail=tail, **lasting, **old))
    packs = ids(itertools.islice(before, taken))
    planned = packs + ids(before)
    before = iter(pipeline(NUM_RECORDS, tail=tail, **lasting, **old))
    for _ in packs:
        next(before)
    in_cycle = len(packs) < len(planned) and before.get_state()["next_pack"] > 0

    iterator = iter(changed(tail=tail, **lasting, **new))
    iterator.set_state(through_json(before.get_state()))
    states = []
    for pack in iterator:
        packs.extend(ids([pack]))
        states.append((through_json(iterator.get_state()), len(packs)))
    assert len(packs) == len(planned)
    everything = sorted(record for pack in packs for record in pack)
    assert everything == sorted(record for pack in planned for record in pack)
    if in_cycle:
        assert packs[taken] == planned[taken]

    # Each state on the way leads on in the same way.
    for state, position in states[:: max(1, len(states) // 6)]:
        again = iter(changed(tail=tail, **lasting, **new))
        again.set_state(state)
        assert again.get_state() == state
        assert ids(again) == packs[position:]

    # The packs after the old pool are those of a job that starts there.
    at = next((state["packs_before"] for state, _ in states if state["packs_before"]), len(packs))
    if PlannerConfig(**lasting, **old) != PlannerConfig(**lasting, **new) and 0 < at < len(packs):
        rest = grain.MapDataset.range(at * lasting["pack_size"], NUM_RECORDS).to_iter_dataset(DIRECT)
        if num_steps is not None:
            lasting = {**lasting, "num_packs": lasting["num_packs"] - at}
        assert packs[at:] == ids(chain(rest, tail=tail, **lasting, **new))


def test_only_the_old_pool_is_read_before_the_new_settings_start() -> None:
    old = iter(pipeline(400, pack_size=4, lookahead=6, policy="streaming"))
    for _ in range(20):
        next(old)
    source = Numbers(400)
    iterator = iter(changed(source, pack_size=4, lookahead=2))
    iterator.set_state(through_json(old.get_state()))
    assert source.reads == 0
    state = iterator.get_state()
    while iterator.get_state()["finish_at"] >= 0:
        next(iterator)
    assert source.reads == state["finish_at"] - state["first"]
    assert iterator.get_state()["packs_before"] * 4 == state["finish_at"]


def test_settings_can_change_twice_and_back() -> None:
    packs: list[list[int]] = []
    state = iter(pipeline(NUM_RECORDS)).get_state()
    for lookahead in (3, 2, 5, 3, 3):
        iterator = iter(changed(lookahead=lookahead, policy="streaming"))
        iterator.set_state(state)
        packs += ids(itertools.islice(iterator, 4))
        state = through_json(iterator.get_state())
    iterator = iter(changed())
    iterator.set_state(state)
    packs += ids(iterator)
    assert sorted(record for pack in packs for record in pack) == list(range(NUM_RECORDS - 1))


def test_the_change_must_be_asked_for() -> None:
    old = iter(pipeline(NUM_RECORDS))
    next(old)
    iterator = iter(pipeline(NUM_RECORDS, lookahead=2))
    with pytest.raises(ValueError, match=r"lookahead=3 became lookahead=2\).*on_changed_settings='finish_pool'"):
        iterator.set_state(old.get_state())
    with pytest.raises(ValueError, match=r"on_changed_settings must be one of \('error', 'finish_pool'\), got 'yes'"):
        pipeline(NUM_RECORDS, on_changed_settings="yes")


@pytest.mark.parametrize("change", [{"pack_size": 4}, {"packs_per_step": 2}, {"num_packs": 8}])
def test_what_a_step_is_cannot_change(change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    iterator = iter(changed(**change))
    with pytest.raises(ValueError, match=rf"became {name}={value}\), and pack_size, packs_per_step, num_packs can't"):
        iterator.set_state(iter(pipeline(NUM_RECORDS)).get_state())
    assert ids(iterator) == ids(pipeline(NUM_RECORDS, **change))


def test_a_source_error_while_the_old_pool_comes_out_can_be_retried() -> None:
    old = iter(pipeline(NUM_RECORDS, policy="streaming", lookahead=5))
    packs = ids(itertools.islice(old, 8))
    state = through_json(old.get_state())
    expected = None
    for at in (None, *range(10, 40)):
        iterator = iter(changed(Numbers(NUM_RECORDS, raises_at=() if at is None else [at])))
        iterator.set_state(state)
        rest = []
        while True:
            try:
                rest.append(next(iterator))
            except OSError:
                continue
            except StopIteration:
                break
        expected = ids(rest) if at is None else expected
        assert ids(rest) == expected
    assert sorted(record for pack in packs + ids(rest) for record in pack) == list(range(NUM_RECORDS - 1))


def test_packs_are_counted_from_the_start_but_not_gone_to() -> None:
    old = iter(pipeline(NUM_RECORDS, policy="windowed"))
    for _ in range(4):
        next(old)
    iterator = iter(changed(lookahead=2, policy="windowed"))
    iterator.set_state(old.get_state())
    for index in range(4, 12):
        assert grain.experimental.get_next_index(iterator) == index
        next(iterator)
    with pytest.raises(ValueError, match="can't go to pack 2: the settings have changed on the way"):
        grain.experimental.set_next_index(iterator, 2)
    grain.experimental.set_next_index(iter(changed(lookahead=2, policy="windowed")), 2)


@given(
    policy=st.sampled_from([case.settings for case in POLICIES.values()]),
    mean=st.floats(1e-9, 1e9),
    ceiling=st.none() | st.floats(1e9, 1e12),
    num_packs=st.none() | st.integers(1, 9),
)
def test_settings_can_be_read_from_their_line(
    policy: dict[str, Any], mean: float, ceiling: float | None, num_packs: int | None
) -> None:
    prior = CostPrior(mean=mean, records=3, ceiling=ceiling)
    config = PlannerConfig(pack_size=3, num_packs=num_packs, **{**policy, "prior": prior})
    assert PlannerConfig(pack_size=1).from_description(config.describe()) == config


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pack_size=2", "expected settings like"),
        ("pack_size=(1,2)", r"pack_size must be an integer of at least 1, got \(1, 2\)"),
        ("pack_size=__import__('os').abort()", "can't read the setting"),
        ("pack_size=exit()", "can't read the setting"),
        ("pack_size=CostPrior(mean=exit())", "can't read the setting"),
        ("pack_size=" + "(" * 300, "can't read the setting"),
        ("policy=fastest", "policy must be one of"),
    ],
)
def test_a_line_is_data_and_never_run(line: str, message: str) -> None:
    name = line.partition("=")[0]
    config = PlannerConfig(pack_size=2)
    if len(line) > 11:
        line = " ".join(line if pair.startswith(name + "=") else pair for pair in config.describe().split(" "))
    with pytest.raises(ValueError, match=message):
        config.from_description(line)


def test_costs_may_change_with_the_settings() -> None:
    """A windowed pool that is out leaves nothing behind that another cost function could contradict."""
    old = iter(pipeline(NUM_RECORDS, policy="windowed"))
    packs = ids(itertools.islice(old, 3))
    iterator = iter(changed(lookahead=4, cost_fn=lambda record: cost_of(record) ** 2))
    iterator.set_state(old.get_state())
    packs += ids(iterator)
    assert sorted(record for pack in packs for record in pack) == list(range(NUM_RECORDS - 1))


def test_lanes_change_at_the_same_step_on_any_number_of_hosts() -> None:
    num_records = 101
    old, new = {"lookahead": 4, "policy": "streaming"}, {"lookahead": 2, "policy": "windowed"}
    before = hosts(4, num_records, **old)
    steps = list(itertools.islice(global_steps(before), 5))
    states = {lane: through_json(s) for host in before for lane, s in host.get_lane_states().items()}
    rests = []
    for num_hosts in (1, 2, 4):
        after = hosts(num_hosts, num_records, on_changed_settings="finish_pool", **new)
        for host in after:
            host.set_lane_states(states)
        rests.append(list(global_steps(after)))
    assert rests[0] == rests[1] == rests[2]
    records = [record for packs in steps + rests[0] for pack in packs for record in pack]
    assert len(set(records)) == len(records) == num_records // 8 * 8
