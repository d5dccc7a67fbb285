"""Hosts that serve lanes, their steps as record numbers, their states in files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grain

import bcl_grain as bcl
from tests.pipelines import DIRECT, chain, ids, through_json

LANES = 4


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def host_dataset(
    num_records: int,
    *,
    host: int,
    num_hosts: int,
    num_lanes: int = LANES,
    pack_size: int = 2,
    packs_per_step: int = 1,
    tail: Any = "drop",
    **policy: Any,
) -> Any:
    plan = bcl.plan_lanes(
        num_records,
        num_lanes=num_lanes,
        pack_size=pack_size,
        packs_per_step=packs_per_step,
        tail=tail,
    )

    def build(records: Any, lane: int) -> Any:
        del lane
        return chain(
            records.to_iter_dataset(DIRECT),
            pack_size=pack_size,
            packs_per_step=packs_per_step,
            num_packs=plan.num_packs,
            tail=tail,
            **policy,
        )

    records = grain.MapDataset.range(num_records).shuffle(seed=1)
    return bcl.serve_lanes(
        records, build, num_lanes=num_lanes, host=host, num_hosts=num_hosts, packs_per_step=packs_per_step
    )


def hosts(num_hosts: int, num_records: int, **more: Any) -> list[Any]:
    return [iter(host_dataset(num_records, host=host, num_hosts=num_hosts, **more)) for host in range(num_hosts)]


def global_steps(iterators: Iterable[Any]) -> Iterator[list[list[int]]]:
    """Yields each step's packs over all hosts as a sorted list; that hosts end together is part of the bargain."""
    for steps in zip(*iterators, strict=True):
        yield sorted(ids(pack for packs in steps for pack in packs))


def saved(iterators: Iterable[Any], directory: Path) -> None:
    for iterator in iterators:
        bcl.write_lane_states(directory, bcl.lane_states(through_json(iterator.get_state())))


def restore(iterators: Iterable[Any], num_lanes: int, directory: Path) -> None:
    for host, iterator in enumerate(iterators := list(iterators)):
        lanes = bcl.lanes_of_host(num_lanes, host=host, num_hosts=len(iterators))
        iterator.set_state(bcl.join_lane_states(bcl.read_lane_states(directory, lanes, num_lanes=num_lanes)))
