"""Draws the README's picture, from a simulation: `python -m benchmarks.picture`.

Each dot is what one rank's pack costs, the line is the dearest pack of each step, which all ranks wait for.
"""

from __future__ import annotations

import pathlib
from typing import get_args

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

import bcl_grain as bcl
from bcl_grain.metrics import check_comparable
from bcl_grain.planner import Policy
from bcl_grain.simulate import simulate
from bcl_grain.workloads import load_workload
from benchmarks.result import write_result

RANKS, STEPS, SHOWN = 8, 1000, slice(400, 480)
COST = bcl.TransformerCost(1.0, 1 / 30_000)


def main() -> None:
    """Writes docs/effect.png and its figures."""
    lengths = load_workload("medquad").sample(RANKS * STEPS * 64, np.random.default_rng(0)).reshape(RANKS, -1)
    runs = {}
    for policy in get_args(Policy):
        config = bcl.PlannerConfig(pack_size=64, lookahead=8, policy=policy, num_packs=STEPS)
        runs[policy] = simulate(config, lengths, COST)
    check_comparable({policy: run.estimated for policy, run in runs.items()})
    mean = runs["arrival"].estimated.mean()
    figure, axes = plt.subplots(1, len(runs), figsize=(4 * len(runs), 3.2), sharey=True, layout="constrained")
    steps = np.arange(SHOWN.start, SHOWN.stop)
    for axis, (policy, run) in zip(axes, runs.items(), strict=True):
        costs = run.estimated[:, SHOWN] / mean
        axis.plot(steps, costs.T, ".", color="#0072B2", markersize=3, alpha=0.5)
        axis.plot(steps, costs.max(axis=0), color="#D55E00", linewidth=1.2)
        axis.set_title(f"{policy}: {100 * run.arm().sync_waste:.1f} % over the ideal")
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("cost of a rank's pack / mean")
    axes[-1].text(steps[0], 1.35, "dearest rank: all wait for it", color="#D55E00")
    axes[-1].text(steps[0], 0.72, "the 8 ranks' packs", color="#0072B2")
    path = pathlib.Path(__file__).parent.parent / "docs" / "effect.png"
    figure.savefig(path, dpi=130)
    write_result("picture", {policy: vars(run.arm()) for policy, run in runs.items()})


if __name__ == "__main__":
    main()
