"""What a checkpoint of a stream's iterator holds, and whether one that comes back can be trusted.

A state is JSON-safe and holds no record:

    version    of this form
    settings   the planner's, as one line: another line is another pipeline
    packs_before  that came out under earlier settings, see `on_changed_settings`; arrivals count from there
    finish_at  arrival that the settings' pool ends before, because others take over; -1 if none do
    parent     where the parent stood before arrival `first`
    first      start of the oldest cohort with a record in the pool
    live       which arrivals from `first` on, of those read, are still in the pool: a bitmap in base64
    ...        the planner's scalars, see `PoolState.scalars`
    next_pack  packs of the current cycle that are out
    digest     checksum of the current cycle's plan, 0 before its first pack is out
    checksum   of all the above but the parent's state, whose form is the parent's business
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bcl_grain.planner_config import PlannerConfig
from bcl_grain.pool_state import PoolState

IntArray = npt.NDArray[np.int64]

VERSION = 3

LASTING = ("pack_size", "packs_per_step", "num_packs")
"""Settings that say what a step is and how many there are: a job can't change them on its way."""


def cycle_part(
    config: PlannerConfig,
    pool: PoolState,
    *,
    packs_before: int,
    finish_at: int,
    parent: Any,
    first: int,
    live: str,
) -> dict[str, Any]:
    """Returns the part of a state that stays the same during a cycle."""
    part = {
        "version": VERSION,
        "settings": config.describe(),
        "packs_before": packs_before,
        "finish_at": finish_at,
        "parent": parent,
        "first": first,
        "live": live,
        **pool.scalars(),
    }
    return {**part, "checksum": _checksum(part)}


def full_state(part: Mapping[str, Any], *, next_pack: int, digest: int) -> dict[str, Any]:
    """Returns the state within a cycle; cheap, because prefetchers ask for one with every element."""
    place = {"next_pack": next_pack, "digest": digest}
    return {**part, **place, "checksum": _checksum(place, part["checksum"])}


def _checksum(values: Mapping[str, Any], start: int = 0) -> int:
    """Returns the CRC-32 of all but the parent's state; `repr` tells 1 from 1.0 and True, and floats exactly."""
    text = ";".join(f"{name}={value!r}" for name, value in values.items() if name not in ("parent", "checksum"))
    return zlib.crc32(text.encode(), start)


def encode_live(live: IntArray, *, first: int, read: int) -> str:
    """Returns the bitmap of the positions `live` among first..read-1.

    >>> encode_live(np.array([3, 5]), first=2, read=6)
    'UA=='
    """
    bits = np.zeros(read - first, np.uint8)
    bits[live - first] = 1
    return base64.b64encode(np.packbits(bits).tobytes()).decode()


def decode_live(bitmap: str, *, first: int, read: int) -> IntArray:
    """Returns the positions that `encode_live` was given.

    >>> decode_live("UA==", first=2, read=6)
    array([3, 5])
    """
    packed = np.frombuffer(base64.b64decode(bitmap), np.uint8)
    return np.flatnonzero(np.unpackbits(packed, count=read - first)) + first


def check_state(state: Any, mine: Mapping[str, Any], config: PlannerConfig, *, may_differ: bool) -> PlannerConfig:
    """Checks a state that is to be restored; returns the settings that it was saved with.

    Args:
        state: What came back from a checkpoint.
        mine: A state of the iterator that restores it.
        config: The settings of that iterator.
        may_differ: Whether the state's settings may be others, but for the `LASTING` ones.

    Raises:
        ValueError: If the state is not one of this transformation, comes from other settings or another release, or
            is damaged; the message names what and the remedy.
    """
    if isinstance(state, Mapping) and {"version", "settings"} <= state.keys() and state["version"] != VERSION:
        raise ValueError(
            f"state has version {state['version']!r}, this release reads version {VERSION}: go on with the release "
            "that wrote it"
        )
    if not isinstance(state, Mapping) or state.keys() != mine.keys():
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"not a state of this transformation: expected the keys {sorted(mine)}, got {found}. Was the "
            "checkpoint written by another pipeline?"
        )
    if state["settings"] != config.describe() and not may_differ:
        raise ValueError(
            f"state comes from other settings ({_changes(state['settings'], config)}): restore with the settings it "
            "was saved with, or pass on_changed_settings='finish_pool'"
        )
    place = {name: state[name] for name in ("next_pack", "digest")}
    part = {name: state[name] for name in mine if name not in place}  # in our order: JSON may have sorted the keys
    checksum = _checksum(place, _checksum(part))
    if checksum != state["checksum"]:
        raise ValueError(
            f"the state is damaged: its checksum is {state['checksum']!r}, its values have {checksum}. Restore an "
            "earlier checkpoint"
        )
    saved = config.from_description(str(state["settings"]))
    if any(getattr(saved, name) != getattr(config, name) for name in LASTING):
        raise ValueError(
            f"state comes from other settings ({_changes(state['settings'], config)}), and {', '.join(LASTING)} can't "
            "change in the middle of a job: restore with those it was saved with"
        )
    return saved


def _changes(then: Any, config: PlannerConfig) -> str:
    pairs = zip(str(then).split(), config.describe().split(), strict=False)
    return ", ".join(f"{before} became {now}" for before, now in pairs if before != now) or str(then)
