"""(a) By how much each policy lowers the variability of a rank's pack cost, workload by workload."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from bcl_grain.plots import COLORS, new_figure, save
from bcl_grain.report import markdown_table, percent
from bcl_grain.workloads import load_workload, workload_names
from benchmarks.paper.common import (
    COST,
    MODEL,
    PACK,
    PAPER_CV_REDUCTION,
    STEADY,
    STEADY_JOB,
    Page,
    Setting,
    make_job,
    make_steady_job,
    population,
    prior_of,
)
from benchmarks.paper.common import run_policy as run

LOOKAHEAD = 32
WINDOWS = 300
LIGHT = 0.25
"""A workload is light-tailed if its dearest record costs less than this share of a mean pack."""


def _figures(workload: str, *, setting: Setting) -> dict[str, Any]:
    costs = COST.of_length(population(workload))
    long_job = make_job(workload, ranks=2, steps=setting.steps(WINDOWS * LOOKAHEAD))
    arrival = run("arrival", long_job).arm().cost_cv
    windowed = run("windowed", long_job, lookahead=LOOKAHEAD).arm().cost_cv
    job = make_steady_job(workload, ranks=4, setting=setting)
    base = run("arrival", job).arm().cost_cv
    streaming = run("streaming", job, lookahead=LOOKAHEAD)
    prior = run("streaming", job, lookahead=LOOKAHEAD, prior=prior_of(workload))
    return {
        "workload": workload,
        "kind": load_workload(workload).kind,
        "record_cost_cv": float(costs.std() / costs.mean()),
        "outlier_packs": float(costs.max() / (PACK * costs.mean())),
        "arrival_cv": arrival,
        "windowed_cv": windowed,
        "windowed_reduction": 1 - windowed / arrival,
        "streaming_reduction": 1 - streaming.arm().cost_cv / base,
        "streaming_prior_reduction": 1 - prior.arm().cost_cv / base,
        "streaming_cv": streaming.arm().cost_cv,
        "streaming_cv_error": streaming.arm().cost_cv_error,
    }


def make(setting: Setting) -> Page:
    """Returns the page."""
    rows = setting.map(functools.partial(_figures, setting=setting), workload_names())
    rows.sort(key=lambda row: row["outlier_packs"])
    light = [row for row in rows if row["outlier_packs"] < LIGHT]
    _draw(setting, rows)
    heads = ("workload", "kind", "record CV", "dearest record / pack", "windowed", "streaming", "with prior")
    cells = [
        (
            row["workload"],
            row["kind"],
            f"{row['record_cost_cv']:.2f}",
            f"{row['outlier_packs']:.2f}",
            *(percent(row[key]) for key in ("windowed_reduction", "streaming_reduction", "streaming_prior_reduction")),
        )
        for row in rows
    ]
    worst = {key: min(row[f"{key}_reduction"] for row in light) for key in ("windowed", "streaming", "streaming_prior")}
    middle = {key: float(np.median([row[f"{key}_reduction"] for row in light])) for key in worst}
    summary = (
        f"On the {len(light)} light-tailed workloads windowed lowers the CV by {percent(worst['windowed'])} to "
        f"{percent(max(row['windowed_reduction'] for row in light))} (median {percent(middle['windowed'])}), streaming "
        f"by {percent(worst['streaming'])} at least (median {percent(middle['streaming'])}), with a prior by "
        f"{percent(worst['streaming_prior'])} at least (median {percent(middle['streaming_prior'])})."
    )
    text = f"""\
Reduction of the coefficient of variation of a rank's estimated pack cost against order of arrival: pack {PACK},
lookahead {LOOKAHEAD}, independent draws, cost of `{MODEL}`. Published: up to {percent(PAPER_CV_REDUCTION)} over
public workloads. The ceiling of any windowed policy on independent records is 1 - 1/sqrt({LOOKAHEAD}) =
{percent(1 - LOOKAHEAD**-0.5)}.

Windowed: {setting.steps(WINDOWS * LOOKAHEAD) // LOOKAHEAD} windows on each of 2 ranks, the whole job.
Streaming: 4 ranks, *steady*, steps {STEADY[0]:,} to {STEADY[1]:,} of a job of {STEADY_JOB:,} steps, without and
with a cost prior. A prior aligns the ranks with each other (it lowers waste, table e); this table counts how
one rank's packs vary over time.

{summary} A workload is light-tailed here if its dearest record costs less than {LIGHT} of a mean pack;
workloads are sorted by that ratio. A record dearer than a pack can't be balanced by anybody.

![CV reduction](variability.png)

{markdown_table(heads, cells)}
"""
    data = {"rows": rows, "light_tailed_minimum": worst, "light_tailed_median": middle}
    return Page("variability", "(a) Variability of pack cost", text, data, summary)


def _draw(setting: Setting, rows: Sequence[dict[str, Any]]) -> None:
    figure, (ax,) = new_figure(1, width=8.5, height=8.0)
    places = np.arange(len(rows))[::-1]
    series = (
        ("windowed", "windowed_reduction", COLORS["windowed"], "o"),
        ("streaming", "streaming_reduction", COLORS["streaming"], "s"),
        ("streaming with prior", "streaming_prior_reduction", COLORS["kk"], "D"),
    )
    for label, key, color, marker in series:
        ax.plot([100 * row[key] for row in rows], places, marker, color=color, markersize=5, label=label)
    ax.axvline(100 * PAPER_CV_REDUCTION, color="black", linewidth=0.9, linestyle=":")
    ax.annotate(
        "published: 82.8 %",
        (100 * PAPER_CV_REDUCTION, len(rows) - 0.2),
        ha="right",
        fontsize=9,
        xytext=(-3, 0),
        textcoords="offset points",
    )
    light = sum(row["outlier_packs"] < LIGHT for row in rows)
    ax.axhline(len(rows) - light - 0.5, color="black", linewidth=0.6)
    ax.annotate("light-tailed above", (0.01, len(rows) - light - 0.4), xycoords=("axes fraction", "data"), fontsize=9)
    ax.set_yticks(places, [row["workload"] for row in rows], fontsize=8)
    ax.set_xlim(right=100)
    ax.set(xlabel="reduction of the CV of pack cost against order of arrival, %")
    ax.legend(loc="center", bbox_to_anchor=(0.65, 0.5), fontsize=9, frameon=False)
    save(figure, setting.directory, "variability.png")
