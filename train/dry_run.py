"""What a run would be, told before anything is compiled: `python -m train.main --config=... --dry_run`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from train.comparison import Comparison
from train.prepare import Prepared
from train.report import compare_all
from train.token_files import Say
from train.warm_up import check_fit

EVAL_COST_OF_TRAINING = 1 / 3
"""A forward pass alone, against forward and backward."""

MUCH_EVALUATION = 0.5
"""Share of the training's work from which a run warns of its evaluations."""


def dry_run(prepared: Prepared, say: Say, *, lengths: Path | None = None) -> Comparison:
    """Says what a run would do and what balancing would buy it; trains and writes nothing else.

    Args:
        prepared: The run.
        say: Takes lines for the user.
        lengths: File for the training records' lengths in tokens, as `bcl-grain` reads them.

    Raises:
        ValueError: If the run does not fit the device, the corpus is too small, or the file can't be written.
    """
    config, job = prepared.config, prepared.job
    say(
        f"job: {job.steps:,} steps of {job.global_batch:,} records ({config.balance.lanes} lanes, "
        f"{config.balance.packs_per_step} packs of {config.balance.pack_size} each), {job.epochs} epochs; "
        f"{job.num_unused:,} records of the last one are not used"
    )
    share = evaluation_share(prepared)
    say(f"evaluation: {len(prepared.evaluation):,} records, as much work as {share:.1%} of all training")
    say(f"memory: {check_fit(prepared):.1f} GiB of a device, by arithmetic")
    comparison = compare_all(prepared)
    say(f"balance, {comparison.describe()}")
    for line in comparison.table().splitlines():
        say(f"  {line}")
    if lengths is not None:
        try:
            with lengths.open("wb") as file:  # a name alone would get an ending
                np.save(file, prepared.train.sizes)
        except OSError as error:
            raise ValueError(
                f"can't write the lengths to {str(lengths)!r}: {error.strerror}; name another file"
            ) from error
        say(f"lengths: {lengths}, for bcl-grain profile, simulate, plan and boundary")
    return comparison


def evaluation_share(prepared: Prepared) -> float:
    """Returns the work of all evaluations of a run, as a share of that of its training, by the model's own costs."""
    cost, job = prepared.lay_out.cost, prepared.job
    training = job.steps * job.global_batch * float(cost.of_length(prepared.train.sizes).mean())
    evaluations = 1 + -(-job.steps // prepared.config.runtime.eval_every)
    held_out = float(cost.of_length(prepared.evaluation.sizes).sum())
    return EVAL_COST_OF_TRAINING * evaluations * held_out / training
