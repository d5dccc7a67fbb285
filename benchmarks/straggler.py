"""What the slowest rank costs, by the clock and by prediction: `python -m benchmarks.straggler`.

Two ranks train a small decoder, each a process pinned to a core of its own, joined by `jax.distributed` over
loopback. XLA runs single-threaded, or an idle rank would lend its core to the slow one and the effect would be
understated. Arms:

  arrival     packs in order of arrival
  windowed    balanced inside windows
  streaming   aimed at the long-run mean, steps aligned between ranks
  mffd        pooled modified first-fit decreasing: sees both ranks' records of a step, gives both as many rows
  spmd        streaming within one static shape, one global program

All arms consume the same records in the same number of steps, which is checked twice: in the plan, and by the tokens
that the programs counted. Every shape is compiled and run once on every rank before anything is timed. Arms take
turns, round after round; calibrations of the chunk shapes stand between rounds. A step is predicted as the largest
rank's sum of chunk times plus the update; measured is the median over rounds, waiting after the local part and after
the update. Then every arm runs once without that waiting, as a trainer does. Claimed are ratios to arrival, not
throughput. The busiest rank's processor time is told beside: other work on the machine spoils the clock, but not that.

Lengths are those of real corpora (`../shared/data/lengths` beside the checkout, else the library's own tables), cut at
their 99th percentile and scaled so that this is a row. About 6 minutes on two idle cores; `--quick` is for tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bcl_grain.cost_table import TableCost
from bcl_grain.layouts import RowPackedLayout
from bcl_grain.workloads import load_workload
from benchmarks.result import RESULTS, write_result
from benchmarks.straggler_arms import ARMS, SPMD, Plan, chunk_counts, make_plan

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

LENGTHS = pathlib.Path(__file__).parents[2] / "shared" / "data" / "lengths"
AGREEMENT, SHORTFALL = 0.05, 0.03
"""How far a measured ratio may be from its prediction, and how much less than predicted streaming may gain."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What is run.

    Attributes:
        ranks: Processes.
        corpora: Names of length tables.
        steps: Steps of each arm.
        rounds: Times that each arm runs with waiting.
        pack_size: Records of a rank in a step.
        lookahead: Pool in steps.
        layout: Packs to chunks; the longest record fills a row. Rows are cut short where that saves a fourth, so that
            padding does not bury what is measured.
        model: Dimensions.
        timeout_seconds: The ranks are ended after that.
    """

    ranks: int = 2
    corpora: tuple[str, ...] = ("medquad", "taskmaster4")
    steps: int = 32
    rounds: int = 3
    pack_size: int = 8
    lookahead: int = 8
    layout: RowPackedLayout = dataclasses.field(
        default_factory=lambda: RowPackedLayout(length=512, rows_per_chunk=1, lengths=(128, 256, 384))
    )
    model: Mapping[str, int] = dataclasses.field(
        default_factory=lambda: {
            "vocab_size": 512,
            "layers": 2,
            "width": 128,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 64,
            "hidden": 320,
        }
    )
    timeout_seconds: float = 600.0


QUICK = Setup(
    corpora=("medquad",),
    steps=6,
    rounds=1,
    pack_size=4,
    lookahead=3,
    layout=RowPackedLayout(length=32, rows_per_chunk=2, heights=(1,)),
    model={"vocab_size": 16, "layers": 1, "width": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "hidden": 8},
    timeout_seconds=120.0,
)


def draw_lengths(name: str, setup: Setup) -> IntArray:
    """Returns independent draws [ranks, steps * pack_size], cut at the 99th percentile and scaled to the row length."""
    shape = setup.ranks, setup.steps * setup.pack_size
    rng = np.random.default_rng(0)
    if (LENGTHS / f"{name}.npz").exists():
        with np.load(LENGTHS / f"{name}.npz") as table:
            lengths = table["len"] if "len" in table else table["prompt_len"] + table["response_len"]
        cap = np.percentile(lengths, 99)
        drawn = rng.choice(lengths, shape)
    else:
        workload = load_workload(name)
        cap = workload.p99
        drawn = workload.sample(shape[0] * shape[1], rng).reshape(shape)
    longest = setup.layout.length
    scaled = np.ceil(np.minimum(drawn, cap) * (longest / cap))
    return np.clip(scaled, 2, longest).astype(np.int64)  # a single token has nothing to predict


def make_turns(setup: Setup) -> list[dict[str, Any]]:
    """Returns what the ranks do, in order."""
    turns: list[dict[str, Any]] = []
    for _ in range(setup.rounds):
        for corpus in setup.corpora:
            turns.append({"kind": "calibrate", "repeats": 5})
            turns += [{"kind": "blocked", "corpus": corpus, "arm": arm} for arm in ARMS]
    for corpus in setup.corpora:
        turns += [{"kind": "free", "corpus": corpus, "arm": arm} for arm in ARMS]
    turns.append({"kind": "calibrate", "repeats": 5})
    return turns


def run_ranks(setup: Setup, plans: Mapping[str, Plan]) -> list[dict[str, Any]]:
    """Runs one process a rank and returns what each of them wrote.

    Raises:
        RuntimeError: If a process fails; the message has the end of its output.
    """
    cores = sorted(os.sched_getaffinity(0))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {
        "coordinator": f"127.0.0.1:{port}",
        "ranks": setup.ranks,
        "cores": cores[: setup.ranks] if len(cores) >= setup.ranks else None,
        "model": dict(setup.model),
        "shapes": sorted({shape for plan in plans.values() for shape in plan.shapes}),
        "spmd_shapes": [plan.spmd_shape for plan in plans.values()],
        "plans": {name: plan.arms for name, plan in plans.items()},
        "turns": make_turns(setup),
    }
    flags = f"--xla_cpu_multi_thread_eigen=false {os.environ.get('XLA_FLAGS', '')}".strip()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "job.json"
        path.write_text(json.dumps(job))
        outputs = [path.with_name(f"output-{rank}.txt") for rank in range(setup.ranks)]
        processes = []
        for rank, output in enumerate(outputs):
            with output.open("w") as stream:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "benchmarks.straggler_rank", str(path), str(rank)],
                        cwd=pathlib.Path(__file__).parents[1],
                        env=environment,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            _wait(processes, setup.timeout_seconds)
            failed = [rank for rank, process in enumerate(processes) if process.poll() != 0]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed:
            tails = "\n".join(f"rank {rank}: {outputs[rank].read_text()[-3000:]}" for rank in failed)
            raise RuntimeError(f"ranks {failed} failed, or were ended after {setup.timeout_seconds:g} s:\n{tails}")
        return [json.loads((path.parent / f"rank-{rank}.json").read_text()) for rank in range(setup.ranks)]


def _wait(processes: list[subprocess.Popen[bytes]], timeout_seconds: float) -> None:
    """Returns when all are done, one has failed (the others would wait for it for ever), or the time is over."""
    end = time.monotonic() + timeout_seconds
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            return
        time.sleep(0.1)


def fit_table(results: list[dict[str, Any]], kind: str = "seconds") -> TableCost:
    """Returns the median time of each chunk shape, and of the update, over ranks and calibrations.

    Args:
        results: What the ranks wrote.
        kind: `seconds` by the clock, or `busy` for processor time; the update is by the clock.
    """
    calibrations = [calibration for result in results for calibration in result["calibrations"]]
    shapes = [(rows, length) for rows, length in calibrations[0]["shapes"]]
    seconds = [
        float(np.median([second for calibration in calibrations for second in calibration[kind][i]]))
        for i in range(len(shapes))
    ]
    update = float(np.median([second for calibration in calibrations for second in calibration["update"]]))
    return TableCost.from_timings(list(zip(shapes, seconds, strict=True)), update_seconds=update)


def predict_steps(plan: Plan, arm: str, cost: TableCost) -> FloatArray:
    """Returns the predicted seconds of each step, [steps]."""
    of_shapes = np.array([cost.of_chunk(*shape) for shape in plan.shapes])
    by_rank = chunk_counts(plan.arms[arm], plan.shapes) @ of_shapes
    return np.asarray(by_rank.max(axis=0) + cost.update_seconds, np.float64)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the clock said of one arm, medians over rounds.

    Attributes:
        seconds: [steps] from the first rank's start to the last one's end.
        waited: [ranks, steps] seconds from a rank's own local part to the last rank's.
        busy: [steps] processor seconds of the busiest rank's local part, which other work on the machine does not
            touch; empty for SPMD.
    """

    seconds: FloatArray
    waited: FloatArray
    busy: FloatArray


def measure_steps(results: list[dict[str, Any]], corpus: str, arm: str) -> Measured:
    """Returns what was measured with waiting."""
    by_rank = [
        [run for run in result["runs"] if (run["kind"], run["corpus"], run["arm"]) == ("blocked", corpus, arm)]
        for result in results
    ]
    begin, local, end, busy = (
        np.array([[run[name] for run in runs] for runs in by_rank]) for name in ("begin", "local", "end", "busy")
    )
    return Measured(
        seconds=np.median(end.max(axis=0) - begin.min(axis=0), axis=0),
        waited=np.median(local.max(axis=0, keepdims=True) - local, axis=1),
        busy=np.median(busy, axis=1).max(axis=0),
    )


def summarize(setup: Setup, plan: Plan, corpus: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one corpus's figures by arm.

    Raises:
        RuntimeError: If the arms did not train on the same number of tokens.
    """
    runs = [run for run in results[0]["runs"] if run["corpus"] == corpus]
    if len({run["tokens"] for run in runs}) != 1:
        raise RuntimeError(f"arms trained on different numbers of tokens: {[(r['arm'], r['tokens']) for r in runs]}")
    free = {run["arm"]: run["seconds"] / setup.steps for run in runs if run["kind"] == "free"}
    cost, busy_cost = fit_table(results), fit_table(results, "busy")
    arms: dict[str, Any] = {}
    for arm in ARMS:
        predicted, measured = predict_steps(plan, arm, cost), measure_steps(results, corpus, arm)
        seconds = measured.seconds
        arms[arm] = {
            "predicted_step_seconds": float(predicted.mean()),
            "measured_step_seconds": float(seconds.mean()),
            "measured_median_seconds": float(np.median(seconds)),
            "measured_p95_seconds": float(np.percentile(seconds, 95)),
            "measured_over_predicted": float(seconds.sum() / predicted.sum()),
            "free_step_seconds": free[arm],
            "wait_share": None if arm == SPMD else float(measured.waited.mean() / seconds.mean()),
            "predicted_steps": predicted.tolist(),
            "measured_steps": seconds.tolist(),
        }
        if arm != SPMD:
            predicted_busy = predict_steps(plan, arm, busy_cost) - busy_cost.update_seconds
            arms[arm] |= {"busy_seconds": float(measured.busy.mean()), "predicted_busy": float(predicted_busy.mean())}
    base = arms["arrival"]
    for figures in arms.values():
        figures["predicted_speedup"] = base["predicted_step_seconds"] / figures["predicted_step_seconds"]
        figures["measured_speedup"] = base["measured_step_seconds"] / figures["measured_step_seconds"]
        figures["free_speedup"] = base["free_step_seconds"] / figures["free_step_seconds"]
        figures["agreement"] = figures["measured_speedup"] / figures["predicted_speedup"] - 1
        if "busy_seconds" in figures:
            figures["busy_speedup"] = base["busy_seconds"] / figures["busy_seconds"]
            figures["predicted_busy_speedup"] = base["predicted_busy"] / figures["predicted_busy"]
    streaming = arms["streaming"]
    return {
        "records": sum(len(work.sizes) for works in plan.arms["arrival"] for work in works),
        "loss_tokens": runs[0]["tokens"],
        "spmd_shape": plan.spmd_shape,
        "arms": arms,
        "all_ratios_agree": all(abs(figures["agreement"]) <= AGREEMENT for figures in arms.values()),
        "streaming_keeps_its_promise": streaming["measured_speedup"] >= streaming["predicted_speedup"] - SHORTFALL,
    }


def table(summary: Mapping[str, Any]) -> str:
    """Returns a corpus's figures as text."""
    lines = [
        f"{'':10} {'step, ms':^24} {'':6} {'measured/':>9}   {'speed-up over arrival':^39}   {'in processor time':^19}",
        f"{'arm':10} {'mean':>8} {'p95':>7} {'free':>7} {'wait':>6} {'predicted':>9}   {'measured':>8} {'free':>8} "
        f"{'predicted':>9} {'agreement':>11}   {'measured':>8} {'predicted':>10}",
    ]
    for arm, f in summary["arms"].items():
        wait = "" if f["wait_share"] is None else f"{f['wait_share']:.1%}"
        milliseconds = [1e3 * f[f"{name}_seconds"] for name in ("measured_step", "measured_p95", "free_step")]
        busy = f"   {f['busy_speedup']:8.3f} {f['predicted_busy_speedup']:10.3f}" if "busy_speedup" in f else ""
        lines.append(
            f"{arm:10} {milliseconds[0]:8.1f} {milliseconds[1]:7.1f} {milliseconds[2]:7.1f} {wait:>6} "
            f"{f['measured_over_predicted']:9.3f}   {f['measured_speedup']:8.3f} {f['free_speedup']:8.3f} "
            f"{f['predicted_speedup']:9.3f} {f['agreement']:+11.1%}{busy}"
        )
    return "\n".join(lines)


def draw(corpora: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws measured against predicted speed-ups, and single steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(corpora), figsize=(5 * len(corpora), 7), squeeze=False, layout="constrained")
    for (name, summary), bars, dots in zip(corpora.items(), *axes, strict=True):
        places = np.arange(len(ARMS))
        for shift, kind, color in ((-0.2, "predicted", "#0072B2"), (0.2, "measured", "#D55E00")):
            values = [summary["arms"][arm][f"{kind}_speedup"] for arm in ARMS]
            bars.bar(places + shift, values, width=0.4, label=kind, color=color)
        bars.axhline(1, color="0.5", linewidth=0.8)
        bars.set_xticks(places, ARMS)
        bars.set_ylim(min(0.8, *(f["measured_speedup"] for f in summary["arms"].values())) - 0.05)
        bars.set_ylabel("speed-up over arrival")
        bars.set_title(name)
        for arm, color in zip(ARMS, ("#999999", "#56B4E9", "#D55E00", "#009E73", "#CC79A7"), strict=True):
            f = summary["arms"][arm]
            dots.plot(f["predicted_steps"], f["measured_steps"], ".", color=color, label=arm, markersize=4)
        limit = max(max(f["predicted_steps"]) for f in summary["arms"].values())
        dots.plot([0, limit], [0, limit], color="0.5", linewidth=0.8)
        dots.set_xlabel("predicted step, seconds")
        dots.set_ylabel("measured step, seconds")
    axes[0][0].legend(frameon=False)
    axes[1][0].legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs everything, prints tables, writes JSON and the plot; returns the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.straggler", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="toy sizes: shows that it runs, measures nothing")
    parser.add_argument("--steps", type=int, help="steps of each arm")
    parser.add_argument("--rounds", type=int, help="times that each arm runs")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="directory of the results")
    args = parser.parse_args(argv)
    given = {name: value for name in ("steps", "rounds") if (value := getattr(args, name)) is not None}
    setup = dataclasses.replace(QUICK if args.quick else Setup(), **given)
    loads, start = [os.getloadavg()], time.monotonic()
    plans = {
        name: make_plan(draw_lengths(name, setup), setup.layout, pack_size=setup.pack_size, lookahead=setup.lookahead)
        for name in setup.corpora
    }
    results = run_ranks(setup, plans)
    loads.append(os.getloadavg())
    cost = fit_table(results)
    corpora = {name: summarize(setup, plan, name, results) for name, plan in plans.items()}
    for name, summary in corpora.items():
        promise = "kept" if summary["streaming_keeps_its_promise"] else "NOT kept"
        agree = "all agree" if summary["all_ratios_agree"] else "NOT all agree"
        print(f"\n{name}: {setup.ranks} ranks x {setup.pack_size} records, {setup.steps} steps, {setup.rounds} rounds")
        print(table(summary))
        print(
            f"ratios within {AGREEMENT:.0%} of the predicted: {agree}; streaming's gain less {SHORTFALL:.0%}: {promise}"
        )
    late = [result["late_programs"] for result in results]
    pinned = [result["core"] for result in results]
    print(f"\ncompiled after warm-up, by rank: {late}; cores: {pinned}; load average before and after: {loads}")
    figures = {
        "setup": dataclasses.asdict(setup),
        "load_average": loads,
        "seconds": time.monotonic() - start,
        "compiled_after_warm_up": late,
        "cores": pinned,
        "chunk_seconds": [[*shape, seconds] for shape, seconds in cost.chunk_seconds],
        "update_seconds": cost.update_seconds,
        "corpora": corpora,
    }
    path = write_result("straggler", figures, args.output)
    draw(corpora, path.with_suffix(".png"))
    return figures


if __name__ == "__main__":
    main()
