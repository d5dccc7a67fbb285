"""Who takes part in a job, and how the lanes of its data are dealt out to them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax

from bcl_grain.lanes import lanes_of_host
from train.config import BalanceConfig

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Who takes part in the job. The one place that knows how many processes there are.

    Attributes:
        process_index: This process.
        process_count: All of them; each serves as many lanes.
        local_devices: Devices of each process.
    """

    process_index: int
    process_count: int
    local_devices: int

    @classmethod
    def current(cls) -> Topology:
        """Returns what JAX says.

        Raises:
            ValueError: If processes have different numbers of devices.
        """
        counts = collections.Counter(device.process_index for device in jax.devices())
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"processes have different numbers of devices {dict(sorted(counts.items()))}: give each as many"
            )
        return cls(
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            local_devices=jax.local_device_count(),
        )

    @property
    def ranks(self) -> int:
        """Devices of all processes."""
        return self.process_count * self.local_devices

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files and speaks to the user."""
        return self.process_index == 0


def settle_lanes(balance: BalanceConfig, topology: Topology) -> BalanceConfig:
    """Fills in the lanes of a job: by default one for each process, with a pack for each of its devices.

    A job keeps them for life: they decide which records a step holds, whoever serves them.

    Raises:
        ValueError: If the processes can't share the lanes evenly; the message names the counts that work.

    >>> topology = Topology(process_index=0, process_count=2, local_devices=8)
    >>> settled = settle_lanes(BalanceConfig(lanes=8), topology)
    >>> settled.lanes, settled.packs_per_step
    (8, 2)
    """
    lanes = topology.process_count if balance.lanes is None else balance.lanes
    lanes_of_host(lanes, host=topology.process_index, num_hosts=topology.process_count)
    packs_per_step = balance.packs_per_step
    if packs_per_step is None:
        packs_per_step = max(1, topology.ranks // lanes)
    return dataclasses.replace(balance, lanes=lanes, packs_per_step=packs_per_step)


def recall_lanes(balance: BalanceConfig, identity: Mapping[str, Any]) -> BalanceConfig:
    """Takes the lanes of a run that goes on from its recorded identity, where the config leaves them open."""
    recorded = identity.get("config", {}).get("balance", {})
    return dataclasses.replace(
        balance,
        lanes=balance.lanes or recorded.get("lanes"),
        packs_per_step=balance.packs_per_step or recorded.get("packs_per_step"),
    )


def packs_per_step(balance: BalanceConfig) -> int:
    """Returns how many packs a step has, those of all processes together; `balance` is settled."""
    assert balance.lanes is not None
    assert balance.packs_per_step is not None
    return balance.lanes * balance.packs_per_step


def deal(packs: Sequence[T], num_devices: int) -> list[Sequence[T]]:
    """Deals a process's packs out to its devices, neighbours together, so that their counts differ by at most one.

    >>> deal("abcdef", 4)
    ['a', 'bc', 'd', 'ef']
    """
    return [
        packs[len(packs) * device // num_devices : len(packs) * (device + 1) // num_devices]
        for device in range(num_devices)
    ]
