"""How uneven steps are, and what that costs: the figures every claim about a policy is made in.

All functions take pack costs [ranks, steps]: entry (r, s) is what rank r's pack of step s costs, estimated (the
sum of its records' costs) or executed (what its chunks cost, padding included). Arms that are compared must hold
the same records in the same number of steps; `check_comparable` checks it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def waste(pack_costs: npt.ArrayLike, ideal: float | None = None) -> float:
    """Returns the share of time that is lost, against `ideal`: mean over steps of the dearest pack / ideal - 1.

    With estimated costs this is `sync_waste`: what waiting for the slowest rank costs. With executed costs and the
    ideal of the *estimated* ones it is `total_waste`: waiting and padding together.

    Args:
        pack_costs: [ranks, steps].
        ideal: Useful cost of a pack if all were equal; default: the mean of `pack_costs`.

    Raises:
        ValueError: If `pack_costs` is not a non-empty matrix.

    >>> waste([[1.0, 3.0], [3.0, 1.0]])
    0.5
    """
    costs = _matrix(pack_costs)
    return float(costs.max(axis=0).mean() / (costs.mean() if ideal is None else ideal) - 1)


def cost_cv(pack_costs: npt.ArrayLike) -> tuple[float, float]:
    """Returns the coefficient of variation of a rank's pack costs: the mean over ranks, and its standard error.

    The standard error is 0 for a single rank, where it can't be told.

    >>> cost_cv([[1.0, 3.0], [2.0, 2.0]])
    (0.25, 0.25)
    """
    costs = _matrix(pack_costs)
    per_rank = costs.std(axis=1) / costs.mean(axis=1)
    error = per_rank.std(ddof=1) / np.sqrt(len(per_rank)) if len(per_rank) > 1 else 0.0
    return float(per_rank.mean()), float(error)


def padding_fraction(executed_tokens: float, useful_tokens: float) -> float:
    """Returns the share of executed tokens that is padding.

    >>> padding_fraction(1000, 750)
    0.25
    """
    return 1.0 - useful_tokens / executed_tokens


@dataclasses.dataclass(frozen=True)
class Arm:
    """The figures of one way to make packs. Costs are in the cost model's unit.

    Attributes:
        cost_cv: Variation of a rank's estimated pack costs, averaged over ranks.
        cost_cv_error: Its standard error.
        sync_waste: Waiting, from estimated costs.
        total_waste: Waiting and padding, from executed costs; None where nothing was laid out.
        step_cost: Mean over steps of the dearest rank's estimated cost.
        executed_step_cost: The same from executed costs, or None.
    """

    cost_cv: float
    cost_cv_error: float
    sync_waste: float
    total_waste: float | None
    step_cost: float
    executed_step_cost: float | None


def measure(estimated: npt.ArrayLike, executed: npt.ArrayLike | None = None) -> Arm:
    """Returns the figures of one arm.

    Args:
        estimated: [ranks, steps] sums of record costs.
        executed: [ranks, steps] costs of the chunks, or None.

    Raises:
        ValueError: If the shapes differ or are empty.

    >>> measure([[1.0, 3.0], [3.0, 1.0]], executed=[[2.0, 3.0], [3.0, 2.0]]).total_waste
    0.5
    """
    costs = _matrix(estimated)
    run = None if executed is None else _matrix(executed)
    if run is not None and run.shape != costs.shape:
        raise ValueError(f"executed costs have shape {run.shape}, estimated ones {costs.shape}")
    cv, error = cost_cv(costs)
    return Arm(
        cost_cv=cv,
        cost_cv_error=error,
        sync_waste=waste(costs),
        total_waste=None if run is None else waste(run, ideal=float(costs.mean())),
        step_cost=float(costs.max(axis=0).mean()),
        executed_step_cost=None if run is None else float(run.max(axis=0).mean()),
    )


def check_comparable(arms: Mapping[str, npt.ArrayLike]) -> None:
    """Checks that all arms have the same ranks, steps and total estimated cost, so that they can be compared.

    Raises:
        ValueError: If one differs from the first; the message names both.

    >>> check_comparable({"arrival": [[1.0, 3.0]], "windowed": [[2.0, 2.5]]})
    Traceback (most recent call last):
    ...
    ValueError: arms 'arrival' and 'windowed' hold different records: total cost 4.0 and 4.5
    """
    first_name, first = next((name, _matrix(costs)) for name, costs in arms.items())
    for name, values in arms.items():
        costs = _matrix(values)
        if costs.shape != first.shape:
            raise ValueError(
                f"arms {first_name!r} and {name!r} have different (ranks, steps): {first.shape} and {costs.shape}"
            )
        if not np.isclose(costs.sum(), first.sum(), rtol=1e-9, atol=0):
            raise ValueError(
                f"arms {first_name!r} and {name!r} hold different records: total cost {first.sum()} and {costs.sum()}"
            )


def _matrix(pack_costs: npt.ArrayLike) -> FloatArray:
    costs = np.asarray(pack_costs, np.float64)
    if costs.ndim != 2 or not costs.size:
        raise ValueError(f"pack costs must be a non-empty [ranks, steps] matrix, got shape {costs.shape}")
    return costs
