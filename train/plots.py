"""One picture per run: what balancing did to the packs, and what the model learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from train.metrics_log import Event

FloatArray = npt.NDArray[np.float64]

PLOT_FILE = "run.png"
_COLORS = ("#9a9a9a", "#d1495b", "#1f6f8b", "#6b8f3c")


def draw_run(
    path: Path,
    *,
    pack_costs: Mapping[str, FloatArray],
    events: Sequence[Event],
    baseline_loss: float,
    title: str = "",
) -> None:
    """Draws three panels into a PNG.

    Left: the cost of each pack over steps, every rank a dot, the dearest rank of each step a line: the step takes as
    long as that. Middle: what each step loses by waiting. Right: the losses of the run.

    Args:
        path: Where the PNG goes.
        pack_costs: For each policy, the baseline first, the estimated costs [ranks, steps] of the same records.
        events: The run's metrics.
        baseline_loss: Eval loss of the bigram model, nats a token.
        title: What the picture is of.
    """
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    costs_axes, waste_axes, loss_axes = figure.subplots(1, 3)
    unit = np.mean(next(iter(pack_costs.values())))
    for (policy, costs), color in zip(pack_costs.items(), _COLORS, strict=False):
        relative = costs / unit
        steps = np.arange(relative.shape[1])
        costs_axes.scatter(np.tile(steps, len(relative)), relative.ravel(), s=3, color=color, alpha=0.5, linewidths=0)
        costs_axes.plot(steps, relative.max(axis=0), color=color, linewidth=1, label=f"{policy}: dearest rank")
        waste_axes.plot(steps, 100 * (relative.max(axis=0) / relative.mean(axis=0) - 1), color=color, label=policy)
    ranks, num_steps = next(iter(pack_costs.values())).shape
    costs_axes.set(title=f"cost per pack, {ranks} ranks", xlabel="step", ylabel="cost / mean cost")
    waste_axes.set(title=f"time lost by waiting, {num_steps} steps", xlabel="step", ylabel="% of the step's mean")
    waste_axes.set_ylim(bottom=0)
    for kind, label, style in (("train", "training", "-"), ("eval", "held-out modules", "o-")):
        points = [(e["step"], e["loss"]) for e in events if e["kind"] == kind and e["loss"] is not None]
        loss_axes.plot(*zip(*points, strict=True), style, label=label, markersize=4) if points else None
    loss_axes.axhline(baseline_loss, color="black", linestyle="--", linewidth=1, label="bigram model, held-out")
    loss_axes.set(title="loss", xlabel="step", ylabel="nats per response token")
    for axes in (costs_axes, waste_axes, loss_axes):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.25)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
