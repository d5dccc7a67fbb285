"""(c) BCL against row-packed execution without balancing, from 8 to 32 ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from bcl_grain.grain_packing import grain_packed_steps
from bcl_grain.job import Job, rank_lengths
from bcl_grain.layouts import RowPackedLayout
from bcl_grain.plots import COLORS, label_lines, new_figure, save
from bcl_grain.report import markdown_table, speedup
from bcl_grain.row_lengths import row_lengths
from bcl_grain.workloads import nemo_rl_stand_ins
from benchmarks.paper.common import (
    MODEL,
    PACK,
    Page,
    Setting,
    best_row_length,
    executed_by_row_length,
    geometric_mean,
    make_job,
    population,
    prior_of,
)
from benchmarks.paper.common import run_policy as run

RANKS = (8, 16, 32)
STEPS = 256
TRIAL_RANKS = 8
TRIAL_STEPS = 256
GRAIN_STEPS = 256
GRAIN_RANKS = (8, 32)
LOOKAHEAD = 32
PAPER = (1.197, 1.343)
GRAIN_CORPORA = ("gsm8k_train", "alpaca_eval_outputs", "medquad", "servegen_deepseek_r1")
WORKLOADS = (*nemo_rl_stand_ins(), "servegen_m_large", "servegen_deepseek_r1", "python_source_files")


def _figures(workload: str, *, setting: Setting) -> list[dict[str, Any]]:
    """Returns the figures at each number of ranks. Each side has its own best row length, found on other draws."""
    sizes = population(workload)
    bcl: dict[str, Any] = {"lookahead": LOOKAHEAD, "prior": prior_of(workload)}
    trial = make_job(workload, ranks=TRIAL_RANKS, steps=TRIAL_STEPS, seed=1, kernel="segments")
    lengths = row_lengths(sizes, pack_size=PACK, multiple_of=64, most=12)
    arms: dict[str, dict[str, Any]] = {"arrival": {}, "windowed": {"lookahead": LOOKAHEAD}, "streaming": bcl}
    tried = {policy: executed_by_row_length(policy, trial, lengths, **settings) for policy, settings in arms.items()}
    rows = []
    for ranks in RANKS:
        job = functools.partial(make_job, workload, ranks=ranks, steps=setting.steps(STEPS), kernel="segments")
        layouts = {
            policy: RowPackedLayout(length=best_row_length(of, trials_per_step=ranks // TRIAL_RANKS), rows_per_chunk=1)
            for policy, of in tried.items()
        }
        arrival, windowed, streaming = (
            run(policy, job(layout=layouts[policy]), **settings).arm() for policy, settings in arms.items()
        )
        figures: dict[str, Any] = {
            "workload": workload,
            "ranks": ranks,
            "windowed_executed": speedup(arrival, windowed),
            "streaming_executed": speedup(arrival, streaming),
            "windowed_estimated": arrival.step_cost / windowed.step_cost,
            "streaming_estimated": arrival.step_cost / streaming.step_cost,
        }
        if workload in GRAIN_CORPORA and ranks in GRAIN_RANKS:
            short = functools.partial(make_job, workload, ranks=ranks, steps=GRAIN_STEPS, kernel="segments")
            balanced = run("streaming", short(layout=layouts["streaming"]), **bcl).arm()
            figures["grain_records_cv"] = _records_cv(short())
            for algorithm in ("first-fit", "best-fit"):
                figures[f"grain_{algorithm}"] = speedup(run(f"grain-{algorithm}", short()).arm(), balanced)
        rows.append(figures)
    return rows


def _records_cv(job: Job) -> float:
    """Returns how much the number of records of a rank in a step varies under Grain's packing."""
    steps = grain_packed_steps(
        rank_lengths(job)[:2], algorithm="best_fit", row_length=job.bin_capacity, num_steps=job.steps, seed=job.seed
    )
    counts = np.array([[sum(map(len, rows)) for rows in of_rank] for of_rank in steps])
    return float(counts.std() / counts.mean())


def make(setting: Setting) -> Page:
    """Returns the page."""
    rows = [row for part in setting.map(functools.partial(_figures, setting=setting), WORKLOADS) for row in part]
    by_place = {(row["workload"], row["ranks"]): row for row in rows}
    order = sorted(WORKLOADS, key=lambda workload: by_place[workload, RANKS[-1]]["streaming_executed"])
    _draw(setting, by_place, order)
    heads = ("workload", *(f"{arm}, {ranks}" for arm in ("windowed", "streaming") for ranks in RANKS))
    cells = [
        (
            workload,
            *(
                f"{by_place[workload, ranks][f'{arm}_executed']:.3f}"
                for arm in ("windowed", "streaming")
                for ranks in RANKS
            ),
        )
        for workload in order
    ]
    means = {
        f"{arm}_{ranks}": geometric_mean([by_place[workload, ranks][f"{arm}_executed"] for workload in WORKLOADS])
        for arm in ("windowed", "streaming")
        for ranks in RANKS
    }
    cells.append(("**geometric mean**", *(f"**{value:.3f}**" for value in means.values())))
    grain_heads = (
        "workload",
        *(f"{algorithm}, {ranks}" for algorithm in ("first fit", "best fit") for ranks in GRAIN_RANKS),
        "CV of records",
    )
    grain_cells = [
        (
            workload,
            *(
                f"{by_place[workload, ranks][f'grain_{algorithm}']:.3f}"
                for algorithm in ("first-fit", "best-fit")
                for ranks in GRAIN_RANKS
            ),
            f"{by_place[workload, GRAIN_RANKS[0]]['grain_records_cv']:.2f}",
        )
        for workload in GRAIN_CORPORA
    ]
    summary = (
        "Against row-packed execution in order of arrival streaming BCL is "
        + ", ".join(f"{means[f'streaming_{ranks}']:.3f} times as fast at {ranks} ranks" for ranks in RANKS)
        + " in the geometric mean, executed cost on both sides."
    )
    text = f"""\
Speed-up of BCL (lookahead {LOOKAHEAD}; streaming with a cost prior) against the same packs of {PACK} records in
order of arrival: {setting.steps(STEPS)} steps, start and flush included, executed cost on both sides. Both put
several records in a row (first-fit decreasing), each with the row length that suits it best on other draws;
attention runs inside records only; cost of `{MODEL}`. Published, measured on an internal sequence workload and
1 to 4 nodes: {PAPER[0]:.3f} to {PAPER[1]:.3f}.

{summary} The gain grows with the number of ranks, because the slowest of more ranks is slower.

![speed-up against row-packed execution](packed.png)

{markdown_table(heads, cells)}

### Against Grain's own packing

Streaming BCL against `FirstFitPackIterDataset` and `BestFitPackIterDataset`, run through Grain with 64 open
rows as long as the longest record; a rank's rows are spread evenly over {GRAIN_STEPS} steps. (As it comes,
ranks get different numbers of rows from equal numbers of records, and end at different steps.) This evens
tokens instead of packs of a fixed record count: a step's rows are nearly full and equally many, so where the
cost is mostly linear it is a strong baseline. Its price is the last column: the records of a rank in a step
vary by as much, and with them the weight of a record in its gradient.

{markdown_table(grain_heads, grain_cells)}
"""
    return Page("packed", "(c) Against row-packed execution", text, {"rows": rows, "geometric_means": means}, summary)


def _draw(setting: Setting, by_place: dict[tuple[str, int], dict[str, Any]], order: Sequence[str]) -> None:
    figure, (ax,) = new_figure(1, width=8.5, height=5.4)
    shown = [order[0], order[len(order) // 4], order[len(order) // 2], order[3 * len(order) // 4], order[-1]]
    palette = ("#7f7f7f", "#0072B2", "#009E73", "#CC79A7", "#D55E00")
    for workload in order:
        values = [by_place[workload, ranks]["streaming_executed"] for ranks in RANKS]
        if workload in shown:
            ax.plot(RANKS, values, "o-", color=palette[shown.index(workload)], linewidth=2, markersize=5)
        else:
            ax.plot(RANKS, values, "-", color="#bbbbbb", linewidth=0.9, zorder=0)
    ax.axhspan(*PAPER, color=COLORS["windowed"], alpha=0.08, linewidth=0)
    ax.annotate(
        "published range", (RANKS[-1], PAPER[1]), xytext=(-2, -12), textcoords="offset points", fontsize=9, ha="right"
    )
    ax.set_xscale("log", base=2)
    ax.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
    ax.minorticks_off()
    ax.set_ylim(bottom=1.0)
    ax.set(
        xlabel="ranks",
        ylabel="times as fast as row-packed, in order of arrival",
        title=f"streaming BCL on {len(order)} workloads, executed cost",
    )
    figure.canvas.draw()
    ends = {w: (float(RANKS[-1]), by_place[w, RANKS[-1]]["streaming_executed"]) for w in shown}
    label_lines(ax, ends, {w: palette[i] for i, w in enumerate(shown)})
    save(figure, setting.directory, "packed.png")
