"""Plots of results, as PNG. Needs matplotlib, which is imported only here and only when something is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bcl_grain.boundary import LAYOUTS, Boundary
from bcl_grain.length_profile import LengthProfile
from bcl_grain.tally import Tally

COLORS = {
    "arrival": "#7f7f7f",
    "windowed": "#0072B2",
    "streaming": "#D55E00",
    "mffd": "#CC79A7",
    "kk": "#009E73",
    "length-grouped": "#B38600",
    "grain-first-fit": "#56B4E9",
    "grain-best-fit": "#333333",
}
"""Okabe and Ito's colours, which people with colour blindness tell apart."""


def new_figure(columns: int = 1, *, width: float = 5.6, height: float = 4.2) -> tuple[Any, list[Any]]:
    """Returns a figure and its axes, side by side, without touching pyplot's state.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; the message says how to get it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'bcl-grain[plot]'") from error
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.set_axisbelow(True)
    return figure, axes


def save(figure: Any, directory: str | Path, name: str) -> Path:
    """Writes a figure and returns its path."""
    path = Path(directory) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def label_lines(ax: Any, points: Mapping[str, tuple[float, float]], colors: Mapping[str, str]) -> None:
    """Writes names at the right ends of lines, moved apart where they would overlap.

    Args:
        ax: The axes, with their final limits and scales.
        points: By name, where each line ends.
        colors: By name.
    """
    to_pixels, from_pixels = ax.transData.transform, ax.transData.inverted().transform
    ordered = sorted(points, key=lambda name: points[name][1])
    lowest = -np.inf
    for name in ordered:
        x, y = to_pixels(points[name])
        y = max(y, lowest + 0.026 * ax.figure.bbox.height)
        lowest = y
        _, text_y = from_pixels((x, y))
        ax.annotate(
            name,
            (points[name][0], text_y),
            xytext=(5, 0),
            textcoords="offset points",
            color=colors[name],
            fontsize=9,
            va="center",
            annotation_clip=False,
        )


def draw_simulation(directory: str, tallies: Mapping[str, Tally], *, title: str) -> Path:
    """Draws waste by policy, and what each step costs beyond the ideal.

    Args:
        directory: Where `simulate.png` goes.
        tallies: By policy, of the same job.
        title: What was simulated.
    """
    figure, (bars, lines) = new_figure(2)
    names = list(tallies)
    places = np.arange(len(names))[::-1]
    for place, name in zip(places, names, strict=True):
        arm = tallies[name].arm()
        color = COLORS.get(name, "#000000")
        total = arm.total_waste
        ends = [100 * arm.sync_waste]
        bars.barh(place, ends[0], height=0.55, color=color)
        text = f"{100 * arm.sync_waste:.1f} %"
        if total is not None:
            bars.barh(place, 100 * total, height=0.55, facecolor="none", edgecolor=color, linewidth=1.2)
            ends.append(100 * total)
            text += f", with padding {100 * total:.1f} %"
        bars.annotate(
            text, (max(*ends, 0.0), place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
        )
    bars.set_yticks(places, names)
    bars.set_xlim(0, 1.75 * bars.get_xlim()[1])
    bars.grid(axis="y", visible=False)
    bars.set(xlabel="waste, % of the ideal step time", title="waiting (filled), and with padding (outline)")
    _draw_steps(lines, tallies)
    figure.suptitle(title, fontsize=10)
    return save(figure, directory, "simulate.png")


def _draw_steps(ax: Any, tallies: Mapping[str, Tally]) -> None:
    """Draws how uneven steps are: the dearest rank against the mean of its step, the worst steps first."""
    ends = {}
    for name, tally in tallies.items():
        steps = slice(tally.first_step, tally.last_step)
        percents = np.sort(100 * (tally.step_max[steps] / (tally.step_sum[steps] / tally.ranks) - 1))[::-1]
        share = 100 * np.arange(1, percents.size + 1) / percents.size
        ax.plot(share, percents, color=COLORS.get(name, "#000000"), linewidth=1.8)
        ends[name] = (100.0, float(percents[-1]))
    ax.set_xlim(0, 100)
    ax.set_ylim(bottom=0)
    ax.set(xlabel="% of steps, the worst first", ylabel="dearest rank above its step's mean, %", title="each step")
    ax.figure.canvas.draw()
    label_lines(ax, ends, {name: COLORS.get(name, "#000000") for name in ends})


def draw_profile(directory: str, profile: LengthProfile, *, unit: str, title: str) -> Path:
    """Draws the histogram of lengths, beside it where the cost is.

    Args:
        directory: Where `profile.png` goes.
        profile: The profile.
        unit: What a length counts.
        title: Of what.
    """
    figure, (ax,) = new_figure(1, width=7.5)
    edges = np.array(profile.histogram_edges)
    records = 100 * np.array(profile.histogram_records) / profile.records
    cost = 100 * np.array(profile.histogram_cost)
    ax.stairs(records, edges, fill=True, color="#0072B2", alpha=0.35)
    ax.stairs(cost, edges, color="#D55E00", linewidth=2)
    ax.set_xscale("log")
    top = max(records.max(), cost.max())
    ax.set_ylim(0, 1.18 * top)
    for values, color, name in ((records, "#0072B2", "records"), (cost, "#D55E00", "cost")):
        peak = int(values.argmax())
        middle = float(np.sqrt(edges[peak] * edges[peak + 1]))
        ax.annotate(
            name,
            (middle, values[peak]),
            xytext=(0, 4),
            textcoords="offset points",
            color=color,
            ha="center",
            fontsize=11,
        )
    ax.axvline(profile.p99, color="black", linewidth=0.8, linestyle=":")
    ax.annotate(
        f"p99 = {profile.p99:,.0f}", (profile.p99, 1.12 * top), xytext=(4, 0), textcoords="offset points", fontsize=9
    )
    ax.set(xlabel=f"length, {unit}", ylabel="% in each bin", title=title)
    _plain_ticks(ax)
    return save(figure, directory, "profile.png")


def draw_boundary(directory: str, boundary: Boundary, *, budget_gib: float, usable_gib: float, title: str) -> Path:
    """Draws the memory that a pack takes against its size, for each way to run it, uncapped and at p99.

    Args:
        directory: Where `boundary.png` goes.
        boundary: The boundary.
        budget_gib: Memory of a device.
        usable_gib: What of it is left after the reserve.
        title: Of what.
    """
    names = {effect.name for effect in boundary.caps}
    caps = [name for name in ("none", "p99") if name in names]
    figure, axes = new_figure(len(caps))
    colors = dict(zip(LAYOUTS, ("#7f7f7f", "#D55E00", "#0072B2", "#009E73"), strict=True))
    lines: list[Callable[[], None]] = []
    for ax, cap in zip(axes, caps, strict=True):
        effect = next(e for e in boundary.caps if e.name == cap)
        ends = {}
        for layout in LAYOUTS:
            cells = [c for c in boundary.cells if (c.cap, c.layout) == (cap, layout)]
            ax.plot([c.pack_size for c in cells], [c.peak_gib for c in cells], color=colors[layout], linewidth=1.8)
            ends[layout] = (cells[-1].pack_size, cells[-1].peak_gib)
        ax.axhspan(usable_gib, budget_gib, color="black", alpha=0.12, linewidth=0)
        ax.axhline(budget_gib, color="black", linewidth=1)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        heading = f"no cap (longest {effect.cap:,})" if cap == "none" else f"cap {cap} = {effect.cap:,}"
        ax.set(xlabel="records in a pack", ylabel="memory, GiB", title=heading)
        _plain_ticks(ax, both=True)
        lines.append(_later(ax, ends, colors))
    limits = [min(ax.get_ylim()[0] for ax in axes), max(ax.get_ylim()[1] for ax in axes)]
    for ax in axes:
        ax.set_ylim(limits)
    figure.suptitle(f"{title}; black line: {budget_gib:g} GiB, the part kept in reserve shaded", fontsize=10)
    figure.canvas.draw()
    for draw in lines:
        draw()
    return save(figure, directory, "boundary.png")


def _later(ax: Any, ends: Mapping[str, tuple[float, float]], colors: Mapping[str, str]) -> Callable[[], None]:
    return lambda: label_lines(ax, ends, colors)


def _plain_ticks(ax: Any, *, both: bool = False) -> None:
    """Writes 1,000 instead of a power of ten, and labels enough of a logarithmic y axis to read it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (ax.xaxis, ax.yaxis) if both else (ax.xaxis,):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    if both:
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
