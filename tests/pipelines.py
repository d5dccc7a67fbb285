"""Small pipelines whose records are numbers, so that a pack is a list of arrival positions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import grain
import numpy as np

import bcl_grain as bcl

COSTS = np.random.default_rng(7).lognormal(0.0, 1.0, 4096)
PAD = -1
DIRECT = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def cost_of(record: Any) -> float:
    return float(COSTS[int(record)])


class Numbers:
    """A source of 0..n-1 that counts what is read, and raises once at each of some places."""

    def __init__(self, n: int, raises_at: Iterable[int] = ()) -> None:
        self.n = n
        self.raises_at = set(raises_at)
        self.reads = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        if index in self.raises_at:
            self.raises_at.discard(index)
            raise OSError(f"can't read {index}")
        return index


def stream(source: int | Numbers) -> Any:
    """Returns the parent: the records of `source` in order."""
    numbers = grain.MapDataset.range(source) if isinstance(source, int) else grain.MapDataset.source(source)
    return numbers.to_iter_dataset(DIRECT)


def chain(parent: Any, **settings: Any) -> Any:
    """Chains the transformation to `parent`; small packs unless the settings say otherwise."""
    defaults: dict[str, Any] = {"pack_size": 2, "lookahead": 3, "cost_fn": cost_of}
    if settings.get("tail") == "pad":
        defaults["pad_record"] = PAD
    return parent.pipe(bcl.BatchCostLookaheadIterDataset, **{**defaults, **settings})


def pipeline(source: int | Numbers, **settings: Any) -> Any:
    return chain(stream(source), **settings)


def ids(packs: Iterable[Any]) -> list[list[int]]:
    return [[int(record) for record in pack] for pack in packs]


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))
