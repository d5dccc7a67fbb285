"""A naive model of a stream: lists, sets and long division say what may come out, and nothing is planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grain

from tests.pipelines import DIRECT, PAD, Numbers, chain, cost_of

COST_FNS: dict[str, Callable[[Any], float]] = {
    "uneven": cost_of,
    "equal": lambda record: 2.0,
    "two kinds": lambda record: 1.0 + 9.0 * (int(record) % 7 == 3),
}
READ_AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=3)
SMALL_STATE_BYTES = 1024  # the parent's state and the bitmap aside


def build(spec: dict[str, Any], source: Numbers, *, prefetch: int = 0, read_ahead: bool = False) -> Any:
    """Returns the pipeline that a JSON-safe `spec` describes: epochs of packs, read and prefetched as asked."""
    parent = grain.MapDataset.source(source).to_iter_dataset(READ_AHEAD if read_ahead else DIRECT)
    dataset = chain(parent, **{**spec["settings"], "cost_fn": COST_FNS[spec["costs"]]})
    dataset = grain.experimental.RepeatIterDataset(dataset, num_epochs=spec["epochs"])
    if not prefetch:
        return dataset
    return grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=prefetch)


def structure(state: Any) -> Any:
    """Returns the shape of a JSON value: keys, lengths of lists, types."""
    if isinstance(state, dict):
        return {key: structure(value) for key, value in state.items()}
    return [structure(value) for value in state] if isinstance(state, list) else type(state).__name__


class Model:
    """What one stream may give: remembers every pack, and checks each new one by plain arithmetic."""

    def __init__(self, spec: dict[str, Any]) -> None:
        settings = spec["settings"]
        self.cost_fn = COST_FNS[spec["costs"]]
        self.epochs: int = spec["epochs"]
        self.policy: str = settings["policy"]
        self.tail: str = settings["tail"]
        self.pack_size: int = settings["pack_size"]
        self.max_age: int = settings["max_age"]
        self.step = self.pack_size * settings["packs_per_step"]
        self.pool = self.step * (1 if self.policy == "arrival" else settings["lookahead"])
        self.cohort = self.step * ((settings["lookahead"] + 1) // 2) if self.policy == "streaming" else self.pool
        wanted = settings["num_packs"]
        records, packs = spec["records"], None if wanted is None else wanted
        steps = records // self.step if self.tail == "drop" else -(-records // self.step)
        self.num_packs: int = steps * settings["packs_per_step"] if packs is None else packs
        self.num_records = min(records, self.num_packs * self.pack_size)
        # Who counts packs knows the end when it has read the last record; else it takes one more look.
        self.last_cycle = self.cohort_of(self.num_records - 1 if wanted is not None else records)
        self.packs: list[list[int]] = []  # of one epoch, as far as it was seen
        self.states: dict[int, Any] = {}  # by position
        self.shape: Any = None

    @property
    def length(self) -> int:
        """Packs of all epochs."""
        return self.num_packs * self.epochs

    def cohort_of(self, record: int) -> int:
        return 0 if record < self.pool else 1 + (record - self.pool) // self.cohort

    def check_pack(self, position: int, pack: list[int]) -> None:
        """Compares with what was seen at this place before, or checks that nobody saw these records."""
        index = position % self.num_packs
        if index < len(self.packs):
            assert pack == self.packs[index]
            return
        assert index == len(self.packs)
        real = [record for record in pack if record != PAD]
        assert real == sorted(set(real))
        assert pack == real + [PAD] * (len(pack) - len(real))
        assert not {record for seen in self.packs for record in seen if record != PAD} & set(real)
        assert set(real) <= set(range(self.num_records))
        is_full = (index + 1) * self.pack_size <= self.num_records // self.step * self.step
        assert len(pack) == self.pack_size or (self.tail == "keep" and not is_full and len(pack) < self.pack_size)
        assert len(real) == self.pack_size or not is_full
        cycle = min(index // (self.cohort // self.pack_size), self.last_cycle)
        ages = [cycle - self.cohort_of(record) for record in real]
        oldest = self.max_age if self.policy == "streaming" else 0
        assert all(0 <= age <= oldest for age in ages), f"pack {index}, of cycle {cycle}, has ages {ages}"
        self.packs.append(pack)

    def check_end(self, position: int) -> None:
        assert position == self.length
        assert sorted(record for pack in self.packs for record in pack if record != PAD) == [*range(self.num_records)]

    def check_state(self, position: int, state: Any) -> None:
        """Checks one state of constant structure for a place, small, and its running mean by adding up."""
        if self.shape is None:
            self.shape = structure(state)
        assert structure(state) == self.shape
        inner = state["parent"]
        assert len(json.dumps({**inner, "parent": None, "live": ""})) <= SMALL_STATE_BYTES
        bits = inner["read"] - inner["first"]
        assert bits <= self.pool + self.max_age * self.cohort
        assert len(inner["live"]) <= 4 * -(-bits // 24)
        if position % self.num_packs:  # at an epoch's end the repetition has two names for the place
            assert self.states.setdefault(position % self.num_packs, inner) == inner
        before = self.states.get(position % self.num_packs - self.cohort // self.pack_size)
        if before is not None and before["cycle"] and before["next_pack"] == inner["next_pack"] == 0:
            costs = [self.cost_fn(record) for record in range(before["read"], inner["read"])]
            added = sum(min(cost, before["ceiling"]) for cost in costs) if self.policy == "streaming" else 0.0
            assert abs(inner["cost_sum"] - before["cost_sum"] - added) <= 1e-9 * inner["cost_sum"]
