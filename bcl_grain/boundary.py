"""The memory-feasibility boundary: which pack sizes fit a device under which cap, and what the cap takes away.

One outlier can break memory whatever the plan, so a cap comes first; what is left, balancing makes even. For each cap
and pack size four ways to run a pack are judged by the chunk that they need:

    padded              one record a row, all rows as long as the cap
    one-shape arrival   rows filled with several records, in one chunk that holds every pack in order of arrival
    one-shape windowed  the same for packs of balanced cost
    chunks              rows filled with several records, run one row at a time
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bcl_grain.caps import fit_cap
from bcl_grain.costs import TransformerCost
from bcl_grain.memory import GIB, MemoryModel
from bcl_grain.options import round_up
from bcl_grain.planner import PlannerConfig, Policy
from bcl_grain.rows import first_fit_decreasing
from bcl_grain.simulate import plan_stream

IntArray = npt.NDArray[np.int64]

PERCENTILES = (90.0, 95.0, 99.0, 99.9)
PACK_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LAYOUTS = ("padded", "one-shape arrival", "one-shape windowed", "chunks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapEffect:
    """What a cap touches, as shares of the whole corpus.

    Attributes:
        name: "none", or its percentile, such as "p99".
        cap: The longest record that passes.
        records: Share of records that are longer.
        tokens_truncated: Share of tokens that go if these are cut to the cap.
        tokens_dropped: Share of tokens that go if these are left out.
        cost_truncated: Share of cost that goes if these are cut to the cap.
        cost_dropped: Share of cost that goes if these are left out.
    """

    name: str
    cap: int
    records: float
    tokens_truncated: float
    tokens_dropped: float
    cost_truncated: float
    cost_dropped: float


def cap_effect(lengths: IntArray, cost: TransformerCost, name: str, cap: int) -> CapEffect:
    """Returns what a cap touches.

    >>> cap_effect(np.array([1, 1, 2, 4]), TransformerCost(1.0), "2", 2).tokens_dropped
    0.5
    """
    above = lengths > cap
    costs, capped = cost.of_length(lengths), cost.of_length(np.minimum(lengths, cap))
    return CapEffect(
        name=name,
        cap=cap,
        records=float(above.mean()),
        tokens_truncated=float((lengths[above] - cap).sum() / lengths.sum()),
        tokens_dropped=float(lengths[above].sum() / lengths.sum()),
        cost_truncated=float((costs - capped).sum() / costs.sum()),
        cost_dropped=float(costs[above].sum() / costs.sum()),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One pack size under one cap, in one layout.

    Attributes:
        cap: The cap's name.
        pack_size: Records in a pack.
        layout: One of `LAYOUTS`.
        rows: Rows of the chunk that is needed.
        length: Tokens in a row.
        peak_gib: What it takes, by the memory model.
        fits: Whether that is within the budget, its reserve kept.
    """

    cap: str
    pack_size: int
    layout: str
    rows: int
    length: int
    peak_gib: float
    fits: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boundary:
    """The caps, and every cell of the table."""

    caps: tuple[CapEffect, ...]
    cells: tuple[Cell, ...]

    def largest_pack(self, cap: str, layout: str) -> int | None:
        """Returns the largest pack size tried that fits together with all smaller ones; None where none does."""
        largest = None
        for cell in (c for c in self.cells if (c.cap, c.layout) == (cap, layout)):
            if not cell.fits:
                break
            largest = cell.pack_size
        return largest


def memory_boundary(
    lengths: IntArray,
    cost: TransformerCost,
    memory: MemoryModel,
    *,
    budget_gib: float,
    lookahead: int = 32,
    pack_sizes: Sequence[int] = PACK_SIZES,
    percentiles: Sequence[float] = PERCENTILES,
    num_packs: int = 256,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Boundary:
    """Judges every cap, pack size and layout.

    The packs of the one-shape layouts are random draws: the chunk holds all of `num_packs` of them, so that about one
    pack in `num_packs` may still be larger.

    Args:
        lengths: [n] lengths of the corpus.
        cost: What the windowed policy balances.
        memory: The memory model.
        budget_gib: Memory of a device.
        lookahead: See `PlannerConfig`.
        pack_sizes: Pack sizes to judge, ascending.
        percentiles: Caps to judge, besides none.
        num_packs: Packs that a shape must hold.
        seed: Of the draws.
        on_progress: Called after each pack size of each cap.

    Raises:
        ValueError: If the budget is below the model's own size.

    Complexity: O(len(percentiles) * sum(pack_sizes) * num_packs * log(...)).
    """
    memory.usable_bytes(budget_gib)
    caps = [cap_effect(lengths, cost, "none", int(lengths.max()))]
    caps += [cap_effect(lengths, cost, f"p{p:g}", fit_cap(lengths, p)) for p in sorted(percentiles, reverse=True)]
    cells = []
    for i, effect in enumerate(caps):
        capped = np.minimum(lengths, effect.cap)
        length = round_up(effect.cap)
        for j, pack_size in enumerate(pack_sizes):
            draw = np.random.default_rng([seed, pack_size]).choice(capped, num_packs * pack_size)
            most_rows = {
                "padded": pack_size,
                "one-shape arrival": _most_rows(draw, cost, length, pack_size, policy="arrival"),
                "one-shape windowed": _most_rows(draw, cost, length, pack_size, policy="windowed", lookahead=lookahead),
                "chunks": 1,
            }
            for layout, rows in most_rows.items():
                peak = memory.peak_bytes(rows, length)
                cells.append(
                    Cell(
                        cap=effect.name,
                        pack_size=pack_size,
                        layout=layout,
                        rows=rows,
                        length=length,
                        peak_gib=peak / GIB,
                        fits=memory.fits(rows, length, budget_gib),
                    )
                )
            on_progress(i * len(pack_sizes) + j + 1, len(caps) * len(pack_sizes))
    return Boundary(caps=tuple(caps), cells=tuple(cells))


def _most_rows(
    draw: IntArray, cost: TransformerCost, length: int, pack_size: int, *, policy: Policy, **settings: Any
) -> int:
    """Returns the most rows that one of a policy's packs needs."""
    config = PlannerConfig(pack_size=pack_size, policy=policy, **settings)
    packs = plan_stream(config, cost.of_length(draw))
    return max(len(first_fit_decreasing(draw[pack].tolist(), length)) for pack in packs)
