"""A simulated job: which records arrive on how many ranks, in how many steps, and what they cost."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from bcl_grain.costs import TransformerCost
from bcl_grain.draws import Draws
from bcl_grain.layouts import Layout
from bcl_grain.simulate import Kernel

IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What all arms have in common.

    Attributes:
        draws: The records of every stream.
        pack_size: Records of a rank in a step.
        packs_per_step: Ranks that one stream feeds.
        cost: Cost of a record, and of a chunk.
        layout: Turns packs into chunks, or None. Policies that pack bins of their own take no notice.
        kernel: What attention runs: see `simulate.chunks_cost`.
        bin_tokens: Capacity of a bin, for policies that pack bins; default: the longest record.
        first_step: The first step that figures are of.
        last_step: The step after the last; default: the job's end.
        seed: Key of the policies' own randomness.

    Raises:
        ValueError: If the streams hold no whole number of steps.
    """

    draws: Draws
    pack_size: int
    packs_per_step: int = 1
    cost: TransformerCost
    layout: Layout | None = None
    kernel: Kernel = "rows"
    bin_tokens: int | None = None
    first_step: int = 0
    last_step: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draws.records % (self.pack_size * self.packs_per_step):
            raise ValueError(
                f"{self.draws.records} records a stream are no whole number of steps of {self.packs_per_step} x "
                f"{self.pack_size} records: leave the last ones out"
            )

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.draws.streams * self.packs_per_step

    @property
    def steps(self) -> int:
        """Steps of the job."""
        return self.draws.records // (self.pack_size * self.packs_per_step)

    @property
    def records(self) -> int:
        """Records of the job."""
        return self.draws.records * self.draws.streams

    @property
    def end(self) -> int:
        """The step after the last that figures are of."""
        return self.steps if self.last_step is None else self.last_step

    @property
    def bin_capacity(self) -> int:
        """Tokens of a bin."""
        return self.draws.longest if self.bin_tokens is None else self.bin_tokens


def rank_lengths(job: Job) -> IntArray:
    """Returns the lengths by rank, [ranks, steps * pack_size]: what each rank gets in order of arrival.

    >>> draws = Draws(population=np.arange(1, 9), kind="order", streams=1, records=8)
    >>> rank_lengths(Job(draws=draws, pack_size=2, packs_per_step=2, cost=TransformerCost(1.0)))
    array([[1, 2, 5, 6],
           [3, 4, 7, 8]])
    """
    shape = (job.draws.streams, job.steps, job.packs_per_step, job.pack_size)
    streams = np.stack([job.draws.stream(index).lengths for index in range(job.draws.streams)])
    return streams.reshape(shape).transpose(0, 2, 1, 3).reshape(job.ranks, -1)
