"""What an iterator holds on to: the records of its pool, the few parent states it needs, nothing of its caller's."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import grain
import pytest

from tests.pipelines import DIRECT, chain, ids, through_json
from tests.policies import EACH_POLICY, EACH_STEP_WIDTH, PolicyCase


class Record:
    """A number that can be watched."""

    def __init__(self, number: int, alive: weakref.WeakSet[Record]) -> None:
        self.number = number
        alive.add(self)

    def __int__(self) -> int:
        return self.number


class Source:
    """Makes every record anew, so that only an iterator can keep it alive."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.alive: weakref.WeakSet[Record] = weakref.WeakSet()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Record:
        return Record(index, self.alive)


@EACH_POLICY
@EACH_STEP_WIDTH
def test_only_the_pool_is_held(policy: PolicyCase, packs_per_step: int) -> None:
    """One pool that comes out and one that fills meanwhile; neither what is out nor what a restore reads in passing."""
    settings: dict[str, Any] = {"pack_size": 4, "packs_per_step": packs_per_step, "lookahead": 4, **policy.settings}
    config = policy.config(pack_size=4, packs_per_step=packs_per_step, lookahead=4)
    source = Source(config.pool_records * 6)
    dataset = chain(grain.MapDataset.source(source).to_iter_dataset(DIRECT), **settings)
    iterator = iter(dataset)
    states = []
    for state in iter(iterator.get_state, None):
        states.append(state)
        if next(iterator, None) is None:
            break
        assert len(source.alive) <= 2 * config.pool_records
        assert len(iterator._snapshots) <= config.max_age + 2
    assert not source.alive
    for state in states[::3]:
        iterator.set_state(through_json(state))
        for pack in iterator:
            del pack
            assert len(source.alive) <= 2 * config.pool_records
        assert not source.alive


class LiveStateIterator(grain.DatasetIterator):
    """Gives away its own state, and takes the caller's for its own, as an unwary parent may."""

    def __init__(self, raises_at: Iterable[int]) -> None:
        super().__init__()
        self.state = {"next_index": 0}
        self.raises_at = set(raises_at)

    def __next__(self) -> int:
        if self.state["next_index"] == 40:
            raise StopIteration
        self.state["next_index"] += 1
        if self.state["next_index"] in self.raises_at:
            self.raises_at.discard(self.state["next_index"])
            raise OSError("can't read")
        return self.state["next_index"] - 1

    def get_state(self) -> dict[str, int]:
        return self.state

    def set_state(self, state: dict[str, int]) -> None:
        self.state = state


class LiveStateDataset(grain.IterDataset):
    def __init__(self, raises_at: Iterable[int] = ()) -> None:
        super().__init__()
        self.raises_at = raises_at

    def __iter__(self) -> LiveStateIterator:
        return LiveStateIterator(self.raises_at)


@pytest.mark.parametrize("policy", ["windowed", "streaming"])
def test_states_are_nobody_elses(policy: str) -> None:
    dataset = chain(LiveStateDataset(), policy=policy)
    expected = ids(dataset)
    iterator = iter(dataset)
    states, copies = [], []
    for _ in range(len(expected)):
        states.append(iterator.get_state())
        copies.append(through_json(states[-1]))
        next(iterator)
    assert states == copies
    for position, state in enumerate(states):
        iterator.set_state(state)
        assert ids(iterator) == expected[position:]
    assert states == copies
    flaky = iter(chain(LiveStateDataset(raises_at=range(1, 41)), policy=policy))
    packs = []
    for _ in range(40 + len(expected)):
        with contextlib.suppress(OSError):
            packs.append(next(flaky))
    assert ids(packs) == expected
    assert flaky.get_state() == iterator.get_state()
