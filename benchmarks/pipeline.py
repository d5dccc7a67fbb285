"""Records per second through a Grain pipeline, arms in turn in one run: `python -m benchmarks.pipeline`.

In-memory records of log-normal length (mean about 520 tokens), no threads, so that a ratio is one of work done:
  batch+pad    source -> Grain's batch, padded into preallocated arrays
  bcl+pad      source -> BCL (windowed, pool 512) -> PaddedLayout
  bcl+rows     source -> BCL -> RowPackedLayout (denser: fewer tokens to compute on)
  batch+rows   source -> Grain's batch(list) -> RowPackedLayout
  first-fit    source -> Grain's first-fit packing into rows
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

import bcl_grain as bcl
from bcl_grain.layouts import PaddedLayout, RowPackedLayout
from benchmarks.result import write_result

LENGTH = 2048
PACK_SIZE = 64


def make_records(count: int) -> list[dict[str, Any]]:
    """Returns records of log-normal length, at most LENGTH tokens."""
    lengths = np.random.default_rng(0).lognormal(5.9, 0.9, count).clip(8, LENGTH).astype(int)
    return [{"tokens": np.ones(n, np.int32), "loss_mask": np.ones(n, np.float32)} for n in lengths]


def pad_batch(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a user writes by hand: preallocated arrays, one slice a record."""
    tokens = np.zeros((len(records), LENGTH), np.int32)
    mask = np.zeros((len(records), LENGTH), np.float32)
    segments = np.zeros((len(records), LENGTH), np.int32)
    positions = np.zeros((len(records), LENGTH), np.int32)
    ramp = np.arange(LENGTH, dtype=np.int32)
    for row, record in enumerate(records):
        n = len(record["tokens"])
        tokens[row, :n] = record["tokens"]
        mask[row, :n] = record["loss_mask"]
        segments[row, :n] = 1
        positions[row, :n] = ramp[:n]
    return {"tokens": tokens, "loss_mask": mask, "tokens_segment_ids": segments, "tokens_positions": positions}


def arms(records: list[dict[str, Any]]) -> dict[str, Callable[[], Any]]:
    """Returns name -> pipeline."""

    def source() -> Any:
        return grain.MapDataset.source(records).to_iter_dataset(
            grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        )

    def packs() -> Any:
        return source().pipe(
            bcl.BatchCostLookaheadIterDataset,
            pack_size=PACK_SIZE,
            lookahead=8,
            cost_fn=bcl.TransformerCost(1.0, 1 / 30_000),
        )

    rows = RowPackedLayout(length=LENGTH, rows_per_chunk=2)
    return {
        "source": source,
        "batch+pad": lambda: source().batch(PACK_SIZE, batch_fn=pad_batch),
        "bcl": packs,
        "bcl+pad": lambda: packs().map(PaddedLayout(pack_size=PACK_SIZE, length=LENGTH)),
        "batch+rows": lambda: source().batch(PACK_SIZE, batch_fn=list).map(rows),
        "bcl+rows": lambda: packs().map(rows),
        "first-fit": lambda: grain.experimental.FirstFitPackIterDataset(
            source(), length_struct={"tokens": LENGTH, "loss_mask": LENGTH}, num_packing_bins=16
        ),
    }


def main(count: int = 12_800, rounds: int = 5) -> None:
    """Prints medians and ratios, and writes pipeline.json."""
    records = make_records(count)
    seconds: dict[str, list[float]] = {name: [] for name in arms(records)}
    for _ in range(rounds):
        for name, make in arms(records).items():
            gc.collect()
            begin = time.perf_counter()
            for _element in make():
                pass
            seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{name:12s} {1e6 * value / count:6.1f} us/record  {count / value:9.0f} records/s")
    ratios = {
        "bcl+pad / batch+pad": medians["batch+pad"] / medians["bcl+pad"],
        "bcl+rows / batch+rows": medians["batch+rows"] / medians["bcl+rows"],
        "bcl+rows / batch+pad": medians["batch+pad"] / medians["bcl+rows"],
        "bcl+rows / first-fit": medians["first-fit"] / medians["bcl+rows"],
    }
    for name, value in ratios.items():
        print(f"records/s {name}: {value:.2f}")
    us = {name: 1e6 * value / count for name, value in medians.items()}
    write_result("pipeline", {"us_per_record": us, "records_per_second_ratios": ratios, "records": count})


if __name__ == "__main__":
    main()
