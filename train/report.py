"""What a finished run leaves for its reader: a table on the screen, `summary.json`, a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.checkpoints import CHECKPOINT_DIR
from train.comparison import Comparison, compare_policies
from train.data import LayOut, job_size
from train.exporting import ADAPTERS_DIR, MODEL_DIR
from train.loop import Outcome
from train.metrics_log import METRICS_FILE, Event, read_events
from train.plots import PLOT_FILE, draw_run
from train.prepare import Prepared
from train.programs import Programs
from train.samples import SAMPLES_FILE
from train.timeline import TIMELINE_FILE, draw_timeline
from train.token_files import Say

SUMMARY_FILE = "summary.json"

_FILES = (
    (MODEL_DIR, "the model, for train.ask and for servers"),
    (ADAPTERS_DIR, "the adapters, for train.ask and train.merge with the model that they were made for"),
    (SAMPLES_FILE, "answers to runtime.sample_prompts"),
    (PLOT_FILE, "picture"),
    (TIMELINE_FILE, "where the time went, by rank"),
    (SUMMARY_FILE, "these figures"),
    (METRICS_FILE, "every step"),
    ("tensorboard", "the same for TensorBoard"),
    (CHECKPOINT_DIR, "model, optimizer and pipeline"),
)
"""What a run may leave, the first is what it was made for."""


def compare_all(prepared: Prepared) -> Comparison:
    """Simulates every policy on the training records, for more ranks than this machine has.

    A corpus too small for one step of them is simulated with as many as it fills: a run must not fail for it.
    """
    config = prepared.config
    ranks = min(config.runtime.simulated_ranks, len(prepared.train) // config.balance.pack_size)
    job = job_size(
        len(prepared.train),
        pack_size=config.balance.pack_size,
        ranks=ranks,
        steps=config.runtime.simulated_steps,
        epochs=1,
    )
    return compare_policies(
        prepared.train.sizes,
        job,
        ranks=ranks,
        balance=config.balance,
        prior=prepared.prior,
        # Other packs than the run's: they need not fit its one shape.
        lay_out=LayOut(prepared.eval_layout, prepared.lay_out.cost),
        seed=config.seed,
    )


def report(prepared: Prepared, outcome: Outcome, programs: Programs, run_dir: Path, say: Say = print) -> dict[str, Any]:
    """Prints the run's result, writes `summary.json` and draws `run.png`; returns the summary."""
    events = read_events(run_dir)
    comparison = compare_all(prepared)
    draw_run(
        run_dir / PLOT_FILE,
        pack_costs={policy: simulation.estimated for policy, simulation in comparison.simulations.items()},
        events=events,
        baseline_loss=prepared.bigram_loss,
        title=f"{comparison.describe()}; training of {outcome.step} steps",
    )
    summary = _summary(prepared, outcome, comparison, events) | {"warm_up": programs.warm_up._asdict()}
    (run_dir / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")
    for line in _lines(summary, comparison):
        say(line)
    draw_timeline(run_dir / TIMELINE_FILE, events)
    for name, content in _FILES:
        if (run_dir / name).exists():
            say(f"  {run_dir / name}: {content}")
    return summary


def _summary(prepared: Prepared, outcome: Outcome, comparison: Comparison, events: Sequence[Event]) -> dict[str, Any]:
    train = [event for event in events if event["kind"] == "train"]
    evals = [event for event in events if event["kind"] == "eval"]
    return {
        "steps": outcome.step,
        "records": sum(event["records"] for event in train),
        "loss_tokens": sum(event["tokens"] for event in train),
        "parameters": prepared.model.num_parameters,
        "first_training_loss": train[0]["loss"],
        "last_training_loss": train[-1]["loss"],
        "first_eval_loss": evals[0]["loss"],
        "last_eval_loss": evals[-1]["loss"],
        "last_eval_accuracy": evals[-1]["accuracy"],
        "eval_records": len(prepared.evaluation),
        "eval_loss_tokens": evals[-1]["tokens"],
        "bigram_eval_loss": prepared.bigram_loss,
        "beats_bigram": evals[-1]["loss"] < prepared.bigram_loss,
        "comparison": {
            "ranks": comparison.ranks,
            "steps": comparison.job.steps,
            "policies": comparison.figures(),
        },
        "compilations_after_warmup": outcome.late_programs,
        **_time_summary(events),
        "training_seconds": outcome.training_seconds,
    }


def _time_summary(events: Sequence[Event]) -> dict[str, Any]:
    """Returns medians of what the timed steps spent, the first one left out: it waits for the pipeline to fill."""
    timed = [event for event in events if event["kind"] == "time"][1:]
    names = (
        "step_seconds",
        "local_seconds_max",
        "update_seconds",
        "idle_seconds_max",
        "data_seconds_max",
        "wait_share",
    )
    return {"time": {name: float(np.median([event[name] for event in timed])) for name in names} if timed else {}}


def _time_lines(time: dict[str, float]) -> list[str]:
    if not time or not time["step_seconds"]:
        return []
    step = time["step_seconds"]
    shares = (
        ("slowest rank by itself", "local_seconds_max"),
        ("update", "update_seconds"),
        ("without work", "idle_seconds_max"),
    )
    parts = ", ".join(f"{what} {time[name] / step:.0%}" for what, name in shares)
    return [f"  a step          {step:.3f} s (median): {parts}; ranks wait for each other {time['wait_share']:.1%}"]


def _lines(summary: dict[str, Any], comparison: Comparison) -> list[str]:
    beats = "beats" if summary["beats_bigram"] else "does NOT beat"
    return [
        "",
        f"Result after {summary['steps']} steps, {summary['records']:,.0f} records, {summary['loss_tokens']:,.0f} "
        f"response tokens ({summary['training_seconds']:.0f} s since the start or resume)",
        f"  training loss  {summary['first_training_loss']:.4f} -> {summary['last_training_loss']:.4f}",
        f"  eval loss      {summary['first_eval_loss']:.4f} -> {summary['last_eval_loss']:.4f} on "
        f"{summary['eval_records']} held-out records, accuracy {summary['last_eval_accuracy']:.3f}",
        f"  bigram         {summary['bigram_eval_loss']:.4f} on the same: the model {beats} it",
        f"  compilations after warm-up: {summary['compilations_after_warmup']}",
        *_time_lines(summary["time"]),
        "",
        f"Balance, {comparison.describe()}",
        *(f"  {line}" for line in comparison.table().splitlines()),
        "",
        "Files",
    ]
