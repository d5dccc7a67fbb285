"""What ranks tell each other about a step: a few numbers that travel with the update, so that no message is needed.

Each device brings one note; `update` returns those of all devices to every process. What a step's packs hold is known
when it is dispatched; how long it took only later, so that a note carries the times of an earlier step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from train.data import Pack

FloatArray = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note:
    """One device's note.

    Attributes:
        stop: Whether the process was asked to stop.
        packs: Packs of this step, as for all up to `executed_cost`.
        records: Their records.
        tokens: Their tokens.
        executed_tokens: Tokens of their chunks, padding included.
        chunks: Their chunks.
        cost: Estimated cost of the records.
        executed_cost: Cost of the chunks.
        timed_step: The step that the times are of; 0 for none.
        data_seconds: Time that the host waited for data.
        idle_seconds: Time from the end of the step before until the device had something to do.
        local_seconds: Time that it then computed by itself.
        step_seconds: Time from the end of the step before to its own.
    """

    stop: bool = False
    packs: int = 0
    records: int = 0
    tokens: int = 0
    executed_tokens: int = 0
    chunks: int = 0
    cost: float = 0.0
    executed_cost: float = 0.0
    timed_step: int = 0
    data_seconds: float = 0.0
    idle_seconds: float = 0.0
    local_seconds: float = 0.0
    step_seconds: float = 0.0


FIELDS = tuple(field.name for field in dataclasses.fields(Note))


def note_of(packs: Sequence[Pack], **more: Any) -> Note:
    """Returns the note of a device that runs these packs."""
    return Note(
        packs=len(packs),
        records=sum(pack.records for pack in packs),
        tokens=sum(pack.tokens for pack in packs),
        executed_tokens=sum(pack.executed_tokens for pack in packs),
        chunks=sum(len(pack.chunks) for pack in packs),
        cost=sum(pack.cost for pack in packs),
        executed_cost=sum(pack.executed_cost for pack in packs),
        **more,
    )


def encode(note: Note) -> FloatArray:
    """Returns a note as float32 [1, fields]."""
    return np.array([[float(getattr(note, name)) for name in FIELDS]], np.float32)


def decode(notes: npt.ArrayLike) -> dict[str, npt.NDArray[np.float64]]:
    """Returns the notes of all devices, [devices, fields], as one array [devices] a field."""
    columns = np.asarray(notes, np.float64).T
    return dict(zip(FIELDS, columns, strict=True))


def pack_figures(notes: dict[str, npt.NDArray[np.float64]]) -> dict[str, float]:
    """Returns what the packs of one step hold and cost, over all ranks.

    "sync_waste" and "total_waste" say by how much the dearest rank's estimated and executed cost exceed the ranks' mean
    estimated cost.
    """
    cost, executed = notes["cost"], notes["executed_cost"]
    mean = cost.mean()
    return {
        "records": notes["records"].sum(),
        "chunks": notes["chunks"].sum(),
        "pack_cost": cost.sum() / notes["packs"].sum(),
        "rank_cost_max": cost.max(),
        "rank_executed_cost_max": executed.max(),
        "padding": 1 - notes["tokens"].sum() / notes["executed_tokens"].sum(),
        "sync_waste": cost.max() / mean - 1,
        "total_waste": executed.max() / mean - 1,
    }


def time_figures(notes: dict[str, npt.NDArray[np.float64]]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Returns what one step's time went into: figures of the step, and by rank.

    A rank's step is idle (nothing to do: data or host too slow), local, wait (for the slowest rank), update. Ranks end
    a step together, in the all-reduce, so times since the end of the step before can be compared without comparing
    clocks.
    """
    step = notes["step_seconds"].max()
    busy_until = notes["idle_seconds"] + notes["local_seconds"]
    wait = busy_until.max() - busy_until
    figures = {
        "step_seconds": step,
        "local_seconds": notes["local_seconds"].mean(),
        "local_seconds_max": notes["local_seconds"].max(),
        "idle_seconds_max": notes["idle_seconds"].max(),
        "data_seconds_max": notes["data_seconds"].max(),
        "update_seconds": max(0.0, step - busy_until.max()),
        "wait_share": wait.mean() / step if step else 0.0,
    }
    by_rank = {
        "idle": notes["idle_seconds"].tolist(),
        "local": notes["local_seconds"].tolist(),
        "wait": wait.tolist(),
        "data": notes["data_seconds"].tolist(),
    }
    return figures, by_rank
