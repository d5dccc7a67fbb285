"""Running sums over the streams of a simulated job: its figures, without keeping what every rank did."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from bcl_grain.metrics import Arm, padding_fraction
from bcl_grain.simulate import StreamRun

FloatArray = npt.NDArray[np.float64]


@dataclasses.dataclass
class Tally:
    """What is kept of a job: for each step the dearest rank and the sum, for each rank its variation.

    Attributes:
        first_step: The first step that figures are of.
        last_step: The step after the last.
        ranks: Ranks added.
        step_max: [steps] cost of the dearest rank.
        step_sum: [steps] cost of all ranks.
        executed_max: [steps] executed cost of the dearest rank, or None where nothing was laid out.
        rank_cvs: Variation of each rank's pack costs over the steps of interest.
        useful_tokens: Tokens of all records.
        executed_tokens: Tokens of all chunks, or None.
        records: Records.
        max_wait_cycles: See `StreamRun`.
        planning_seconds: Time spent planning, of all processes together.
        bins: See `StreamRun`.
    """

    first_step: int
    last_step: int
    ranks: int
    step_max: FloatArray
    step_sum: FloatArray
    executed_max: FloatArray | None
    rank_cvs: list[float]
    useful_tokens: int
    executed_tokens: int | None
    records: int
    max_wait_cycles: int | None
    planning_seconds: float
    bins: int | None

    @classmethod
    def of(cls, run: StreamRun, first_step: int, last_step: int) -> Tally:
        """Returns the sums of one run.

        Raises:
            ValueError: If there are no steps first_step..last_step-1 in it.
        """
        steps = run.estimated.shape[1]
        if not 0 <= first_step < last_step <= steps:
            raise ValueError(f"the job has {steps} steps, so steps {first_step} to {last_step} can't be reported")
        window = run.estimated[:, first_step:last_step]
        return cls(
            first_step=first_step,
            last_step=last_step,
            ranks=len(run.estimated),
            step_max=run.estimated.max(axis=0),
            step_sum=run.estimated.sum(axis=0),
            executed_max=None if run.executed is None else run.executed.max(axis=0),
            rank_cvs=(window.std(axis=1) / window.mean(axis=1)).tolist(),
            useful_tokens=run.useful_tokens,
            executed_tokens=run.executed_tokens,
            records=run.records,
            max_wait_cycles=run.max_wait_cycles,
            planning_seconds=run.planning_seconds,
            bins=run.bins,
        )

    def add(self, other: Tally) -> None:
        """Adds the sums of further ranks.

        Raises:
            ValueError: If they had another number of steps.
        """
        if other.step_max.shape != self.step_max.shape:
            raise ValueError(f"ranks differ in steps: {self.step_max.size} and {other.step_max.size}")
        self.ranks += other.ranks
        np.maximum(self.step_max, other.step_max, out=self.step_max)
        self.step_sum += other.step_sum
        if self.executed_max is not None and other.executed_max is not None:
            np.maximum(self.executed_max, other.executed_max, out=self.executed_max)
        self.rank_cvs += other.rank_cvs
        self.useful_tokens += other.useful_tokens
        self.executed_tokens = _sum(self.executed_tokens, other.executed_tokens)
        self.records += other.records
        self.max_wait_cycles = max(self.max_wait_cycles or 0, other.max_wait_cycles or 0)
        self.planning_seconds += other.planning_seconds
        self.bins = _sum(self.bins, other.bins)

    @property
    def ideal(self) -> float:
        """Useful cost of a pack if all were equal, over the steps of interest."""
        return float(self.step_sum[self._steps].mean()) / self.ranks

    def arm(self) -> Arm:
        """Returns the figures over the steps of interest, counted as `metrics.measure` counts them."""
        cvs = np.array(self.rank_cvs)
        step_cost = float(self.step_max[self._steps].mean())
        executed = None if self.executed_max is None else float(self.executed_max[self._steps].mean())
        return Arm(
            cost_cv=float(cvs.mean()),
            cost_cv_error=float(cvs.std(ddof=1) / np.sqrt(cvs.size)) if cvs.size > 1 else 0.0,
            sync_waste=step_cost / self.ideal - 1,
            total_waste=None if executed is None else executed / self.ideal - 1,
            step_cost=step_cost,
            executed_step_cost=executed,
        )

    @property
    def padding(self) -> float | None:
        """Share of executed tokens that is padding, over the whole job, or None where nothing was laid out."""
        return None if self.executed_tokens is None else padding_fraction(self.executed_tokens, self.useful_tokens)

    @property
    def bins_per_rank(self) -> float | None:
        """Mean bins of a rank in a step, or None where nothing was packed into bins."""
        return None if self.bins is None else self.bins / (self.ranks * self.step_max.size)

    @property
    def planning_us_per_record(self) -> float:
        """Microseconds of planning per record."""
        return 1e6 * self.planning_seconds / self.records

    @property
    def _steps(self) -> slice:
        return slice(self.first_step, self.last_step)


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b
