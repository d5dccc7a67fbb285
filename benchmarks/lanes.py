"""What many lanes cost: `python -m benchmarks.lanes`.

One job of 64 ranks, dealt out to 1, 2, ..., 64 lanes. With fewer lanes each serves more ranks (`packs_per_step`) from
one larger pool; the records in all pools together are the same. Every arm consumes the same records in the same steps,
start and flush included. Lengths are drawn from the library's own tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bcl_grain.cost_prior import EXACT_RECORDS, CostPrior, balanceable_ceiling
from bcl_grain.costs import TransformerCost
from bcl_grain.metrics import check_comparable, waste
from bcl_grain.planner import PlannerConfig, Policy
from bcl_grain.simulate import pack_costs, plan_stream
from bcl_grain.workloads import load_workload
from benchmarks.result import write_result

FloatArray = npt.NDArray[np.float64]

COST = TransformerCost(per_token=1.0, per_token_squared=1 / 30_000)
CORPORA = ("medquad", "sgd_dialogues", "p3_t0_mix")
SHAPES = ((64, 8), (8, 32))  # pack size, lookahead
POLICIES: tuple[Policy, ...] = ("windowed", "streaming")


def sync_waste(
    costs: FloatArray, *, lanes: int, ranks: int, pack_size: int, lookahead: int, policy: Policy, prior: CostPrior
) -> tuple[float, FloatArray]:
    """Returns the waste of a job over records of these costs, and what each rank and step cost.

    Args:
        costs: [records] in order of arrival, dealt out to lanes one by one.
        lanes: Lanes.
        ranks: Ranks, a multiple of `lanes`.
        pack_size: Records in a pack.
        lookahead: Pool length in steps.
        policy: How a pool becomes packs.
        prior: What all lanes know of the mean.
    """
    per_lane = ranks // lanes
    steps = costs.size // (ranks * pack_size)
    config = PlannerConfig(
        pack_size=pack_size,
        packs_per_step=per_lane,
        lookahead=lookahead,
        policy=policy,
        num_packs=steps * per_lane,
        prior=prior,
    )
    by_rank = []
    for lane in range(lanes):
        own = costs[lane::lanes]
        by_rank.append(pack_costs(plan_stream(config, own), own).reshape(steps, per_lane).T)
    table = np.concatenate(by_rank)
    return waste(table), table


def least_waste(costs: FloatArray, *, ranks: int, pack_size: int) -> float:
    """Returns a waste that no plan of these records can pass, whatever it knows, for it can't split a record.

    All but the s dearest steps have a pack with one of the `s * ranks * pack_size + 1` dearest records and
    `pack_size - 1` others, which cost at least what the cheapest do; and all steps together can't be shorter than the
    work shared evenly.
    """
    ascending = np.sort(costs)
    shortest = ascending[::-1][:: ranks * pack_size] + ascending[: pack_size - 1].sum()
    return max(0.0, float(shortest.sum() / (costs.sum() / ranks)) - 1)


def run(
    ranks: int, steps: int, corpora: Sequence[str], *, shapes: Sequence[tuple[int, int]] = SHAPES
) -> dict[str, dict[str, dict[str, float]]]:
    """Prints a table for each shape and corpus; returns sync waste by "corpus, pack, lookahead", policy and lanes."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    counts = [2**i for i in range(ranks.bit_length())]
    for pack_size, lookahead in shapes:
        for corpus in corpora:
            lengths = load_workload(corpus).sample(ranks * pack_size * steps, np.random.default_rng(0))
            costs = np.asarray(COST.of_length(lengths.astype(np.float64)), np.float64)
            ceiling = balanceable_ceiling(costs, pack_size)
            prior = CostPrior(mean=float(np.minimum(costs, ceiling).mean()), records=EXACT_RECORDS, ceiling=ceiling)
            name = f"{corpus}, pack {pack_size}, lookahead {lookahead}"
            bound = least_waste(costs, ranks=ranks, pack_size=pack_size)
            figures[name] = {"no plan below": {"any": bound}}
            print(f"{name:>36} {'none below':>10}  {bound:.4f}")
            for policy in POLICIES:
                arms = {
                    lanes: sync_waste(
                        costs,
                        lanes=lanes,
                        ranks=ranks,
                        pack_size=pack_size,
                        lookahead=lookahead,
                        policy=policy,
                        prior=prior,
                    )
                    for lanes in counts
                }
                check_comparable({str(lanes): table for lanes, (_, table) in arms.items()})
                figures[name][policy] = {str(lanes): value for lanes, (value, _) in arms.items()}
                row = "  ".join(f"{lanes}: {value:.4f}" for lanes, (value, _) in arms.items())
                print(f"{name:>36} {policy:>10}  {row}", flush=True)
                assert min(value for value, _ in arms.values()) >= bound
    return figures


def main() -> None:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer ranks and steps, one corpus, nothing written")
    quick = parser.parse_args().quick
    ranks, steps = (8, 20) if quick else (64, 160)
    figures = run(ranks, steps, CORPORA[:1] if quick else CORPORA)
    if not quick:
        write_result("lanes", {"ranks": ranks, "steps": steps, "sync_waste": figures})


if __name__ == "__main__":
    main()
