"""(e) Waste against the number of ranks, and against lookahead."""

from __future__ import annotations

import functools
import resource
import time
from typing import Any

from bcl_grain.plots import label_lines, new_figure, save
from bcl_grain.report import markdown_table, percent
from benchmarks.paper.common import (
    MODEL,
    PACK,
    STEADY,
    STEADY_JOB,
    Page,
    Setting,
    make_job,
    make_steady_job,
    prior_of,
    waste,
)
from benchmarks.paper.common import run_policy as run

CORPUS = "alpaca_eval_outputs"
"""The median of the 13 fine-tuning corpora by the variation of its lengths."""
RANKS = (8, 32, 128, 512, 4_096)
STEPS = 300
MIDDLE = (100, 250)
LOOKAHEAD = 8
DEVICES = 8
LOOKAHEADS = (2, 4, 8, 16, 32, 64, 128)

ARMS: dict[str, tuple[str, int, bool]] = {
    "arrival": ("arrival", 1, False),
    "windowed": ("windowed", 1, False),
    "streaming": ("streaming", 1, False),
    "streaming, prior": ("streaming", 1, True),
    "windowed, pooled": ("windowed", DEVICES, False),
    "streaming, prior, pooled": ("streaming", DEVICES, True),
}
"""Policy, ranks that share a stream's pool, and whether it has a prior."""
LINE_COLORS = dict(zip(ARMS, ("#7f7f7f", "#0072B2", "#D55E00", "#CC79A7", "#009E73", "#B38600"), strict=True))


def _settings(arm: str, lookahead: int) -> dict[str, Any]:
    policy, _, has_prior = ARMS[arm]
    if policy == "arrival":
        return {}
    return {"lookahead": lookahead, **({"prior": prior_of(CORPUS)} if has_prior else {})}


def _by_ranks(arm: str, ranks: int, setting: Setting) -> dict[str, Any]:
    policy, pooled, _ = ARMS[arm]
    steps = setting.steps(STEPS, least=150)
    first, last = steps * MIDDLE[0] // STEPS, steps * MIDDLE[1] // STEPS
    job = make_job(CORPUS, ranks=ranks, steps=steps, packs_per_step=pooled, first_step=first, last_step=last)
    begin = time.monotonic()
    tally = run(policy, job, workers=setting.workers if ranks >= 512 else 1, **_settings(arm, LOOKAHEAD))
    seconds = time.monotonic() - begin
    whole = float(tally.step_max.sum() / (tally.step_sum.sum() / tally.ranks)) - 1
    return {"arm": arm, "ranks": ranks, "middle_waste": tally.arm().sync_waste, "job_waste": whole, "seconds": seconds}


def _by_lookahead(item: tuple[str, int], *, setting: Setting) -> dict[str, Any]:
    arm, lookahead = item
    policy, pooled, _ = ARMS[arm]
    job = make_steady_job(CORPUS, ranks=8, setting=setting, packs_per_step=pooled)
    tally = run(policy, job, **_settings(arm, lookahead))
    return {"arm": arm, "lookahead": lookahead, "steady_waste": tally.arm().sync_waste}


def make(setting: Setting) -> Page:
    """Returns the page."""
    sweep = setting.map(
        functools.partial(_by_lookahead, setting=setting),
        [(arm, k) for arm in ("windowed", "streaming", "streaming, prior") for k in LOOKAHEADS] + [("arrival", 1)],
    )
    by_ranks = []
    for ranks in RANKS if setting.scale == 1 else RANKS[:-1]:
        for arm in ARMS:
            by_ranks.append(_by_ranks(arm, ranks, setting))
            print(f"  {arm}, {ranks} ranks: {by_ranks[-1]['seconds']:.0f} s", flush=True)
    place = {(row["arm"], row["ranks"]): row for row in by_ranks}
    most = max(row["ranks"] for row in by_ranks)
    _draw(setting, place, sweep)
    heads = ("arm", *(f"{ranks:,} ranks" for ranks in RANKS))
    tables = {
        key: markdown_table(
            heads,
            [(arm, *(percent(place[arm, r][key], 2) if (arm, r) in place else "-" for r in RANKS)) for arm in ARMS],
        )
        for key in ("middle_waste", "job_waste")
    }
    by_lookahead = {(row["arm"], row["lookahead"]): row["steady_waste"] for row in sweep}
    lookahead_table = markdown_table(
        ("arm", *(f"{k}" for k in LOOKAHEADS)),
        [
            (arm, *(percent(by_lookahead[arm, k], 2) for k in LOOKAHEADS))
            for arm in ("windowed", "streaming", "streaming, prior")
        ],
    )
    streaming, windowed = place["streaming, prior", most], place["windowed", 8]
    peak_gib = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        + setting.workers * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    ) / 2**20
    summary = (
        f"Streaming with a prior wastes {percent(streaming['middle_waste'], 2)} at {most:,} ranks, windowed "
        f"{percent(windowed['middle_waste'], 2)} at 8 with the same lookahead of {LOOKAHEAD}."
    )
    text = f"""\
Sync waste on `{CORPUS}`, the median of the 13 corpora by the variation of its lengths: pack {PACK}, independent
draws, cost of `{MODEL}`. *Pooled*: a host plans one pool for its 8 devices.

{summary} Simulating {STEPS} steps at {most:,} ranks ({most * STEPS * PACK / 1e6:.0f} million records) took
{streaming["seconds"]:.0f} s with {setting.workers} processes and at most {peak_gib:.1f} GiB together, by the
planner that the Grain transformation uses.

![waste against ranks and lookahead](scale.png)

### Ranks, lookahead {LOOKAHEAD}, a job of {STEPS} steps

In the middle of the job, steps {MIDDLE[0]} to {MIDDLE[1]}:

{tables["middle_waste"]}

The whole job, start and flush included:

{tables["job_waste"]}

### Lookahead, 8 ranks, steady (steps {STEADY[0]:,} to {STEADY[1]:,})

Arrival: {percent(by_lookahead["arrival", 1], 2)}.

{lookahead_table}
"""
    data = {"corpus": CORPUS, "ranks": by_ranks, "lookahead": sweep, "peak_gib": peak_gib}
    return Page("scale", "(e) Scale and lookahead", text, data, summary)


def make_steady(setting: Setting) -> Page:
    """Returns the page of the steady waste of many ranks, which takes too long for the others' company."""
    few, many = 8, RANKS[-1] if setting.scale == 1 else RANKS[-2]
    rows: list[dict[str, Any]] = []
    for arm, ranks in (("windowed", few), ("streaming, prior", few), ("streaming, prior", many)):
        begin = time.monotonic()
        job = make_steady_job(CORPUS, ranks=ranks, setting=setting)
        tally = run(ARMS[arm][0], job, workers=setting.workers, **_settings(arm, LOOKAHEAD))
        seconds = time.monotonic() - begin
        rows.append({"arm": arm, "ranks": ranks, "steady_waste": waste(tally), "seconds": seconds})
        print(f"  {arm}, {ranks} ranks: {seconds:.0f} s", flush=True)
    table = markdown_table(
        ("arm", "ranks", "steady waste"),
        [(row["arm"], f"{row['ranks']:,}", percent(row["steady_waste"], 2)) for row in rows],
    )
    summary = (
        f"Steady, streaming with a prior wastes {percent(rows[2]['steady_waste'], 2)} at {many:,} ranks, windowed "
        f"{percent(rows[0]['steady_waste'], 2)} at {few} with the same lookahead of {LOOKAHEAD}."
    )
    text = f"""\
As in (e), but steady: steps {STEADY[0]:,} to {STEADY[1]:,} of a job of {setting.steps(STEADY_JOB):,} steps.

{summary} The last row is {many * setting.steps(STEADY_JOB) * PACK / 1e6:,.0f} million records.

{table}
"""
    return Page("steady", "(e, steady) Many ranks in the long run", text, {"rows": rows}, summary)


def _draw(setting: Setting, place: dict[tuple[str, int], dict[str, Any]], sweep: list[dict[str, Any]]) -> None:
    figure, (left, right) = new_figure(2, width=6.6, height=5.0)
    ends = {}
    for arm in ARMS:
        points = [(ranks, 100 * place[arm, ranks]["middle_waste"]) for ranks in RANKS if (arm, ranks) in place]
        left.plot(*zip(*points, strict=True), "o-", color=LINE_COLORS[arm], markersize=4, linewidth=1.8)
        ends[arm] = points[-1]
    left.set(
        xlabel="ranks",
        ylabel="waste, % of the ideal step time",
        title=f"steps {MIDDLE[0]} to {MIDDLE[1]} of {STEPS}, lookahead {LOOKAHEAD}",
    )
    right_ends = {}
    for arm in ("windowed", "streaming", "streaming, prior"):
        points = [(row["lookahead"], 100 * row["steady_waste"]) for row in sweep if row["arm"] == arm]
        right.plot(*zip(*points, strict=True), "o-", color=LINE_COLORS[arm], markersize=4, linewidth=1.8)
        right_ends[arm] = points[-1]
    right.set(xlabel="lookahead, steps", title=f"8 ranks, steady: steps {STEADY[0]:,} to {STEADY[1]:,}")
    for ax, ticks in ((left, RANKS), (right, LOOKAHEADS)):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        ax.minorticks_off()
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    figure.canvas.draw()
    label_lines(left, ends, LINE_COLORS)
    label_lines(right, right_ends, LINE_COLORS)
    save(figure, setting.directory, "scale.png")
