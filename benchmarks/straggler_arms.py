"""What each rank runs in each step, for every arm of `benchmarks.straggler`: the same records in as many steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcl_grain.baselines import mffd_steps
from bcl_grain.costs import token_cost
from bcl_grain.layouts import Layout, RowPackedLayout, RowPackedOneShapeLayout, Shape
from bcl_grain.planner import PlannerConfig
from bcl_grain.rows import cover_rows
from bcl_grain.simulate import plan_stream

IntArray = npt.NDArray[np.int64]

ARMS = ("arrival", "windowed", "streaming", "mffd", "spmd")
SPMD = "spmd"


class Block(NamedTuple):
    """Rows of one length, cut into chunks.

    Attributes:
        length: Tokens in a row.
        heights: Rows of each chunk; rows beyond `rows` are padding.
        rows: For each row the records in it, left to right.
    """

    length: int
    heights: list[int]
    rows: list[list[int]]


class Work(NamedTuple):
    """One rank's part of a step.

    Attributes:
        sizes: Lengths of the records, in tokens.
        blocks: Where they go.
    """

    sizes: list[int]
    blocks: list[Block]

    @property
    def shapes(self) -> list[Shape]:
        """(rows, length) of each chunk."""
        return [(height, block.length) for block in self.blocks for height in block.heights]


Schedule = list[list[Work]]
"""Work by [rank][step]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A job of two or more ranks.

    Attributes:
        layout: Packs to chunks, for all arms but SPMD.
        spmd_shape: The one shape that every rank runs in every step under SPMD.
        arms: Each arm's schedule.
    """

    layout: RowPackedLayout
    spmd_shape: Shape
    arms: dict[str, Schedule]

    @property
    def shapes(self) -> list[Shape]:
        """Every chunk shape of any arm."""
        return sorted({*self.layout.shapes, self.spmd_shape})


def make_plan(lengths: IntArray, layout: RowPackedLayout, *, pack_size: int, lookahead: int, seed: int = 0) -> Plan:
    """Plans every arm.

    All costs are tokens: a record takes its share of a row that is run whole, whatever it holds.

    Args:
        lengths: [ranks, steps * pack_size] lengths in order of arrival, none above the layout's `length`, which is its
            longest row.
        layout: Packs to chunks.
        pack_size: Records of a rank in a step.
        lookahead: Pool in steps.
        seed: Of the order.

    Raises:
        ValueError: If the arms differ in records or steps.
    """
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
    rows, arms[SPMD] = _one_shape(lengths, layout.length, settings)
    check_same_records(arms, lengths)
    return Plan(layout=layout, spmd_shape=(rows, layout.length), arms=arms)


def _planned(lengths: IntArray, layout: Layout, config: PlannerConfig) -> Schedule:
    cost = token_cost()
    return [
        [_laid_out(stream[pack].tolist(), layout) for pack in plan_stream(config, cost.of_length(stream), stream)]
        for stream in lengths
    ]


def _laid_out(sizes: list[int], layout: Layout) -> Work:
    blocks = layout.place(sizes)
    return Work(sizes, [Block(b.length, list(b.heights), [list(row) for row in b.rows]) for b in blocks])


def _pooled(lengths: IntArray, layout: RowPackedLayout, pack_size: int) -> Schedule:
    """Pooled MFFD: it sees all ranks' records of a step, and gives each rank as many bins, each a row."""
    flat = lengths.ravel()
    schedule: Schedule = []
    for steps in mffd_steps(lengths, capacity=layout.length, pack_size=pack_size):
        schedule.append([])
        for bins in steps:
            members = [i for row in bins for i in row]
            place = {i: k for k, i in enumerate(members)}
            rows = [[place[i] for i in row] for row in bins]
            schedule[-1].append(_cut(flat[members].tolist(), rows, layout))
    return schedule


def _cut(sizes: list[int], rows: list[list[int]], layout: RowPackedLayout) -> Work:
    """Cuts rows to the shortest of the layout's lengths that holds them, and into its chunks, as the layout does."""
    ladder = tuple(sorted({layout.rows_per_chunk, *layout.heights}))
    by_length: dict[int, list[list[int]]] = {length: [] for length in sorted({layout.length, *layout.lengths})}
    for row in rows:
        fill = sum(sizes[i] for i in row)
        by_length[min(length for length in by_length if length >= fill)].append(row)
    blocks = []
    for length, own in by_length.items():
        if length == layout.length:
            heights = list(cover_rows(len(own), ladder, layout.chunk_overhead_rows)) if own else []
        else:
            heights = [1] * len(own)
        if own:
            blocks.append(Block(length, heights, own))
    return Work(sizes, blocks)


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
        works = [work for of_rank in schedule for work in of_rank]
        placed = [work.sizes[i] for work in works for block in work.blocks for row in block.rows for i in row]
        if not np.array_equal(np.sort(np.array(placed, np.int64)), want):
            raise ValueError(f"arm {name!r} does not hold every record once")


def chunk_counts(schedule: Schedule, shapes: Sequence[Shape]) -> IntArray:
    """Returns how many chunks of each shape each rank runs in each step, [ranks, steps, shapes]."""
    return np.array(
        [[[work.shapes.count(shape) for shape in shapes] for work in works] for works in schedule], np.int64
    )
