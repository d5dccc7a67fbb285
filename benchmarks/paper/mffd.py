"""(b) BCL against pooled MFFD packing on 13 fine-tuning corpora and 8 ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from bcl_grain.layouts import RowPackedLayout
from bcl_grain.plots import COLORS, new_figure, save
from bcl_grain.report import markdown_table, percent
from bcl_grain.row_lengths import row_lengths
from bcl_grain.workloads import nemo_rl_stand_ins
from benchmarks.paper.common import (
    MODEL,
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

RANKS = 8
STEPS = 1_000
TRIAL_STEPS = 400
LOOKAHEAD = 32
RECIPE_BINS = 8_192
WELL_FED_BINS = 7
PAPER = (1.050, 1.167)

REGIMES = {
    "seven": f"about {WELL_FED_BINS} bins a rank",
    "best": "MFFD's best bins",
    "recipe": f"bins of {RECIPE_BINS:,} tokens",
}


def _figures(corpus: str, *, setting: Setting) -> dict[str, Any]:
    sizes = population(corpus)
    longest = int(sizes.max())
    pack = 64 if 64 * sizes.mean() / longest >= 6 else 192
    trial = functools.partial(
        make_job, corpus, ranks=RANKS, steps=TRIAL_STEPS, pack_size=pack, seed=1, kernel="segments"
    )
    job = functools.partial(
        make_job, corpus, ranks=RANKS, steps=setting.steps(STEPS), pack_size=pack, kernel="segments"
    )
    prior = prior_of(corpus, pack)
    seven = max(longest, int(pack * sizes.mean() / WELL_FED_BINS))
    tried = {bins: run("mffd", trial(bin_tokens=bins)) for bins in _bins(longest, seven)}
    well_fed = {bins: tally for bins, tally in tried.items() if (tally.bins_per_rank or 0) >= 6}
    best = min(well_fed, key=lambda bins: well_fed[bins].arm().executed_step_cost or np.inf)
    best_real = min(well_fed, key=lambda bins: well_fed[bins].arm().step_cost)
    lengths = row_lengths(sizes, pack_size=pack, multiple_of=64, most=24)
    row_length = best_row_length(
        executed_by_row_length("streaming", trial(), lengths, lookahead=LOOKAHEAD, prior=prior)
    )
    laid_out = job(layout=_rows(row_length))
    arms = {
        "arrival": run("arrival", laid_out),
        "windowed": run("windowed", laid_out, lookahead=LOOKAHEAD),
        "streaming": run("streaming", laid_out, lookahead=LOOKAHEAD),
        "streaming_prior": run("streaming", laid_out, lookahead=LOOKAHEAD, prior=prior),
        "mffd_seven": run("mffd", job(bin_tokens=seven)),
        "mffd_best": run("mffd", job(bin_tokens=best)),
        "mffd_best_real": run("mffd", job(bin_tokens=best_real)),
        "mffd_recipe": run(
            "mffd",
            make_job(
                corpus, ranks=RANKS, steps=setting.steps(STEPS), kernel="segments", bin_tokens=max(longest, RECIPE_BINS)
            ),
        ),
    }
    recipe = make_job(corpus, ranks=RANKS, steps=setting.steps(STEPS), kernel="segments")
    if pack != 64:  # the recipe's global batch is 512 records
        recipe_prior = prior_of(corpus, 64)
        recipe_rows = RowPackedLayout(length=row_lengths(sizes, pack_size=64, multiple_of=64)[0], rows_per_chunk=1)
        recipe = make_job(corpus, ranks=RANKS, steps=setting.steps(STEPS), kernel="segments", layout=recipe_rows)
        arms["streaming_prior_recipe"] = run("streaming", recipe, lookahead=LOOKAHEAD, prior=recipe_prior)
    else:
        arms["streaming_prior_recipe"] = arms["streaming_prior"]
    figures = {
        name: {
            "real": arm.step_cost,
            "executed": arm.executed_step_cost,
            "waste": arm.sync_waste,
            "ideal": tally.ideal,
            "total_waste": arm.total_waste,
            "bins_per_rank": tally.bins_per_rank,
            "padding": tally.padding,
        }
        for name, tally, arm in ((name, tally, tally.arm()) for name, tally in arms.items())
    }
    bins = {"seven": seven, "best": best, "best_real": best_real, "recipe": max(longest, RECIPE_BINS)}
    return {
        "corpus": corpus,
        "pack_size": pack,
        "longest": longest,
        "row_length": row_length,
        "bin_tokens": bins,
        "arms": figures,
    }


def _rows(length: int) -> RowPackedLayout:
    return RowPackedLayout(length=length, rows_per_chunk=1)


def _bins(longest: int, seven: int) -> list[int]:
    """Returns capacities to try for MFFD: the longest record, a little more, and that for seven bins a rank."""
    return sorted({int(longest * factor) for factor in (1, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0)} | {seven})


def speedups(row: dict[str, Any], regime: str, arm: str = "streaming_prior") -> dict[str, float]:
    """Returns how many times as fast an arm is as MFFD in a regime, and what perfect balance would score."""
    arms = row["arms"]
    real = arms["mffd_best_real" if regime == "best" else f"mffd_{regime}"]
    executed = arms[f"mffd_{regime}"]
    bcl = arms["streaming_prior_recipe" if regime == "recipe" else arm]
    return {
        "real": real["real"] / bcl["real"],
        "executed": executed["executed"] / bcl["executed"],
        "perfect_real": real["real"] / real["ideal"],
        "perfect_executed": executed["executed"] / executed["ideal"],
        "bins": real["bins_per_rank"],
    }


def make(setting: Setting) -> Page:
    """Returns the page."""
    rows = setting.map(functools.partial(_figures, setting=setting), nemo_rl_stand_ins())
    rows.sort(key=lambda row: speedups(row, "seven")["real"])
    _draw(setting, rows)
    tables, aggregates = [], {}
    for regime, name in REGIMES.items():
        of_rows = [speedups(row, regime) for row in rows]
        keys = ("real", "perfect_real", "executed", "perfect_executed")
        aggregates[regime] = {
            key: {"minimum": min(s[key] for s in of_rows), "geometric_mean": geometric_mean([s[key] for s in of_rows])}
            for key in keys
        }
        heads = ("corpus", "pack", "bins a rank", "real tokens", "perfect", "executed", "perfect, no padding")
        cells = [
            (
                row["corpus"],
                str(64 if regime == "recipe" else row["pack_size"]),
                f"{s['bins']:.1f}",
                *(f"{s[key]:.3f}" for key in keys),
            )
            for row, s in zip(rows, of_rows, strict=True)
        ]
        cells += [
            (f"**{label}**", "", "", *(f"**{aggregates[regime][key][statistic]:.3f}**" for key in keys))
            for label, statistic in (("minimum", "minimum"), ("geometric mean", "geometric_mean"))
        ]
        tables.append(f"### {name[0].upper()}{name[1:]}\n\n{markdown_table(heads, cells)}\n")
    arms = ("arrival", "windowed", "streaming", "streaming_prior", "mffd_seven", "mffd_best_real")
    wastes = [
        (
            row["corpus"],
            str(row["row_length"]),
            *(percent(row["arms"][arm]["waste"]) for arm in arms),
            *(percent(row["arms"][arm]["total_waste"]) for arm in ("streaming_prior", "mffd_best")),
        )
        for row in rows
    ]
    seven, best = aggregates["seven"], aggregates["best"]
    summary = (
        f"With about {WELL_FED_BINS} bins a rank streaming BCL is {seven['real']['minimum']:.3f} times as fast as MFFD "
        f"or more, {seven['real']['geometric_mean']:.3f} in the geometric mean, on real tokens, and "
        f"{seven['executed']['minimum']:.3f} / {seven['executed']['geometric_mean']:.3f} on executed ones; against "
        f"MFFD's best bins {best['real']['minimum']:.3f} / {best['real']['geometric_mean']:.3f} (perfect balance: "
        f"{best['perfect_real']['minimum']:.3f} / {best['perfect_real']['geometric_mean']:.3f}) and "
        f"{best['executed']['minimum']:.3f} / {best['executed']['geometric_mean']:.3f}."
    )
    waste_heads = (
        "corpus",
        "row",
        "arrival",
        "windowed",
        "streaming",
        "with prior",
        "MFFD, 7 bins",
        "MFFD, best",
        "total: streaming",
        "total: MFFD, best",
    )
    text = f"""\
Speed-up of streaming BCL (rank-local, no communication, with a cost prior) against pooled modified first-fit
decreasing, which sees all ranks' records of a step: {RANKS} ranks, {setting.steps(STEPS):,} steps, start and
flush included, lookahead {LOOKAHEAD}, independent draws, cost of `{MODEL}`. The corpora stand in for the 13
NeMo-RL ones; they are not those corpora. Published, measured on 8 GPUs: {PAPER[0]:.3f} to {PAPER[1]:.3f}.

*Real tokens*: what the records of the dearest rank cost, on both sides. *Executed*: padding included on both
sides, attention inside records only (as fused kernels for packed rows compute it): MFFD's bins are padded to
their capacity, BCL's rows to their length. *Perfect*: what equal packs without padding would score. Each side
has the best configuration found on other draws ({TRIAL_STEPS} steps): BCL its row length, MFFD its bin capacity
among those that give a rank at least 6 bins. Packs hold 64 records, or 192 where the longest record forbids 6
bins.

{summary}

How much there is to gain depends on the bins: MFFD balances by their number alone, so it does better the
smaller they are. Bins as short as the longest record are its best case; for short corpora they hold some 500
tokens, too few to keep an accelerator busy, and nobody runs them so. Both are given.

![speed-up against MFFD](mffd.png)

{chr(10).join(tables)}
### Waste of each arm

Sync waste, and the last two columns total waste. `row`: tokens in a row of BCL's layout.

{markdown_table(waste_heads, wastes)}
"""
    return Page("mffd", "(b) Against pooled MFFD", text, {"rows": rows, "aggregates": aggregates}, summary)


def _draw(setting: Setting, rows: Sequence[dict[str, Any]]) -> None:
    figure, axes = new_figure(2, width=6.4, height=5.2)
    places = np.arange(len(rows))
    styles = (("seven", COLORS["streaming"], "o"), ("best", COLORS["windowed"], "s"))
    for ax, kind in zip(axes, ("real", "executed"), strict=True):
        for regime, color, marker in styles:
            values = [speedups(row, regime) for row in rows]
            ax.plot(
                [v[kind] for v in values], places, marker, color=color, markersize=6, label=f"against {REGIMES[regime]}"
            )
            ax.plot(
                [v[f"perfect_{kind}"] for v in values],
                places,
                marker,
                markerfacecolor="none",
                color=color,
                markersize=6,
                alpha=0.6,
                label="   perfect balance" + (", no padding" if kind == "executed" else ""),
            )
        ax.axvspan(*PAPER, color="black", alpha=0.07, linewidth=0)
        ax.axvline(1.0, color="black", linewidth=0.8)
        ax.set_yticks(places, [row["corpus"] for row in rows], fontsize=8)
        ax.set(xlabel="times as fast as MFFD (published range shaded)", title=f"{kind} tokens on both sides")
        ax.set_ylim(-3.2, len(rows) - 0.4)
        ax.legend(fontsize=8, loc="lower right", frameon=False)
    save(figure, setting.directory, "mffd.png")
