"""What each rank runs in each step, for every arm of `benchmarks.straggler`: the same records in as many steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcl_grain.baselines import mffd_steps
from bcl_grain.costs import token_cost
from bcl_grain.layouts import Layout, RowPackedLayout, RowPackedOneShapeLayout
from bcl_grain.planner import PlannerConfig
from bcl_grain.rows import cover_rows
from bcl_grain.simulate import plan_stream

IntArray = npt.NDArray[np.int64]

ARMS = ("arrival", "windowed", "streaming", "mffd", "spmd")
SPMD = "spmd"


class Work(NamedTuple):
    """One rank's part of a step: records by row, and the rows of each chunk.

    Attributes:
        sizes: Lengths of the records, in tokens.
        rows: For each row the records in it, left to right.
        heights: Rows of each chunk; rows beyond `rows` are padding.
    """

    sizes: list[int]
    rows: list[list[int]]
    heights: list[int]


Schedule = list[list[Work]]
"""Work by [rank][step]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A job of two or more ranks.

    Attributes:
        length: Tokens in a row.
        heights: Rows that a chunk may have, for all arms but SPMD.
        spmd_rows: Rows of the one shape that every rank runs in every step under SPMD.
        arms: Each arm's schedule.
    """

    length: int
    heights: tuple[int, ...]
    spmd_rows: int
    arms: dict[str, Schedule]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Every chunk shape of any arm."""
        return [(rows, self.length) for rows in sorted({*self.heights, self.spmd_rows})]


def make_plan(
    lengths: IntArray,
    *,
    pack_size: int,
    lookahead: int,
    row_length: int,
    heights: tuple[int, ...],
    chunk_overhead_rows: float,
    seed: int = 0,
) -> Plan:
    """Plans every arm.

    All costs are tokens: a record takes its share of a row that is run whole, whatever it holds.

    Args:
        lengths: [ranks, steps * pack_size] lengths in order of arrival, none above `row_length`.
        pack_size: Records of a rank in a step.
        lookahead: Pool in steps.
        row_length: Tokens in a row.
        heights: Rows that a chunk may have.
        chunk_overhead_rows: See `RowPackedLayout`.
        seed: Of the order.

    Raises:
        ValueError: If the arms differ in records or steps.
    """
    layout = RowPackedLayout(
        length=row_length, rows_per_chunk=max(heights), heights=heights, chunk_overhead_rows=chunk_overhead_rows
    )
    settings: dict[str, Any] = {
        "pack_size": pack_size,
        "num_packs": lengths.shape[1] // pack_size,
        "lookahead": lookahead,
        "seed": seed,
    }
    arms = {
        "arrival": _planned(lengths, layout, PlannerConfig(policy="arrival", **settings)),
        "windowed": _planned(lengths, layout, PlannerConfig(policy="windowed", order="shuffled", **settings)),
        "streaming": _planned(lengths, layout, PlannerConfig(policy="streaming", order="aligned", **settings)),
        "mffd": _pooled(lengths, layout, pack_size),
    }
    rows, arms[SPMD] = _one_shape(lengths, row_length, settings)
    plan = Plan(length=row_length, heights=heights, spmd_rows=rows, arms=arms)
    check_same_records(plan.arms, lengths)
    return plan


def _planned(lengths: IntArray, layout: Layout, config: PlannerConfig) -> Schedule:
    cost = token_cost()
    return [
        [_laid_out(stream[pack].tolist(), layout) for pack in plan_stream(config, cost.of_length(stream), stream)]
        for stream in lengths
    ]


def _laid_out(sizes: list[int], layout: Layout) -> Work:
    (block,) = layout.place(sizes)
    return Work(sizes, [list(row) for row in block.rows], list(block.heights))


def _pooled(lengths: IntArray, layout: RowPackedLayout, pack_size: int) -> Schedule:
    """Pooled MFFD, a bin a row: it sees all ranks' records of a step, and gives each rank as many rows."""
    flat = lengths.ravel()
    ladder = tuple(sorted({layout.rows_per_chunk, *layout.heights}))
    schedule: Schedule = []
    for steps in mffd_steps(lengths, capacity=layout.length, pack_size=pack_size):
        schedule.append([])
        for bins in steps:
            members = [i for row in bins for i in row]
            place = {i: k for k, i in enumerate(members)}
            cover = cover_rows(len(bins), ladder, layout.chunk_overhead_rows)
            schedule[-1].append(Work(flat[members].tolist(), [[place[i] for i in row] for row in bins], list(cover)))
    return schedule


def _one_shape(lengths: IntArray, row_length: int, settings: dict[str, Any]) -> tuple[int, Schedule]:
    """Streaming within the fewest rows in which every pack fits; each pack is one chunk of that shape."""
    mean = settings["pack_size"] * float(lengths.mean())
    rows = max(1, int(mean // row_length))
    while True:
        config = PlannerConfig(
            policy="streaming", order="aligned", capacity=(rows, row_length), on_overflow="extra_chunk", **settings
        )
        try:
            return rows, _planned(lengths, RowPackedOneShapeLayout(rows=rows, length=row_length), config)
        except ValueError:  # a pack needs more rows
            rows += 1


def check_same_records(arms: dict[str, Schedule], lengths: IntArray) -> None:
    """Raises unless every arm has each record once, and as many steps on every rank.

    Raises:
        ValueError: If one differs; the message names it.
    """
    want = np.sort(lengths, axis=None)
    steps = len(next(iter(arms.values()))[0])
    for name, schedule in arms.items():
        if {len(works) for works in schedule} != {steps}:
            raise ValueError(f"arm {name!r} has {[len(works) for works in schedule]} steps by rank, not {steps}")
        placed = [work.sizes[i] for works in schedule for work in works for row in work.rows for i in row]
        if not np.array_equal(np.sort(np.array(placed, np.int64)), want):
            raise ValueError(f"arm {name!r} does not hold every record once")


def chunk_counts(schedule: Schedule, shapes: Sequence[tuple[int, int]]) -> IntArray:
    """Returns how many chunks of each shape each rank runs in each step, [ranks, steps, shapes]."""
    rows = [height for height, _ in shapes]
    return np.array([[[work.heights.count(r) for r in rows] for work in works] for works in schedule], np.int64)
