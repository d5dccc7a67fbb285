"""Sources and cost functions that fail: the message says where, and a retry loses and repeats nothing."""

from __future__ import annotations

import time
from typing import Any

import grain
import numpy as np
import pytest

import bcl_grain as bcl
from tests.pipelines import DIRECT, Numbers, chain, cost_of, ids, pipeline, stream, through_json
from tests.policies import EACH_POLICY, PolicyCase

NUM_RECORDS = 24
SETTINGS: dict[str, Any] = {"pack_size": 2, "packs_per_step": 2, "lookahead": 2}


def drain(iterator: Any) -> tuple[list[list[int]], list[str]]:
    """Iterates to the end, and tries again after every error; returns the packs and the errors."""
    packs: list[list[int]] = []
    errors: list[str] = []
    while len(errors) < 100:
        try:
            packs.append([int(record) for record in next(iterator)])
        except StopIteration:
            return packs, errors
        except (OSError, ValueError) as error:
            errors.append(str(error))
    raise AssertionError(f"no end of errors: {errors[-1]}")


def fails_once(records: set[int], result: Any) -> Any:
    """Returns a function that raises OSError the first time it sees one of `records`."""
    left = set(records)

    def function(record: Any) -> Any:
        if int(record) in left:
            left.discard(int(record))
            raise OSError(f"can't handle {record}")
        return result(record)

    return function


def failing_parent(kind: str, at: int) -> Any:
    """Returns a parent that raises once at record `at`, and differs in where it stands afterwards."""
    source = grain.MapDataset.source(Numbers(NUM_RECORDS, raises_at=[at]))
    if kind == "direct":
        return source.to_iter_dataset(DIRECT)
    if kind == "read-ahead":
        return source.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
    if kind == "thread-prefetch":
        return grain.experimental.ThreadPrefetchIterDataset(source.to_iter_dataset(DIRECT), prefetch_buffer_size=4)
    if kind == "map":
        return stream(NUM_RECORDS).map(fails_once({at}, lambda record: record))
    return grain.IterDataset.mix([source[::2].to_iter_dataset(DIRECT), source[1::2].to_iter_dataset(DIRECT)])


@EACH_POLICY
@pytest.mark.parametrize("at", [0, 1, 7, 8, 11, 23])
@pytest.mark.parametrize("kind", ["direct", "read-ahead", "thread-prefetch", "map", "mix"])
def test_a_retry_after_a_source_error_loses_and_repeats_nothing(kind: str, at: int, policy: PolicyCase) -> None:
    expected = ids(pipeline(NUM_RECORDS, **SETTINGS, **policy.settings))
    packs, errors = drain(iter(chain(failing_parent(kind, at), **SETTINGS, **policy.settings)))
    assert packs == expected
    assert len(errors) == 1


@EACH_POLICY
def test_retries_after_many_source_errors(policy: PolicyCase) -> None:
    source = Numbers(NUM_RECORDS, raises_at=range(NUM_RECORDS))
    parent = grain.MapDataset.source(source).to_iter_dataset(DIRECT)
    packs, errors = drain(iter(chain(parent, **SETTINGS, **policy.settings)))
    assert packs == ids(pipeline(NUM_RECORDS, **SETTINGS, **policy.settings))
    assert len(errors) == NUM_RECORDS


@EACH_POLICY
def test_a_retry_reads_no_more_than_a_pool_again(policy: PolicyCase) -> None:
    source = Numbers(400, raises_at=[390])
    packs, errors = drain(iter(pipeline(source, **SETTINGS, **policy.settings)))
    assert (len(packs), len(errors)) == (200, 1)
    assert source.reads <= 400 + 1 + policy.config(**SETTINGS).pool_records


@EACH_POLICY
@pytest.mark.parametrize("at", [0, 8, 17])
def test_a_state_taken_between_error_and_retry_is_the_state_before(at: int, policy: PolicyCase) -> None:
    dataset = pipeline(Numbers(NUM_RECORDS, raises_at=[at]), **SETTINGS, **policy.settings)
    healthy = pipeline(NUM_RECORDS, **SETTINGS, **policy.settings)
    iterator = iter(dataset)
    packs = []
    while True:
        before = iterator.get_state()
        try:
            packs.append(next(iterator))
        except OSError:
            break
    assert iterator.get_state() == before
    restored = iter(healthy)
    restored.set_state(through_json(before))
    assert ids([*packs, *restored]) == ids(healthy)


@EACH_POLICY
def test_a_source_error_while_restoring_can_be_retried(policy: PolicyCase) -> None:
    expected = ids(pipeline(NUM_RECORDS, **SETTINGS, **policy.settings))
    saved = iter(pipeline(NUM_RECORDS, **SETTINGS, **policy.settings))
    for _ in range(5):
        next(saved)
    for at in range(NUM_RECORDS):
        iterator = iter(pipeline(Numbers(NUM_RECORDS, raises_at=[at]), **SETTINGS, **policy.settings))
        iterator.set_state(through_json(saved.get_state()))
        packs, _ = drain(iterator)
        assert packs == expected[5:], f"error at {at}"


def test_a_source_that_shrank_is_told_apart_from_the_end() -> None:
    class Shrinking(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 5:
                self.n = 3
                raise OSError("can't read 5")
            return super().__getitem__(index)

    class Parent(grain.DatasetIterator):
        """Follows the length of its source, which Grain's own iterators fix at the start."""

        def __init__(self, source: Numbers) -> None:
            super().__init__()
            self.source = source
            self.next_index = 0

        def __next__(self) -> int:
            if self.next_index >= len(self.source):
                raise StopIteration
            record = self.source[self.next_index]
            self.next_index += 1
            return record

        def get_state(self) -> dict[str, int]:
            return {"next_index": self.next_index}

        def set_state(self, state: dict[str, int]) -> None:
            self.next_index = state["next_index"]

    class Dataset(grain.IterDataset):
        def __iter__(self) -> Parent:
            return Parent(Shrinking(NUM_RECORDS))

    iterator = iter(chain(Dataset()))
    with pytest.raises(OSError, match="can't read 5"):
        next(iterator)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"the stream ended before record 3, which had been read before"):
            next(iterator)


@EACH_POLICY
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (float("nan"), "cost of record 9 of the stream is nan, but a cost must be positive and finite"),
        (float("inf"), "cost of record 9 of the stream is inf, but a cost must be positive and finite"),
        (0, "cost of record 9 of the stream is 0, but a cost must be positive and finite"),
        (-2.5, "cost of record 9 of the stream is -2.5, but a cost must be positive and finite"),
        (None, "cost of record 9 of the stream is None, but a cost must be one number: mend what cost_fn returns"),
        (OSError("no tokens"), r"cost_fn raised on record 9 of the stream: OSError\('no tokens'\)"),
    ],
)
def test_a_bad_cost_names_the_record_and_can_be_mended(bad: Any, message: str, policy: PolicyCase) -> None:
    mended = False

    def cost_fn(record: Any) -> Any:
        if int(record) != 9 or mended:
            return cost_of(record)
        if isinstance(bad, Exception):
            raise bad
        return bad

    source = Numbers(NUM_RECORDS)
    iterator = iter(pipeline(source, **{**SETTINGS, **policy.settings, "cost_fn": cost_fn}))
    packs: list[Any] = []
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            packs.extend(iter(iterator.__next__, None))
    mended = True
    packs += iterator
    assert ids(packs) == ids(pipeline(NUM_RECORDS, **SETTINGS, **policy.settings))
    assert source.reads == NUM_RECORDS


@EACH_POLICY
def test_a_cost_error_while_restoring_can_be_mended(policy: PolicyCase) -> None:
    expected = ids(pipeline(NUM_RECORDS, **SETTINGS, **policy.settings))
    saved = iter(pipeline(NUM_RECORDS, **SETTINGS, **policy.settings))
    for _ in range(5):
        next(saved)
    cost_fn = fails_once(set(range(NUM_RECORDS)), cost_of)
    iterator = iter(pipeline(NUM_RECORDS, **{**SETTINGS, **policy.settings, "cost_fn": cost_fn}))
    iterator.set_state(through_json(saved.get_state()))
    packs, errors = drain(iterator)
    assert packs == expected[5:]
    assert all("cost_fn raised on record" in error for error in errors)


def test_a_changed_plan_is_found_on_restoring() -> None:
    iterator = iter(pipeline(NUM_RECORDS, lookahead=6))
    next(iterator)
    other = iter(pipeline(NUM_RECORDS, lookahead=6, cost_fn=lambda record: 1.0 + int(record)))
    other.set_state(iterator.get_state())
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"cycle 0 was planned otherwise .* cost_fn, size_fn or capacity have changed"
        ):
            next(other)


def test_a_cost_that_changes_with_every_call_is_found_on_restoring() -> None:
    rng = np.random.default_rng(0)
    dataset = pipeline(NUM_RECORDS, lookahead=6, cost_fn=lambda record: rng.lognormal())
    iterator = iter(dataset)
    next(iterator)
    iterator.set_state(iterator.get_state())
    with pytest.raises(ValueError, match=r"cost_fn is not deterministic, record 0 of the stream cost \S+ and then"):
        next(iterator)


@EACH_POLICY
def test_the_one_record_whose_cost_changes_is_named(policy: PolicyCase) -> None:
    calls: list[int] = []

    def cost_fn(record: Any) -> float:
        calls.append(int(record))
        return cost_of(record) * (1000.0 ** (-1) ** calls.count(17) if int(record) == 17 else 1)

    dataset = pipeline(NUM_RECORDS, lookahead=12, cost_fn=cost_fn, **policy.settings)
    iterator = iter(dataset)
    next(iterator)
    iterator.set_state(iterator.get_state())
    if policy.balances:
        with pytest.raises(
            ValueError, match=r"record 17 of the stream cost \S+ and then \S+ Make it depend on the rec"
        ):
            list(iterator)


def test_a_slow_cost_function_changes_nothing_and_shows_in_the_telemetry() -> None:
    def slow(record: Any) -> float:
        time.sleep(0.001)
        return cost_of(record)

    telemetry = bcl.Telemetry()
    assert ids(pipeline(NUM_RECORDS, cost_fn=slow, telemetry=telemetry)) == ids(pipeline(NUM_RECORDS))
    assert telemetry.reading_seconds >= NUM_RECORDS * 0.001


def test_a_refused_state_leaves_the_iterator_where_it_was() -> None:
    expected = ids(pipeline(NUM_RECORDS))
    iterator = iter(pipeline(NUM_RECORDS))
    next(iterator)
    with pytest.raises(IndexError):
        iterator.set_state({**iterator.get_state(), "parent": {"next_index": 999}})
    assert ids(iterator) == expected[1:]


def test_a_refused_next_index_leaves_the_iterator_where_it_was() -> None:
    expected = ids(pipeline(NUM_RECORDS, policy="windowed"))
    iterator = iter(pipeline(NUM_RECORDS, policy="windowed"))
    next(iterator)
    with pytest.raises(IndexError):
        grain.experimental.set_next_index(iterator, 999)
    assert ids(iterator) == expected[1:]


@EACH_POLICY
@pytest.mark.parametrize("packs_per_step", [1, 2])
def test_an_empty_stream(packs_per_step: int, policy: PolicyCase) -> None:
    for tail in ("drop", "keep", "pad"):
        dataset = pipeline(0, tail=tail, packs_per_step=packs_per_step, **policy.settings)
        iterator = iter(dataset)
        assert list(iterator) == []
        assert iterator.get_state() == iter(dataset).get_state()


@EACH_POLICY
def test_a_stream_shorter_than_one_pack(policy: PolicyCase) -> None:
    settings: dict[str, Any] = {"pack_size": 4, **policy.settings}
    assert ids(pipeline(3, tail="keep", **settings)) == [[0, 1, 2]]
    assert ids(pipeline(3, tail="pad", **settings)) == [[0, 1, 2, -1]]
    iterator = iter(pipeline(3, tail="drop", **settings))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"ended after 3 records, but 4 are needed .*pack_size=4.*use tail='keep'"):
            next(iterator)


@EACH_POLICY
def test_dropped_records_are_counted_in_every_epoch(policy: PolicyCase) -> None:
    telemetry = bcl.Telemetry()
    dataset = pipeline(23, telemetry=telemetry, **SETTINGS, **policy.settings)
    repeated = iter(grain.experimental.RepeatIterDataset(dataset, num_epochs=3))
    packs = ids(repeated)
    assert len(packs) == 3 * 10
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(repeated)
    assert telemetry.records_dropped == 3 * 3
    assert telemetry.records == 3 * 20
