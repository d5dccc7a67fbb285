"""A cost prior: the mean cost of a corpus and what it counts for, the same on every rank, kept in a small file."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

MOST_RECORDS = 10_000
"""What a prior counts for at most, in records. It is evidence, not truth: a mean that is off must give way to data."""


@dataclasses.dataclass(frozen=True)
class Prior:
    """What is known of a corpus's mean cost before the job.

    Attributes:
        mean: Mean cost of a record.
        records: How many records seen it counts for.
        cost: The cost model, as the command line writes it: a mean in tokens says nothing about FLOPs.

    Raises:
        ValueError: If mean or records is not positive and finite.
    """

    mean: float
    records: int
    cost: str

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and self.mean > 0 and self.records >= 1):
            raise ValueError(f"a prior needs a positive mean and at least 1 record, got {self!r}")


def corpus_prior(costs: npt.ArrayLike, cost: str) -> Prior:
    """Returns the prior that a corpus gives: its mean, for as many records as it has, `MOST_RECORDS` at most.

    >>> corpus_prior([1.0, 3.0], cost="tokens")
    Prior(mean=2.0, records=2, cost='tokens')
    """
    values = np.asarray(costs, np.float64)
    return Prior(mean=float(values.mean()), records=min(values.size, MOST_RECORDS), cost=cost)


def write_prior(prior: Prior, path: str) -> None:
    """Writes a prior as JSON."""
    Path(path).write_text(json.dumps(dataclasses.asdict(prior), indent=2) + "\n", encoding="utf-8")


def read_prior(path: str, cost: str) -> Prior:
    """Reads a prior.

    Args:
        path: A file that `write_prior` wrote.
        cost: The cost model that it is wanted for.

    Raises:
        ValueError: If there is no such file, it is no prior, or it was made with another cost model.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no prior file {path!r}: `profile DATA --prior-out {path}` writes one, or pass auto or none")
    try:
        prior = Prior(**json.loads(file.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path!r} is no prior file ({error}): `profile DATA --prior-out FILE` writes one") from error
    if prior.cost != cost:
        raise ValueError(
            f"the prior in {path!r} was made with --cost {prior.cost}, but this is --cost {cost}: make one for it"
        )
    return prior
