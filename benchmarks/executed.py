"""Total waste of row-packed layouts that `fit_rows` proposes: `python -m benchmarks.executed`.

Executed cost, padding and dense attention over whole rows charged, against useful cost: 1,000 steps of 8 ranks, pack
64, lookahead 8, start and flush included, the corpora and the cost of `benchmarks.streaming`. Beside it the same
with at most 3 shapes, and the shortest single row length that holds every record. About 2 minutes on two idle
cores; `--quick` takes 60 steps.
"""

from __future__ import annotations

import argparse
import concurrent.futures
from typing import Any

import numpy as np
import numpy.typing as npt

from bcl_grain.layouts import Layout, RowPackedLayout
from bcl_grain.metrics import padding_fraction, waste
from bcl_grain.planner import PlannerConfig
from bcl_grain.shapes import fit_rows
from bcl_grain.simulate import chunks_cost, pack_costs, plan_stream
from benchmarks.result import write_result
from benchmarks.streaming import CORPORA, COST, LENGTHS, RANKS, corpus_lengths, exact_prior

PACK_SIZE, LOOKAHEAD = 64, 8


def layouts_of(lengths: npt.NDArray[np.int64]) -> dict[str, Layout]:
    """Returns the layouts to judge."""
    shortest = -(-int(lengths.max()) // 128) * 128
    return {
        "fit_rows": fit_rows(lengths, pack_size=PACK_SIZE, cost=COST),
        "fit_rows, 3 shapes": fit_rows(lengths, pack_size=PACK_SIZE, cost=COST, most_shapes=3),
        "one length": RowPackedLayout(length=shortest, rows_per_chunk=1),
    }


def corpus_figures(name: str, steps: int) -> dict[str, Any]:
    """Returns waste and padding of one corpus, by policy and layout."""
    lengths = corpus_lengths(name)
    layouts = layouts_of(lengths)
    draws = np.random.default_rng([3, steps]).choice(lengths, (RANKS, PACK_SIZE * steps))
    prior = exact_prior(np.asarray(COST.of_length(lengths.astype(np.float64))), PACK_SIZE, np.random.default_rng(0))
    arms: dict[str, dict[str, Any]] = {
        "arrival": {"policy": "arrival"},
        "windowed": {"policy": "windowed", "order": "shuffled"},
        "streaming": {},
        "streaming, prior": {"prior": prior},
    }
    figures: dict[str, Any] = {
        "layouts": {label: [list(shape) for shape in layout.shapes] for label, layout in layouts.items()}
    }
    for arm, settings in arms.items():
        config = PlannerConfig(pack_size=PACK_SIZE, lookahead=LOOKAHEAD, num_packs=steps, **settings)
        costs = [np.asarray(COST.of_length(stream.astype(np.float64)), np.float64) for stream in draws]
        packs = [plan_stream(config, stream) for stream in costs]
        useful = np.stack([pack_costs(p, c) for p, c in zip(packs, costs, strict=True)])
        figures[arm] = {"sync_waste": waste(useful)}
        for label, layout in layouts.items():
            shapes = [[layout.chunk_shapes(stream[p]) for p in ps] for stream, ps in zip(draws, packs, strict=True)]
            executed = np.array([[chunks_cost(COST, chunks, []) for chunks in of_rank] for of_rank in shapes])
            tokens = sum(rows * length for of_rank in shapes for chunks in of_rank for rows, length in chunks)
            figures[arm][label] = {
                "total_waste": float(executed.max(axis=0).mean() / useful.mean() - 1),
                "padding": padding_fraction(tokens, int(draws.sum())),
            }
    return figures


def main() -> None:
    """Prints the table and writes executed.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="60 steps: a check that it runs")
    quick = parser.parse_args().quick
    if not LENGTHS.is_dir():
        print(f"skipped: no real lengths at {LENGTHS}")
        return
    steps = 60 if quick else 1000
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        rows = dict(zip(CORPORA, pool.map(corpus_figures, CORPORA, [steps] * len(CORPORA)), strict=True))
    arms = ("arrival", "windowed", "streaming", "streaming, prior")
    for label in ("fit_rows", "fit_rows, 3 shapes", "one length"):
        print(f"\n{label}: total waste (padding)")
        print(f"{'':22s}" + "".join(f"{arm:>20s}" for arm in arms) + "   row lengths")
        for name, figures in rows.items():
            cells = [figures[arm][label] for arm in arms]
            lengths = [length for _, length in figures["layouts"][label]]
            print(
                f"{name:22s}"
                + "".join(f"{cell['total_waste']:11.4f} ({cell['padding']:.3f}) " for cell in cells)
                + f"   {lengths}"
            )
        for arm in arms:
            met = sum(figures[arm][label]["total_waste"] <= 0.06 for figures in rows.values())
            print(f"  {arm}: at most 0.06 on {met} of {len(rows)}")
    if not quick:
        write_result("executed", {"steps": steps, "ranks": RANKS, "corpora": rows})


if __name__ == "__main__":
    main()
