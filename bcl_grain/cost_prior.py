"""A cost prior: what all streams know in common about the cost of a record before they read one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bcl_grain.checks import check_function, checked_integer, checked_number
from bcl_grain.costs import CostFn, checked_cost

FloatArray = npt.NDArray[np.float64]

EXACT_RECORDS = 1_000_000_000
"""What a mean over all records counts for: it has no sampling error."""

SAMPLE_KEY = 0xC057


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostPrior:
    """The mean cost of a record, as evidence: data that contradicts it wins in the end.

    It must be the same on every host. Its error is then common to all streams and makes no rank wait for another; it
    only fills or drains the pools.

    Attributes:
        mean: Mean of `min(cost, ceiling)`, positive.
        records: How many independent records it counts for: its standard error is that of the mean of as many.
        ceiling: Costs are counted up to here; see `balanceable_ceiling`. None counts them whole.

    Raises:
        ValueError: If a value is out of range.
    """

    mean: float
    records: int
    ceiling: float | None = None

    def __post_init__(self) -> None:
        checked = {
            "mean": checked_number("the mean of a cost prior", self.mean, above=0),
            "records": checked_integer("records of a cost prior", self.records, 1),
        }
        if self.ceiling is not None:
            checked["ceiling"] = checked_number("the ceiling of a cost prior", self.ceiling, least=checked["mean"])
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def balanceable_ceiling(costs: npt.ArrayLike, pack_size: int) -> float:
    """Returns the cost above which a record makes its pack dearer than the others, whatever comes with it.

    What lies above it can't be balanced, only emitted, so the control of pack cost leaves it out. The ceiling is the
    largest fixed point of `pack_size * mean(min(cost, ceiling)) - (pack_size - 1) * low`, with `low` the mean of the
    cheapest quarter: such a record together with cheap ones costs just as much as a pack of ordinary ones.

    Args:
        costs: [n] costs, n at least 1.
        pack_size: Records in a pack.

    Complexity: O(n log n).

    >>> balanceable_ceiling([1.0, 3.0, 2.0, 2.0], pack_size=4)  # above all of them
    5.0
    >>> round(balanceable_ceiling([1.0] * 50 + [3.0] * 48 + [400.0] * 2, pack_size=4), 3)  # 4 * 2.0435 - 3
    5.174
    """
    ascending = np.sort(np.asarray(costs, np.float64))
    low = float(np.add.accumulate(ascending[: max(1, ascending.size // 4)])[-1]) / max(1, ascending.size // 4)
    ceiling = math.inf
    for _ in range(64):
        mean = float(np.add.accumulate(np.minimum(ascending, ceiling))[-1]) / ascending.size
        lower = pack_size * mean - (pack_size - 1) * low
        if not lower < ceiling * (1 - 1e-9):
            break
        ceiling = lower
    return max(ceiling, float(ascending[0]))


def estimate_cost_prior(
    records: Sequence[Any], cost_fn: CostFn, *, pack_size: int, num_records: int = 10_000, seed: int = 0
) -> CostPrior:
    """Estimates a cost prior from a random sample of a data set, the same on every host.

    Take the *global* data set, before it is sharded and repeated.

    Args:
        records: A random-access data set, such as a `grain.MapDataset`. Elements that are None (filtered out) are
            left out.
        cost_fn: Cost of a record, as the planner gets it.
        pack_size: Records in a pack, as the planner gets it.
        num_records: Size of the sample, drawn without replacement; the whole data set if that has no more. Then the
            mean is exact and counts for as many records as one could wish.
        seed: Key of the sample.

    Raises:
        ValueError: If there is no record, or a cost is not positive and finite.

    Complexity: `num_records` reads and evaluations of `cost_fn`; O(len(records)) memory for the order.

    >>> estimate_cost_prior([[1, 2], [3], [4, 5, 6], [7, 8]], len, pack_size=4)
    CostPrior(mean=2.0, records=1000000000, ceiling=5.0)
    """
    check_function("cost_fn", cost_fn)
    pack_size, seed = checked_integer("pack_size", pack_size, 1), checked_integer("seed", seed, 0)
    num_records = checked_integer("num_records", num_records, 1)
    total = len(records)
    if total < 1:
        raise ValueError(f"a prior needs records to look at: got {total} records")
    # Raw bits are stable between NumPy's versions, its sampling methods are not. With the bare seed as key, data made
    # by a generator of the same seed would be sampled in order of size.
    order = np.argsort(np.random.PCG64([seed, total, SAMPLE_KEY]).random_raw(total), kind="stable")[:num_records]
    sample = [(position, records[position]) for position in order.tolist()]
    costs = np.array([checked_cost(cost_fn, record, position) for position, record in sample if record is not None])
    if not costs.size:
        raise ValueError(f"none of the {len(sample)} records looked at passed the filters upstream")
    ceiling = balanceable_ceiling(costs, pack_size)
    mean = float(np.add.accumulate(np.minimum(costs, ceiling))[-1]) / costs.size
    # Without replacement the variance of the mean is smaller by the share of the data not seen.
    unseen = 1 - len(sample) / total
    counts_for = EXACT_RECORDS if not unseen else min(EXACT_RECORDS, int(costs.size / unseen))
    return CostPrior(mean=mean, records=counts_for, ceiling=max(ceiling, mean))
