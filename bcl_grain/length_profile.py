"""How uneven a corpus is, what that costs, and what balancing would bring: figures, and a verdict in words."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from bcl_grain.arms import run_policy
from bcl_grain.costs import TransformerCost
from bcl_grain.draws import Draws
from bcl_grain.inputs import Lengths
from bcl_grain.job import Job

FloatArray = npt.NDArray[np.float64]

_MOST_SIMULATED_RECORDS = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthProfile:
    """What is worth knowing of a corpus's lengths. Costs are in the cost model's unit.

    Attributes:
        records: Records.
        mean: Mean length.
        cv: Standard deviation of the lengths / mean.
        shortest: The shortest record.
        p50: Median length; `p90`, `p99` and `p999` are further percentiles.
        p90: See `p50`.
        p99: See `p50`.
        p999: See `p50`.
        longest: The longest record.
        tokens: All records together.
        cost_mean: Mean cost.
        cost_cv: Standard deviation of the costs / mean.
        top_cost_share: Share of all cost that the dearest hundredth of the records has.
        outlier_packs: Cost of the dearest record, in mean packs.
        clumping: Variance of the mean cost of neighbours (packs in file order) against that of random records: 1 where
            the order says nothing about cost; None where the corpus has no order.
        arrival_waste: Waste of packs in order of arrival, random draws: what the ranks wait.
        windowed_waste: The same with the windowed policy.
        histogram_edges: [b + 1] lengths.
        histogram_records: [b] records from one edge to the next.
        histogram_cost: [b] share of all cost.
    """

    records: int
    mean: float
    cv: float
    shortest: int
    p50: float
    p90: float
    p99: float
    p999: float
    longest: int
    tokens: int
    cost_mean: float
    cost_cv: float
    top_cost_share: float
    outlier_packs: float
    clumping: float | None
    arrival_waste: float
    windowed_waste: float
    histogram_edges: tuple[float, ...]
    histogram_records: tuple[int, ...]
    histogram_cost: tuple[float, ...]


def profile_lengths(
    lengths: Lengths, cost: TransformerCost, *, ranks: int, pack_size: int, lookahead: int, seed: int = 0
) -> LengthProfile:
    """Returns the profile of a corpus.

    Args:
        lengths: The corpus.
        cost: The cost model.
        ranks: Ranks of the job whose waste is simulated, each with a stream of its own.
        pack_size: Records of a rank in a step.
        lookahead: See `PlannerConfig`.
        seed: Of the draws.

    Complexity: O(n log n), and a simulation of at most a million records.
    """
    values = lengths.values
    costs = cost.of_length(values)
    steps = max(lookahead, min(10 * lookahead, _MOST_SIMULATED_RECORDS // (ranks * pack_size)))
    draws = Draws(population=values, kind="iid", streams=ranks, records=steps * pack_size, seed=seed)
    job = Job(draws=draws, pack_size=pack_size, cost=cost, seed=seed)
    edges = _edges(values.min(), values.max())
    dearest = np.sort(costs)[::-1][: max(1, values.size // 100)]
    p50, p90, p99, p999 = (float(q) for q in np.percentile(values, [50, 90, 99, 99.9]))
    return LengthProfile(
        records=values.size,
        mean=float(values.mean()),
        cv=float(values.std() / values.mean()),
        shortest=int(values.min()),
        p50=p50,
        p90=p90,
        p99=p99,
        p999=p999,
        longest=int(values.max()),
        tokens=int(values.sum()),
        cost_mean=float(costs.mean()),
        cost_cv=float(costs.std() / costs.mean()),
        top_cost_share=float(dearest.sum() / costs.sum()),
        outlier_packs=float(costs.max() / (pack_size * costs.mean())),
        clumping=_clumping(costs, pack_size) if lengths.has_order else None,
        arrival_waste=run_policy("arrival", job).arm().sync_waste,
        windowed_waste=run_policy("windowed", job, lookahead=lookahead).arm().sync_waste,
        histogram_edges=tuple(edges.tolist()),
        histogram_records=tuple(np.histogram(values, edges)[0].tolist()),
        histogram_cost=tuple((np.histogram(values, edges, weights=costs)[0] / costs.sum()).tolist()),
    )


def _edges(shortest: int, longest: int) -> FloatArray:
    """Returns the edges of a dozen bins, evenly spaced in the logarithm; the last one is above the longest record."""
    edges = np.unique(np.round(np.geomspace(shortest, longest + 1, 13)))
    return edges if edges.size > 1 else np.array([shortest, longest + 1.0])


def _clumping(costs: FloatArray, pack_size: int) -> float | None:
    packs = costs.size // pack_size
    if packs < 2 or not costs.std():
        return None
    means = costs[: packs * pack_size].reshape(packs, pack_size).mean(axis=1)
    return float(means.var(ddof=1) * pack_size / costs.var())


def verdict(profile: LengthProfile, *, ranks: int, pack_size: int, lookahead: int) -> list[str]:
    """Returns in sentences what a profile means for a job of `ranks` ranks."""
    waste = profile.arrival_waste
    word = next(w for limit, w in _WORDS if waste < limit)
    speedup = (1 + waste) / (1 + profile.windowed_waste)
    sentences = [
        f"{word}: with packs of {pack_size} records in order of arrival, {ranks} ranks take {100 * waste:.1f} % longer "
        "than if all packs cost the same.",
    ]
    if waste >= _WORDS[0][0]:
        sentences.append(
            f"Windowed BCL with lookahead {lookahead} brings that to {100 * profile.windowed_waste:.1f} %: "
            f"{speedup:.2f} times as fast, padding aside."
        )
    else:
        sentences.append("There is little to gain from balancing.")
    if profile.outlier_packs > 1:
        sentences.append(
            f"The dearest record costs as much as {profile.outlier_packs:.1f} mean packs: no partition of such packs "
            "balances it; raise the pack size, or cap records (`boundary` shows what a cap touches)."
        )
    # For random order the figure has mean 1 and variance 2 / (packs - 1).
    chance = 1 + 4 * np.sqrt(2 / max(1, profile.records // pack_size - 1))
    if profile.clumping is not None and profile.clumping > max(2, chance):
        sentences.append(
            f"The file is sorted or grouped: packs of neighbours vary {profile.clumping:.1f} times as much as packs of "
            "random records. Shuffle before sharding."
        )
    return sentences


_WORDS = (
    (0.02, "Even"),
    (0.1, "Somewhat uneven"),
    (0.3, "Uneven"),
    (float("inf"), "Very uneven"),
)
