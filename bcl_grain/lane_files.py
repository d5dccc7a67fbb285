"""A checkpoint of lanes: one small JSON file a lane, whose name says nothing of hosts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from bcl_grain.lanes import LaneState

MAX_STATE_BYTES = 2**26  # of a file; a lane's state takes a few kB


def lane_file(lane: int, num_lanes: int) -> str:
    """Returns the name of a lane's file in a checkpoint; it says nothing of hosts.

    >>> lane_file(3, 8)
    'lane_3-of-8.json'
    """
    return f"lane_{lane}-of-{num_lanes}.json"


def write_lane_states(directory: str | os.PathLike[str], states: Mapping[int, LaneState]) -> None:
    """Writes one file a lane, each in whole or not at all; every host writes those that it serves.

    Raises:
        OSError: If a file can't be written.
    """
    for lane, state in states.items():
        path = Path(directory) / lane_file(lane, state["num_lanes"])
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(state, allow_nan=False))
        os.replace(temporary, path)


def read_lane_states(
    directory: str | os.PathLike[str], lanes: Iterable[int], *, num_lanes: int
) -> dict[int, LaneState]:
    """Reads the files of some lanes, whoever wrote them.

    Raises:
        ValueError: If a file is missing, too large or not JSON; the message names it.
    """
    states: dict[int, LaneState] = {}
    for lane in lanes:
        path = Path(directory) / lane_file(lane, num_lanes)
        try:
            size = path.stat().st_size
            if size > MAX_STATE_BYTES:
                raise ValueError(f"it has {size} bytes, a lane's state at most {MAX_STATE_BYTES}")
            states[lane] = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            there = sorted(other.name for other in Path(directory).glob("lane_*.json"))
            raise ValueError(
                f"{path} is missing ({', '.join(there[:4]) or 'no lanes'} are there): the checkpoint is of another "
                "number of lanes, or incomplete"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"can't read {path}: {error}. Go back to an earlier checkpoint") from error
    return states
