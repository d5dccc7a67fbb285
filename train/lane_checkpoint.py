"""The input pipeline in a checkpoint: one file a lane, so that another number of processes can go on.

Grain's own handler writes one file a process, with the number of processes in its name.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import grain
import orbax.checkpoint as ocp

from bcl_grain.lane_files import read_lane_states, write_lane_states
from bcl_grain.lanes import join_lane_states, lane_states


class LaneHandler(ocp.CheckpointHandler):
    """Saves the lanes that this process serves, restores those that it serves now."""

    def save(self, directory: Path, args: LanesSave) -> None:
        """Writes the files of this process's lanes; together the processes write them all."""
        write_lane_states(directory, lane_states(args.iterator.get_state()))

    def restore(self, directory: Path, args: LanesRestore) -> grain.DatasetIterator[Any]:
        """Sets the iterator in place and returns it."""
        own = lane_states(args.iterator.get_state())
        num_lanes = next(iter(own.values()))["num_lanes"]
        args.iterator.set_state(join_lane_states(read_lane_states(directory, own, num_lanes=num_lanes)))
        return args.iterator


@ocp.args.register_with_handler(LaneHandler, for_save=True)
@dataclasses.dataclass
class LanesSave(ocp.args.CheckpointArgs):
    """What to save.

    Attributes:
        iterator: Of a `LanesIterDataset`, maps and thread prefetching behind it.
    """

    iterator: Any


@ocp.args.register_with_handler(LaneHandler, for_restore=True)
@dataclasses.dataclass
class LanesRestore(ocp.args.CheckpointArgs):
    """Where to restore to.

    Attributes:
        iterator: A fresh one of the same pipeline, whichever lanes it serves.
    """

    iterator: Any
