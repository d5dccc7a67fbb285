"""Times a config's chunk shapes on this device: `python -m train.calibrate --config=configs/default.py`.

Writes a cost table, which the planner of a training run (`balance.cost_table`) and `bcl-grain simulate
--cost table:FILE` take for costs, and says how well the sum of a pack's chunk times predicts whole steps.

Exit codes: 0, the table is written; 2, bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bcl_grain.cost_table import CostTable, write_cost_table
from train.calibration import Calibration, calibrate
from train.compiling import enable_compile_cache
from train.config import TrainConfig
from train.data import train_dataset
from train.overrides import load_config, override
from train.prepare import Prepared, prepare
from train.programs import Programs, compile_programs
from train.step import Chunk
from train.topology import Topology

EXIT_DONE, EXIT_BAD_INPUT = 0, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Does what the arguments say; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        config = override(load_config(args.config), args.set)
        # The table that comes of this must not depend on another.
        config = dataclasses.replace(config, balance=dataclasses.replace(config.balance, cost_table=None))
        if args.compile_cache:
            enable_compile_cache(Path(args.compile_cache).absolute())
        prepared = prepare(config, Topology(process_index=0, process_count=1, local_devices=1))
        packs = take_packs(prepared, args.steps)
        programs = _compile(prepared)
        result = calibrate(
            programs, packs, vocab_size=prepared.model.vocab_size, repeats=args.repeats, seed=config.seed
        )
        result = dataclasses.replace(
            result, cost=result.cost.with_records(prepared.lay_out.layout, draw_packs(prepared))
        )
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_cost_table(CostTable(result.cost, about(prepared, result)), args.output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print("\n".join(describe(result)))
    print(f"wrote {args.output}: use it with --set=balance.cost_table={args.output}")
    return EXIT_DONE


def take_packs(prepared: Prepared, steps: int) -> list[list[Chunk]]:
    """Returns the chunks of the first packs that a run on one device would train on."""
    iterator = iter(
        train_dataset(
            prepared.train,
            prepared.job,
            balance=prepared.config.balance,
            prior=prepared.prior,
            lay_out=prepared.lay_out,
            seed=prepared.config.seed,
        )
    )
    return [[chunk for pack in packs for chunk in pack.chunks] for packs in itertools.islice(iterator, steps)]


def draw_packs(prepared: Prepared, *, packs: int = 512) -> list[list[int]]:
    """Returns the record lengths of random packs of the run's records."""
    rng = np.random.default_rng(prepared.config.seed)
    drawn: list[list[int]] = rng.choice(prepared.train.sizes, (packs, prepared.config.balance.pack_size)).tolist()
    return drawn


def describe(result: Calibration) -> list[str]:
    """Returns the result as lines for the user."""
    lines = [f"{'chunk':>12}  {'seconds':>9}  {'spread':>6}  us/token"]
    for (rows, length), timing in result.chunks.items():
        per_token = 1e6 * timing.seconds / (rows * length)
        lines.append(f"{rows:>5} x {length:>4}  {timing.seconds:9.5f}  {timing.spread:6.1%}  {per_token:8.2f}")
    figures, cost = result.prediction.figures(), result.cost
    lines.append(f"{'update':>12}  {result.update.seconds:9.5f}  {result.update.spread:6.1%}")
    lines.append(
        f"a record of n tokens: {cost.per_token:.4g} n + {cost.per_token_squared:.4g} n^2 seconds, fitted to what "
        "packs take in the layout"
    )
    lines.append(
        f"rows of many records take {result.segments_ratio:.3f} times as long as rows of one: "
        + ("whole rows are run, whatever they hold" if result.segments_ratio > 0.9 else "attention skips other records")
    )
    lines.append(
        f"sum of chunks + update against {figures['steps']} whole steps: R^2 {figures['r_squared']:.4f}, median error "
        f"{figures['median_absolute_error']:.1%}, measured / predicted {figures['measured_over_predicted']:.3f}"
    )
    of_rows = [seconds for (height, _), seconds in cost.chunk_seconds if height == 1 and seconds > cost.per_chunk]
    if of_rows and len(cost.chunk_seconds) > 1:
        lines.append(
            f"a chunk costs {cost.per_chunk:.4g} seconds more than its rows; for a row-packed layout: "
            f"chunk_overhead_rows={cost.per_chunk / (max(of_rows) - cost.per_chunk):.3f}"
        )
    return lines


def about(prepared: Prepared, result: Calibration) -> dict[str, Any]:
    """Returns where the figures come from, JSON-safe."""
    config: TrainConfig = prepared.config
    device = jax.local_devices()[0]
    return {
        "command": " ".join(["python", "-m", "train.calibrate", *sys.argv[1:]]),
        "commit": _commit(),
        "device": device.device_kind,
        "platform": device.platform,
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "model": dataclasses.asdict(prepared.model),
        "layout": type(prepared.lay_out.layout).__name__,
        "attention": config.runtime.attention,
        "timings": {f"{rows}x{length}": dataclasses.asdict(t) for (rows, length), t in result.chunks.items()},
        "update": dataclasses.asdict(result.update),
        "segments_ratio": result.segments_ratio,
        "prediction": {
            **result.prediction.figures(),
            "predicted_seconds": list(result.prediction.predicted),
            "measured_seconds": list(result.prediction.measured),
        },
    }


def _compile(prepared: Prepared) -> Programs:
    return compile_programs(
        prepared.model,
        prepared.optimizer,
        prepared.lay_out.layout.shapes,
        devices=jax.local_devices()[:1],
        expected_tokens=prepared.expected_tokens,
        one_record_rows=prepared.one_record_rows,
        attention=prepared.config.runtime.attention,
    )


def _commit() -> str:
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run.stdout.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m train.calibrate", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--config", required=True, help="config file of a training run")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="replaces a field of it")
    parser.add_argument("--output", type=Path, default=Path("runs/cost-table.json"), help="where the table goes")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each time; their median counts")
    parser.add_argument("--steps", type=int, default=20, help="whole steps to check the sums against")
    parser.add_argument("--compile_cache", default="runs/xla-cache", help="keeps compiled programs; empty for none")
    return parser


if __name__ == "__main__":
    sys.exit(main())
