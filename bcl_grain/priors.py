"""A cost prior of a corpus of lengths, and the small file that carries it from `profile` to `simulate`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bcl_grain.cost_prior import CostPrior, estimate_cost_prior
from bcl_grain.costs import TransformerCost
from bcl_grain.json_files import read_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusPrior:
    """A cost prior, and what it was made for: a mean in tokens says nothing about FLOPs.

    Attributes:
        prior: The prior.
        cost: The cost model, as the command line writes it.
        pack_size: Records in a pack, which the prior's ceiling depends on.
    """

    prior: CostPrior
    cost: str
    pack_size: int

    def document(self) -> dict[str, object]:
        """Returns it as plain values: what a file holds."""
        return {**dataclasses.asdict(self.prior), "cost": self.cost, "pack_size": self.pack_size}


def corpus_prior(
    lengths: npt.NDArray[np.int64], cost_model: TransformerCost, *, cost: str, pack_size: int, seed: int = 0
) -> CorpusPrior:
    """Returns the prior of a corpus, as `estimate_cost_prior` makes it from a sample of its records.

    >>> prior = corpus_prior(np.array([1, 3, 2, 2]), TransformerCost(1.0), cost="tokens", pack_size=4)
    >>> prior.prior.mean
    2.0
    """
    costs = cost_model.of_length(lengths).tolist()
    return CorpusPrior(
        prior=estimate_cost_prior(costs, float, pack_size=pack_size, seed=seed), cost=cost, pack_size=pack_size
    )


def write_prior(prior: CorpusPrior, path: str) -> None:
    """Writes a prior as JSON."""
    Path(path).write_text(json.dumps(prior.document(), indent=2) + "\n", encoding="utf-8")


def read_prior(path: str, *, cost: str, pack_size: int) -> CorpusPrior:
    """Reads a prior.

    Args:
        path: A file that `write_prior` wrote.
        cost: The cost model that it is wanted for.
        pack_size: Records in a pack that it is wanted for.

    Raises:
        ValueError: If there is no such file, it is no prior, or it was made for something else.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no prior file {path!r}: `profile DATA --prior-out {path}` writes one, or pass auto or none")
    try:
        values = read_json(file)
        made_for = values.pop("cost"), values.pop("pack_size")
        prior = CostPrior(**values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path!r} is no prior file ({error}): `profile DATA --prior-out FILE` writes one") from error
    if made_for != (cost, pack_size):
        raise ValueError(
            f"the prior in {path!r} was made with --cost {made_for[0]} --pack-size {made_for[1]}, but this is --cost "
            f"{cost} --pack-size {pack_size}: make one for it"
        )
    return CorpusPrior(prior=prior, cost=cost, pack_size=pack_size)
