"""A run's metrics: one JSON line per event, and TensorBoard event files beside it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event as TensorBoardEvent
from tensorboardX.proto.event_pb2 import SessionLog
from tensorboardX.proto.summary_pb2 import Summary

METRICS_FILE = "metrics.jsonl"

Event = dict[str, Any]
"""One line: "kind" ("train", "eval", "balance", "time"), "step" (updates so far), and numbers by name; some by rank."""


class MetricsLog:
    """Appends events to `metrics.jsonl` and to TensorBoard's files.

    A resumed run repeats the steps since its checkpoint: their old lines are cut off first, so that the file reads
    as if the run had never stopped.

    Args:
        run_dir: Where the files go.
        first_step: Updates done before the first event; older events stay, later ones are removed.
    """

    def __init__(self, run_dir: Path, *, first_step: int = 0) -> None:
        self._path = run_dir / METRICS_FILE
        kept = [event for event in read_events(run_dir) if event["step"] <= first_step] if first_step else []
        replacement = self._path.with_suffix(".tmp")
        replacement.write_text("".join(_line(event) for event in kept))
        os.replace(replacement, self._path)
        self._file = self._path.open("a")
        # Not the SummaryWriter: its thread dies of a full disk, and then the training loop waits for it for ever.
        (run_dir / "tensorboard").mkdir(exist_ok=True)
        self._events = EventsWriter(str(run_dir / "tensorboard" / "events"), f".{os.getpid()}-{first_step}")
        if first_step:  # TensorBoard too forgets what came after the checkpoint
            self._events.write_event(
                TensorBoardEvent(
                    wall_time=time.time(), step=first_step + 1, session_log=SessionLog(status=SessionLog.START)
                )
            )

    def write(
        self,
        kind: str,
        step: int,
        values: Mapping[str, float],
        by_rank: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Appends one event and flushes it, so that a killed run keeps what it reported.

        Args:
            kind: Kind of the event.
            step: Updates done.
            values: Numbers by name.
            by_rank: Lists of numbers by name; TensorBoard does not get them.

        Raises:
            OSError: If it can't be written.
        """
        self._file.write(_line({"kind": kind, "step": step, **values, **(by_rank or {})}))
        self._file.flush()
        scalars = [Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in values.items()]
        self._events.write_event(TensorBoardEvent(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        self._events.flush()

    def close(self) -> None:
        """Closes both files."""
        with contextlib.closing(self._events):
            self._file.close()


def read_events(run_dir: Path) -> list[Event]:
    """Returns the events of a run in order. A last line cut short by a kill is left out.

    Raises:
        ValueError: If another line is not one of ours.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            event["kind"], event["step"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} of {path} is not a metrics event: {line[:80]!r}") from error
        events.append(event)
    return events


def _line(event: Mapping[str, Any]) -> str:
    # JSON has no NaN: a diverged run must still leave a file that any reader takes.
    safe = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}
    return json.dumps(safe, allow_nan=False) + "\n"
