"""Where the time of steps went, rank by rank: who waited for whom, and who for data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from train.metrics_log import Event

FloatArray = npt.NDArray[np.float64]

TIMELINE_FILE = "timeline.png"
STEPS_SHOWN = 40
_COLORS = {"idle": "#f2c14e", "local": "#1f6f8b", "wait": "#d1495b", "update": "#9a9a9a"}
_LABELS = {
    "idle": "nothing to do: data or host too slow",
    "local": "computing by itself",
    "wait": "waiting for the slowest rank",
    "update": "update",
}
_LEGEND: dict[str, Any] = {"fontsize": 8, "loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 4}  # off the bars


def segments(events: Sequence[Event]) -> dict[str, FloatArray]:
    """Returns what each rank spent of each step, [steps, ranks] seconds by kind; together they are the step.

    Args:
        events: Of kind "time", at least one.
    """
    idle, local, wait = (np.array([event[name] for event in events]) for name in ("idle", "local", "wait"))
    update = np.broadcast_to(np.array([[event["update_seconds"]] for event in events]), idle.shape)
    return {"idle": idle, "local": local, "wait": wait, "update": update}


def draw_timeline(path: Path, events: Sequence[Event]) -> bool:
    """Draws two panels into a PNG: the last steps rank by rank, and shares of the step's time over the whole run.

    Args:
        path: Where the PNG goes.
        events: The run's metrics.

    Returns:
        Whether there was anything to draw.
    """
    # A step may seem to have taken no time, where a thread looked at the clock late: it has no shares.
    timed = [event for event in events if event["kind"] == "time" and event["step_seconds"] > 0]
    if not timed:
        return False
    figure = Figure(figsize=(15, 7), layout="constrained")
    FigureCanvasAgg(figure)
    ranks_axes, shares_axes = figure.subplots(2, 1)
    _draw_ranks(ranks_axes, timed[-STEPS_SHOWN:])
    parts = segments(timed)
    steps = [event["step"] for event in timed]
    whole = sum(part.mean(axis=1) for part in parts.values())
    for name, part in parts.items():
        shares_axes.plot(steps, 100 * part.mean(axis=1) / whole, color=_COLORS[name], label=_LABELS[name])
    shares_axes.set(title="share of a step, mean over ranks", xlabel="step", ylabel="% of the step", ylim=(0, None))
    shares_axes.legend(**_LEGEND)
    shares_axes.grid(alpha=0.25)
    figure.savefig(path, dpi=110)
    return True


def _draw_ranks(axes: Axes, events: Sequence[Event]) -> None:
    parts = segments(events)
    whole = sum(part[:, 0] for part in parts.values())  # the same for every rank
    assert isinstance(whole, np.ndarray)
    ranks = np.arange(parts["idle"].shape[1])
    begins = np.concatenate([[0.0], np.cumsum(whole)[:-1]])
    for step, begin in enumerate(begins):
        left = np.full(ranks.size, begin)
        for name, part in parts.items():
            label = _LABELS[name] if step == 0 else None
            axes.barh(ranks, part[step], left=left, color=_COLORS[name], height=0.8, label=label)
            left = left + part[step]
        axes.axvline(begin, color="white", linewidth=0.5)
    title = f"steps {events[0]['step']} to {events[-1]['step']}, those without times left out"
    axes.set(title=title, xlabel="seconds", ylabel="rank", yticks=ranks)
    axes.invert_yaxis()
    axes.legend(**_LEGEND)
