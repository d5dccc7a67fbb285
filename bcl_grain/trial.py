"""Short simulated jobs, and the layouts worth trying in them: what `advice` chooses by."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from bcl_grain.arms import run_policy
from bcl_grain.costs import TransformerCost
from bcl_grain.draws import Draws
from bcl_grain.job import Job
from bcl_grain.layouts import BucketedLayout, Layout, RowPackedLayout
from bcl_grain.memory import MemoryModel
from bcl_grain.metrics import Arm
from bcl_grain.options import LENGTH_MULTIPLE
from bcl_grain.row_lengths import row_lengths
from bcl_grain.shapes import fit_rows

IntArray = npt.NDArray[np.int64]

STEPS = 256
MOST_ROW_LENGTHS = 8
_MOST_STREAMS = 8


@dataclasses.dataclass(frozen=True)
class Trial:
    """Short simulated jobs on a corpus.

    Attributes:
        values: [n] lengths of the corpus, the cap applied.
        memory: The memory model; its model gives the cost.
        budget_gib: Memory of a device.
        streams: Streams of the job.
        packs_per_step: Devices that a stream feeds.
        seed: Of the draws.
    """

    values: IntArray
    memory: MemoryModel
    budget_gib: float
    streams: int
    packs_per_step: int
    seed: int

    @property
    def cost(self) -> TransformerCost:
        """FLOPs of a record."""
        return self.memory.dims.cost(remat=self.memory.remat)

    def rows(self, pack_size: int) -> list[RowPackedLayout]:
        """Row-packed layouts worth trying, the shortest rows first; chunks are small against a pack."""
        limit = self.memory.longest_row(self.budget_gib)
        layouts = []
        for length in row_lengths(self.values, pack_size=pack_size, longest_row=limit, most=MOST_ROW_LENGTHS):
            eighth = int(pack_size * self.values.mean() / (8 * length))
            most = min(self.memory.most_rows(length, self.budget_gib), max(1, eighth))
            rows = 1 << (max(1, most).bit_length() - 1)
            layouts.append(RowPackedLayout(length=length, rows_per_chunk=rows, heights=(1,) if rows > 1 else ()))
        return layouts

    def ladder(self, pack_size: int) -> RowPackedLayout | None:
        """What `fit_rows` proposes; None where its longest row does not fit the memory."""
        cost = self.cost
        if self.memory.attention == "fused":
            cost = dataclasses.replace(cost, per_token_squared=0.0)  # long rows are no dearer
        layout = fit_rows(self.values, pack_size=pack_size, cost=cost, multiple_of=LENGTH_MULTIPLE, seed=self.seed)
        fits = all(self.memory.fits(rows, length, self.budget_gib) for rows, length in layout.shapes)
        return layout if fits else None

    def bucketed(self) -> BucketedLayout | None:
        """Row lengths in powers of two, in chunks of the longest's tokens; None where these don't fit the memory."""
        lengths = [LENGTH_MULTIPLE]
        while lengths[-1] < self.values.max():
            lengths.append(2 * lengths[-1])
        layout = BucketedLayout(lengths=tuple(lengths), tokens_per_chunk=lengths[-1])
        fits = all(self.memory.fits(rows, length, self.budget_gib) for rows, length in layout.shapes)
        return layout if fits else None

    def fullest_rows(self, pack_size: int) -> RowPackedLayout:
        """Of these, that which a pack a little above the average fills best, by its tokens alone."""
        tokens = 1.01 * pack_size * float(self.values.mean())
        return min(self.rows(pack_size), key=lambda layout: -(-tokens // layout.length) * layout.length)

    def run(self, policy: str, pack_size: int, lookahead: int, layout: Layout | None) -> Arm:
        """Returns the figures of `STEPS` steps of independent draws."""
        draws = Draws(
            population=self.values,
            kind="iid",
            streams=min(self.streams, _MOST_STREAMS),
            records=STEPS * pack_size * self.packs_per_step,
            seed=self.seed,
        )
        job = Job(
            draws=draws,
            pack_size=pack_size,
            packs_per_step=self.packs_per_step,
            cost=self.cost,
            layout=layout,
            # A fused kernel skips the pairs of other records; a dense mask computes them.
            kernel="segments" if self.memory.attention == "fused" else "rows",
        )
        settings: dict[str, Any] = {} if policy == "arrival" else {"lookahead": lookahead}
        return run_policy(policy, job, **settings).arm()
