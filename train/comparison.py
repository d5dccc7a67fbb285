"""What balancing would do for a job of many ranks: every policy, on the same records."""

from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np

from bcl_grain.cost_prior import CostPrior
from bcl_grain.metrics import check_comparable
from bcl_grain.planner import PlannerConfig, Policy
from bcl_grain.simulate import Simulation, simulate
from train.config import BalanceConfig
from train.data import JobSize, LayOut, arrival_sizes
from train.tokenizers import IntArray


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Policies on the same records of the same job, the baseline first.

    Attributes:
        simulations: By policy.
        job: Its size.
        ranks: Its ranks.
    """

    simulations: dict[Policy, Simulation]
    job: JobSize
    ranks: int

    def describe(self) -> str:
        """Returns one line: what was simulated."""
        return (
            f"simulated on the same {self.job.steps * self.job.global_batch:,} training records: {self.ranks} ranks, "
            f"{self.job.steps} steps, start and flush included"
        )

    def table(self) -> str:
        """Returns the figures as lines of text, one policy a line."""
        heads = ("policy", "cost CV", "sync waste", "total waste", "padding")
        lines = ["".join(f"{head:>13}" for head in heads)]
        for policy, simulation in self.simulations.items():
            arm = simulation.arm()
            values = (arm.cost_cv, arm.sync_waste, arm.total_waste, simulation.padding)
            lines.append(f"{policy:>13}" + "".join(f"{value:>13.4f}" for value in values))
        return "\n".join(lines)

    def figures(self) -> dict[str, dict[str, float | None]]:
        """Returns the figures by policy, JSON-safe."""
        return {
            policy: {**dataclasses.asdict(simulation.arm()), "padding": simulation.padding}
            for policy, simulation in self.simulations.items()
        }


def compare_policies(
    lengths: IntArray,
    job: JobSize,
    *,
    ranks: int,
    balance: BalanceConfig,
    prior: CostPrior | None,
    lay_out: LayOut,
    seed: int,
) -> Comparison:
    """Plans the job for `ranks` ranks, each with a stream of its own, by every policy.

    The records come as the trainer's pipeline deals them out: each epoch shuffled as a whole.

    Args:
        lengths: [n] record lengths in tokens.
        job: The size of the job: its global batch is that of `ranks` ranks.
        ranks: Ranks.
        balance: How records become packs.
        prior: What all ranks know of the mean cost.
        lay_out: Packs to chunks, and what both cost.
        seed: Key of the shuffle.
    """
    streams = np.array([arrival_sizes(lengths, job, seed=seed, shard=rank, num_shards=ranks) for rank in range(ranks)])
    simulations = {
        policy: simulate(
            PlannerConfig(
                pack_size=balance.pack_size,
                lookahead=balance.lookahead,
                policy=policy,
                order=balance.order,
                num_packs=job.steps,
                prior=prior,
                seed=seed,
            ),
            streams,
            lay_out.cost,
            lay_out.layout,
        )
        for policy in get_args(Policy)
    }
    check_comparable({policy: simulation.estimated for policy, simulation in simulations.items()})
    return Comparison(simulations, job, ranks)
