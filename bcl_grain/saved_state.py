"""What a checkpoint of a stream's iterator holds, and whether one that comes back can be trusted.

A state is JSON-safe and holds no record:

    version    of this form
    settings   the planner's, as one line: another line is another pipeline
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

VERSION = 1


def cycle_part(config: PlannerConfig, pool: PoolState, *, parent: Any, first: int, live: str) -> dict[str, Any]:
    """Returns the part of a state that stays the same during a cycle."""
    part = {
        "version": VERSION,
        "settings": config.describe(),
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


def check_state(state: Any, mine: Mapping[str, Any]) -> None:
    """Checks a state that is to be restored.

    Args:
        state: What came back from a checkpoint.
        mine: A state of the iterator that restores it.

    Raises:
        ValueError: If the state is not one of this transformation, comes from other settings or another release, or
            is damaged; the message names what and the remedy.
    """
    if not isinstance(state, Mapping) or state.keys() != mine.keys():
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"not a state of this transformation: expected the keys {sorted(mine)}, got {found}. Was the "
            "checkpoint written by another pipeline?"
        )
    if state["version"] != VERSION:
        raise ValueError(f"state has version {state['version']!r}, this release reads version {VERSION}")
    if state["settings"] != mine["settings"]:
        pairs = zip(str(state["settings"]).split(), mine["settings"].split(), strict=False)
        changes = ", ".join(f"{then} became {now}" for then, now in pairs if then != now)
        raise ValueError(
            f"state comes from other settings ({changes or state['settings']}): restore with the settings it was "
            "saved with"
        )
    place = {name: state[name] for name in ("next_pack", "digest")}
    part = {name: state[name] for name in mine if name not in place}  # in our order: JSON may have sorted the keys
    checksum = _checksum(place, _checksum(part))
    if checksum != state["checksum"]:
        raise ValueError(
            f"the state is damaged: its checksum is {state['checksum']!r}, its values have {checksum}. Restore an "
            "earlier checkpoint"
        )
