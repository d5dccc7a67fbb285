"""What a static shape costs, and how often no plan keeps to it: `python -m benchmarks.capacity`.

For each corpus, `fit_shape` proposes the shape for packs of 64 from a sample of 10,000 lengths: with rows
as long as the longest record, up to 4 times as long, and with one row for the whole pack. Every rank then
plans an independent draw from the corpus with this capacity. A cycle fails if any of its packs is over the capacity;
with `on_overflow="extra_chunk"` such a pack takes two chunks, which is counted as padding. The flush is a stream's last
cycle, when nothing is left to exchange with. Reads real lengths from `../shared/data/lengths` beside the checkout.
About 15 minutes on two busy cores; `--quick` takes 2 ranks.
"""

from __future__ import annotations

import argparse
import collections
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from bcl_grain.capacity import Capacity
from bcl_grain.layouts import RowPackedLayout
from bcl_grain.planner import PlannerConfig
from bcl_grain.shapes import fit_shape
from bcl_grain.simulate import pack_costs, plan_cycles
from benchmarks.result import write_result
from benchmarks.streaming import CORPORA, COST, LENGTHS

IntArray = npt.NDArray[np.int64]

PACK_SIZE, LOOKAHEAD, NUM_PACKS = 64, 8, 1000
SAMPLE = 10_000
LENGTHS_TRIED = 40
ROWS = {"shortest rows": 1.0, "up to 4 records": 4.0, "one row": None}
MARGIN = 0.02
POLICIES = {"windowed": "shuffled", "streaming": "aligned"}


def corpus_lengths(name: str) -> IntArray:
    """Returns the length of every record of a corpus, in tokens."""
    with np.load(LENGTHS / f"{name}.npz") as table:
        lengths = table["len"] if "len" in table else table["prompt_len"] + table["response_len"]
    return np.maximum(1, lengths).astype(np.int64)


def shapes_of(lengths: IntArray, rng: np.random.Generator) -> dict[str, tuple[int, int]]:
    """Returns the proposed (rows, length) for each of `ROWS`."""
    sample = rng.choice(lengths, SAMPLE)
    longest = int(lengths.max())
    whole = int(np.ceil((1 + MARGIN) * PACK_SIZE * sample.mean()))
    shapes = {}
    for name, factor in ROWS.items():
        if factor is None:
            shapes[name] = (1, max(whole, longest))
            continue
        grid = 8 if factor == 1 else max(8, int(longest * (factor - 1) / LENGTHS_TRIED) // 8 * 8)
        shortest = -(-longest // grid) * grid
        shapes[name] = fit_shape(
            sample,
            max_length=longest,
            pack_size=PACK_SIZE,
            margin=MARGIN,
            multiple_of=grid,
            max_row_length=max(shortest, int(factor * longest)),
        )
    return shapes


def run(policy: str, capacity: Capacity | None, streams: IntArray, shape: tuple[int, int]) -> dict[str, Any]:
    """Plans every stream; returns the figures of all packs, with and without the flush."""
    config = PlannerConfig(
        pack_size=PACK_SIZE,
        lookahead=LOOKAHEAD,
        policy=policy,  # type: ignore[arg-type]
        order=POLICIES[policy],  # type: ignore[arg-type]
        num_packs=NUM_PACKS,
        capacity=capacity,
        on_overflow="extra_chunk",
    )
    layout = RowPackedLayout(rows_per_chunk=shape[0], length=shape[1])
    count: collections.Counter[str] = collections.Counter()
    costs_of_packs = []
    begin = time.process_time()
    plans = [list(plan_cycles(config, COST.of_length(lengths), lengths)) for lengths in streams]
    planning_seconds = time.process_time() - begin
    for lengths, cycles in zip(streams, plans, strict=True):
        for number, cycle in enumerate(cycles):
            chunks = [len(layout.chunk_shapes(lengths[pack])) for pack in cycle.packs]
            part = "flush" if number == len(cycles) - 1 else "before"
            count[f"cycles_{part}"] += 1
            count[f"cycles_over_{part}"] += max(chunks) > 1
            count[f"packs_over_{part}"] += sum(chunk > 1 for chunk in chunks)
            count[f"tokens_{part}"] += sum(int(lengths[pack].sum()) for pack in cycle.packs)
            count[f"executed_{part}"] += sum(chunks) * shape[0] * shape[1]
            count["overdue"] += cycle.overdue
        costs_of_packs.append(pack_costs([pack for cycle in cycles for pack in cycle.packs], COST.of_length(lengths)))
    costs = np.array(costs_of_packs)
    useful = count["tokens_before"] + count["tokens_flush"]
    executed = count["executed_before"] + count["executed_flush"]
    return {
        "padding_before_flush": round(1 - count["tokens_before"] / count["executed_before"], 4),
        "padding": round(1 - useful / executed, 4),
        **{name: count[name] for name in sorted(count) if "over" in name or "cycles" in name},
        "estimated_waste": round(float(1 - costs.mean() / costs.max(axis=0).mean()), 4),
        "planning_us_per_record": round(1e6 * planning_seconds / streams.size, 2),
    }


def measure(name: str, ranks: int) -> dict[str, Any]:
    """Returns the figures of a corpus for every shape, policy, with and without capacity."""
    lengths = corpus_lengths(name)
    rng = np.random.default_rng(1)
    streams = rng.choice(lengths, (ranks, PACK_SIZE * NUM_PACKS))
    mean = PACK_SIZE * float(lengths.mean())
    figures: dict[str, Any] = {}
    for rows, shape in shapes_of(lengths, rng).items():
        capacity: Capacity = shape[1] if shape[0] == 1 else shape
        arms = {
            f"{policy}{', capacity' if limit else ''}": run(policy, limit, streams, shape)
            for policy in POLICIES
            for limit in (None, capacity)
        }
        figures[rows] = {"shape": shape, "tokens_of_mean": round(shape[0] * shape[1] / mean, 4), "arms": arms}
    return figures


def main() -> None:
    """Prints one line per corpus, shape and arm, then how many corpora keep the targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 ranks instead of 8")
    ranks = 2 if parser.parse_args().quick else 8
    if not LENGTHS.is_dir():
        raise SystemExit(f"no lengths at {LENGTHS}")
    corpora = {}
    for name in CORPORA:
        corpora[name] = measure(name, ranks)
        for rows, figures in corpora[name].items():
            for arm, values in figures["arms"].items():
                print(
                    f"{name:20} {rows:16} {figures['shape']!s:13} {figures['tokens_of_mean']:.3f}  {arm:19} "
                    f"padding {values['padding_before_flush']:.1%} / {values['padding']:.1%}  cycles over "
                    f"{values['cycles_over_before']}/{values['cycles_before']} + {values['cycles_over_flush']}"
                    f"/{values['cycles_flush']}  waste {values['estimated_waste']:.3f}  "
                    f"{values['planning_us_per_record']} us/record",
                    flush=True,
                )
    summary = _summary(corpora)
    for line, numbers in summary.items():
        print(f"{line:40} {numbers}")
    cost = {"per_token": COST.per_token, "per_token_squared": COST.per_token_squared}
    setup = {"pack_size": PACK_SIZE, "lookahead": LOOKAHEAD, "num_packs": NUM_PACKS, "ranks": ranks, "cost": cost}
    write_result("capacity", {"setup": setup, "summary": summary, "corpora": corpora})


def _summary(corpora: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Returns, for each shape and arm, on how many corpora padding is low, and how many cycles are over."""
    summary: dict[str, dict[str, int]] = {}
    first = next(iter(corpora.values()))
    for rows, figures in first.items():
        for arm in figures["arms"]:
            values = [corpus[rows]["arms"][arm] for corpus in corpora.values()]
            summary[f"{rows}, {arm}"] = {
                "corpora_padding_at_most_4_before_flush": sum(v["padding_before_flush"] <= 0.04 for v in values),
                "corpora_padding_at_most_8": sum(v["padding"] <= 0.08 for v in values),
                "corpora_no_cycle_over_before_flush": sum(not v["cycles_over_before"] for v in values),
                "cycles_over_before_flush": sum(v["cycles_over_before"] for v in values),
                "cycles_before_flush": sum(v["cycles_before"] for v in values),
                "flushes_over": sum(v["cycles_over_flush"] for v in values),
                "flushes": sum(v["cycles_flush"] for v in values),
            }
    return summary


if __name__ == "__main__":
    main()
