"""What comes out of the transformation: against stock Grain, against the simulator, and inside a pipeline."""

from __future__ import annotations

import copy
import inspect
import json
import logging
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bcl_grain as bcl
from bcl_grain.planner import FILLER, PlannerConfig, plan_cycle, state_at
from bcl_grain.simulate import plan_stream
from tests.pipelines import COSTS, PAD, Numbers, chain, cost_of, ids, pipeline, stream
from tests.policies import EACH_POLICY, EACH_RANDOM_ACCESS_POLICY, EACH_STEP_WIDTH, EACH_TAIL, POLICIES, PolicyCase


class PlanWindow(grain.experimental.FlatMapTransform):
    """Plans one window of consecutive numbers, from which it tells its place in the stream."""

    max_fan_out = 1 << 20

    def __init__(self, config: PlannerConfig, window: int) -> None:
        self.config = config
        self.window = window

    def flat_map(self, records: list[Any]) -> list[list[int]]:
        start = int(records[0])
        state, _ = state_at(self.config, start // self.config.pack_size)
        assert state.read == start
        costs = [cost_of(record) for record in records]
        packs = plan_cycle(self.config, state, costs, final=len(records) < self.window).packs
        return [[PAD if p == FILLER else int(records[p - start]) for p in pack] for pack in packs]


@EACH_RANDOM_ACCESS_POLICY
@EACH_TAIL
@EACH_STEP_WIDTH
@pytest.mark.parametrize("num_records", [36, 50, 100])
def test_equals_stock_batch_and_flat_map(policy: PolicyCase, tail: str, packs_per_step: int, num_records: int) -> None:
    shape: dict[str, Any] = {"pack_size": 3, "packs_per_step": packs_per_step, "lookahead": 4, "seed": 2, "tail": tail}
    config = policy.config(**shape)
    window = config.step_records if policy.settings["policy"] == "arrival" else config.pool_records
    stock = stream(num_records).batch(window, drop_remainder=False, batch_fn=list).apply(PlanWindow(config, window))
    assert ids(pipeline(num_records, **shape, **policy.settings)) == list(stock)


@given(
    policy=st.sampled_from(list(POLICIES.values())),
    tail=st.sampled_from(["drop", "keep", "pad"]),
    num_records=st.integers(20, 130),
    shape=st.fixed_dictionaries(
        {
            "pack_size": st.integers(1, 4),
            "packs_per_step": st.integers(1, 3),
            "lookahead": st.integers(1, 5),
            "seed": st.integers(0, 3),
        }
    ),
    steps=st.none() | st.integers(1, 8),
)
@settings(deadline=None, max_examples=60)
def test_equals_the_simulator(policy: PolicyCase, tail: str, num_records: int, shape: Any, steps: int | None) -> None:
    num_packs = None if steps is None else steps * shape["packs_per_step"]
    if tail == "drop" and num_packs and num_packs * shape["pack_size"] > num_records:
        tail = "keep"
    more = {**shape, "tail": tail, "num_packs": num_packs}
    planned = plan_stream(policy.config(**more), COSTS[:num_records])
    assert ids(pipeline(num_records, **more, **policy.settings)) == planned


@EACH_POLICY
def test_records_come_through_untouched_and_in_lists(policy: PolicyCase) -> None:
    records = [{"tokens": np.arange(n), "name": f"record {n}"} for n in range(1, 25)]
    source = grain.MapDataset.source(records).to_iter_dataset(grain.ReadOptions(0, 0))
    packs = list(chain(source, **policy.settings, pack_size=4, cost_fn=bcl.token_cost()))
    assert all(type(pack) is list for pack in packs)
    assert sorted(id(record) for pack in packs for record in pack) == sorted(map(id, records))


def test_each_filler_is_a_copy_of_its_own() -> None:
    pad_record = {"tokens": np.zeros(1)}
    source = grain.MapDataset.source([{"tokens": np.ones(3)}]).to_iter_dataset(grain.ReadOptions(0, 0))
    (pack,) = chain(source, pack_size=3, cost_fn=bcl.token_cost(), tail="pad", pad_record=pad_record)
    fillers = [record for record in pack if record["tokens"][0] == 0]
    assert len(fillers) == 2
    assert len({id(record) for record in [*fillers, pad_record]}) == 3
    fillers[0]["tokens"][0] = 5
    assert fillers[1]["tokens"][0] == pad_record["tokens"][0] == 0


@EACH_POLICY
@EACH_STEP_WIDTH
def test_a_pack_at_a_time_is_read(policy: PolicyCase, packs_per_step: int) -> None:
    """The first `next()` fills the pool; each later one reads a pack's worth, so that no step waits for a window."""
    source = Numbers(400)
    config = policy.config(pack_size=4, packs_per_step=packs_per_step, lookahead=6)
    iterator = iter(pipeline(source, pack_size=4, packs_per_step=packs_per_step, lookahead=6, **policy.settings))
    assert source.reads == 0
    next(iterator)
    assert source.reads <= config.pool_records + 4
    while source.reads < 400:
        before = source.reads
        next(iterator)
        assert source.reads - before <= 4
    list(iterator)
    assert source.reads == 400


@EACH_POLICY
def test_what_num_packs_does_not_need_is_not_read(policy: PolicyCase) -> None:
    source = Numbers(400)
    assert len(list(pipeline(source, pack_size=4, lookahead=6, num_packs=20, **policy.settings))) == 20
    assert source.reads == 80


@EACH_POLICY
def test_the_end_is_asked_for_once(policy: PolicyCase) -> None:
    """Some parents do work when they are asked again, such as starting a thread."""

    class Parent(grain.DatasetIterator):
        def __init__(self) -> None:
            super().__init__()
            self.next_index = self.ends = 0

        def __next__(self) -> int:
            if self.next_index == 20:
                self.ends += 1
                raise StopIteration
            self.next_index += 1
            return self.next_index - 1

        def get_state(self) -> dict[str, int]:
            return {"next_index": self.next_index}

        def set_state(self, state: dict[str, int]) -> None:
            self.next_index = state["next_index"]

    parents = []

    class Dataset(grain.IterDataset):
        def __iter__(self) -> Parent:
            parents.append(Parent())
            return parents[-1]

    iterator = iter(chain(Dataset(), tail="keep", **policy.settings))
    assert len(list(iterator)) == 10
    assert list(iterator) == list(iterator) == []
    assert parents[0].ends == 1


@EACH_POLICY
def test_iterators_do_not_share_anything(policy: PolicyCase) -> None:
    dataset = pipeline(40, **policy.settings)
    expected = ids(dataset)
    first, second = iter(dataset), iter(dataset)
    packs: tuple[list[Any], list[Any]] = ([], [])
    for i in range(20):
        packs[0].append(next(first))
        if i % 3 == 0:
            packs[1].append(next(second))
    packs[1].extend(second)
    assert ids(packs[0]) == ids(packs[1]) == expected


@EACH_POLICY
def test_datasets_can_be_copied_and_pickled(policy: PolicyCase) -> None:
    dataset = pipeline(40, **{**policy.settings, "cost_fn": lambda record: float(COSTS[record])})
    expected = ids(dataset)
    assert ids(copy.deepcopy(dataset)) == expected
    assert ids(cloudpickle.loads(cloudpickle.dumps(dataset))) == expected


def test_a_closed_iterator_says_so() -> None:
    iterator = iter(pipeline(40))
    next(iterator)
    state = iterator.get_state()
    iterator.close()
    iterator.close()
    with pytest.raises(ValueError, match=r"closed iterator: 'BatchCostLookaheadDatasetIterator\(pack_size=2 .*seed=0"):
        next(iterator)
    assert iterator.get_state() == state


def test_closing_reaches_the_parents_and_frees_the_pool() -> None:
    iterator = iter(pipeline(40))
    next(iterator)
    assert iterator._records
    iterator.close()
    assert not iterator._records
    with pytest.raises(ValueError, match="closed iterator"):
        next(iterator._source)


def test_element_spec_is_a_pack_of_the_parents() -> None:
    spec = grain.experimental.get_element_spec(pipeline(40, pack_size=3))
    assert [(s.shape, s.dtype) for s in spec] == [((), np.int64)] * 3


def test_dataset_and_iterator_name_their_settings() -> None:
    dataset = pipeline(40, pack_size=5, policy="arrival")
    assert str(dataset).startswith("BatchCostLookaheadIterDataset(pack_size=5 ")
    assert "policy=arrival" in str(iter(dataset))


@pytest.mark.parametrize("on_top", [False, True])
def test_the_execution_summary_counts_packs(on_top: bool) -> None:
    dataset = pipeline(40)
    if on_top:
        dataset = dataset.map(len)
    options = grain.experimental.DatasetOptions(
        execution_tracking_mode=grain.experimental.ExecutionTrackingMode.STAGE_TIMING
    )
    iterator = iter(grain.experimental.WithOptionsIterDataset(dataset, options))
    assert len(list(iterator)) == 20
    iterator._stats.report()
    nodes = iterator._stats._get_execution_summary().nodes.values()
    (node,) = [node for node in nodes if "BatchCostLookahead" in node.name]
    # Grain starts a node's count anew when the node above it comes to life, which is after the first pack.
    assert node.num_produced_elements == 20 - on_top
    assert node.total_processing_time_ns > 0
    assert node.output_spec == "list<int>[2]"


def test_telemetry_tells_what_the_stream_aims_at_and_how_long_records_wait() -> None:
    telemetry = bcl.Telemetry()
    iterator = iter(pipeline(400, pack_size=4, lookahead=6, telemetry=telemetry))
    waits = []
    for _ in range(60):
        next(iterator)
        waits.append(telemetry.oldest_wait)
    # Where outliers wait, a cycle is cheaper than the mean.
    assert telemetry.target == pytest.approx(4 * np.mean(COSTS[: telemetry.records]), rel=0.15)
    assert 0 < max(waits) <= 16, "the age bound"
    assert 0 <= telemetry.drift < 5, "the order is random"
    figures = telemetry.figures()
    assert json.loads(json.dumps(figures)) == figures
    assert figures["pack_cost_cv"] == telemetry.pack_cost_cv


def test_telemetry_counts() -> None:
    telemetry = bcl.Telemetry()
    packs = ids(pipeline(40, pack_size=3, packs_per_step=2, lookahead=3, tail="pad", telemetry=telemetry))
    sums = [sum(cost_of(i) for i in pack if i != PAD) for pack in packs]
    assert (telemetry.packs, telemetry.records, telemetry.fillers, telemetry.records_dropped) == (14, 40, 2, 0)
    assert telemetry.cycles == 3
    assert telemetry.pack_cost_sum == pytest.approx(sum(sums))
    assert telemetry.pack_cost_cv == pytest.approx(np.std(sums) / np.mean(sums))
    assert telemetry.target == pytest.approx(np.mean(sums[-6:]), rel=0.5)  # of the last pool
    assert telemetry.oldest_wait == 0  # nothing is left
    assert telemetry.planning_seconds > 0
    assert telemetry.reading_seconds > 0


def test_dropped_records_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = bcl.Telemetry()
    with caplog.at_level(logging.WARNING, logger="absl"):
        iterator = iter(pipeline(19, pack_size=4, lookahead=2, telemetry=telemetry))
        assert len(list(iterator)) == 4
        assert list(iterator) == []
    assert telemetry.records_dropped == 3
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["3 of 19 records don't fill a step and are dropped (tail='drop')"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pack_size": 0}, "pack_size must be an integer of at least 1, got 0"),
        ({"lookahead": 0}, "lookahead must be an integer of at least 1, got 0"),
        ({"num_packs": 3, "packs_per_step": 2}, "num_packs 3 is not a multiple of packs_per_step 2"),
        ({"policy": "greedy"}, "policy must be one of"),
        ({"cost_fn": None}, "cost_fn must be callable, got None"),
        ({"tail": "pad", "pad_record": None}, "tail='pad' needs a pad_record"),
    ],
)
def test_a_bad_setting_is_an_error_at_once(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline(40, **change)


def test_settings_are_by_keyword() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        bcl.BatchCostLookaheadIterDataset(stream(4), 2, cost_of)  # type: ignore[call-arg]


def test_the_transformation_offers_every_setting_of_the_planner() -> None:
    offered = inspect.signature(bcl.BatchCostLookaheadIterDataset.__init__).parameters
    for name, setting in inspect.signature(PlannerConfig).parameters.items():
        assert offered[name].default == setting.default, name
