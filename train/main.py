"""Trains a model: `python -m train.main --config=configs/default.py`.

Exit codes: 0, all steps were made; 1, training failed; 2, bad input: settings, corpus or directory, nothing was
trained; 75, stopped by SIGTERM or SIGINT, a checkpoint was saved and `--resume` goes on from it.

Several processes make one job if each is told its place: by a cluster (`--distributed`, see docs/cluster.md), by
`train.launch` on one machine, or by hand.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from tqdm import tqdm

from train.checkpoints import CheckpointError, SaveError, latest_step, saved_steps
from train.command_line import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, fail, parse_flags
from train.compiling import enable_compile_cache
from train.dry_run import MUCH_EVALUATION, dry_run, evaluation_share
from train.loop import DivergedError, LateCompilationError, run_training
from train.overrides import load_config, override
from train.prepare import Prepared, prepare
from train.processes import DisagreementError, agree, from_main, join, leave, together, wait_for_all
from train.report import report
from train.run_directory import check_run_dir, saved_identity
from train.starting import StartError
from train.topology import Topology, recall_lanes
from train.warm_up import warm_up

EXIT_STOPPED = 75

_CONFIG = flags.DEFINE_string("config", None, "Config file: defines get_config() -> TrainConfig.", required=True)
_SET = flags.DEFINE_multi_string(
    "set", [], "Replaces a field: --set=balance.policy=arrival. May be repeated, in any order."
)
_STEPS = flags.DEFINE_integer("steps", None, "Number of updates: the same as --set=steps=N.", lower_bound=1)
_RUN_DIR = flags.DEFINE_string("run_dir", None, "Where the run's files go. Default: runs/<config name>-<number>.")
_RESUME = flags.DEFINE_bool("resume", False, "Goes on with the run in --run_dir, from its latest checkpoint.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Says what the run would be and what balancing would buy, and ends.")
_LENGTHS = flags.DEFINE_string("lengths", None, "With --dry_run: file for the records' lengths, for bcl-grain.")
_INIT = flags.DEFINE_string("init", None, "Directory of another run: a new run starts from its latest parameters.")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "One process of several: asks the cluster for its place.")
_COORDINATOR_ADDRESS = flags.DEFINE_string("coordinator_address", None, "One of several: host:port of process 0.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "One of several: how many there are.", lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "One of several: which, from 0.", lower_bound=0)
_COMPILE_CACHE = flags.DEFINE_string("compile_cache", "runs/xla-cache", "Keeps compiled programs; empty for none.")


def main(argv: Sequence[str]) -> int:
    """Does what the flags say; returns the exit code."""
    try:
        exit_code = _main(argv)
    except Exception:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        print("error: this process failed, or another one has died, and with it the job", file=sys.stderr)
        exit_code = EXIT_FAILED
    return exit_code if exit_code in (EXIT_DONE, EXIT_STOPPED) else leave(exit_code)


def _main(argv: Sequence[str]) -> int:
    start = time.monotonic()
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax tells a page about every checkpoint
    init = None if _INIT.value is None else Path(_INIT.value)
    try:
        if argv[1:]:
            raise ValueError(f"unexpected arguments {list(argv[1:])}: flags are written --name=value")
        if _LENGTHS.value is not None and not _DRY_RUN.value:
            raise ValueError("--lengths goes with --dry_run")
        if init is not None and _RESUME.value:
            raise ValueError(
                "--init starts a new run from another one's parameters, --resume goes on with a run: pass one"
            )
        steps = [] if _STEPS.value is None else [f"steps={_STEPS.value}"]
        config = override(load_config(_CONFIG.value), [*_SET.value, *steps])
        if init is not None and config.pretrained is not None and config.model.lora is None:
            raise ValueError(
                f"the config starts from the model {config.pretrained!r}, --init from the parameters of another run: "
                "leave one out"
            )
        join(
            coordinator_address=_COORDINATOR_ADDRESS.value,
            num_processes=_NUM_PROCESSES.value,
            process_id=_PROCESS_ID.value,
            detect=_DISTRIBUTED.value,
        )
        if _COMPILE_CACHE.value:
            enable_compile_cache(Path(_COMPILE_CACHE.value).absolute())
        topology = Topology.current()
        say, write = (print, tqdm.write) if topology.is_main else (_silent, _silent)
        run_dir = Path(from_main(lambda: str(_run_dir())))
        saved = from_main(lambda: saved_identity(run_dir)) if _RESUME.value else None
        if saved is not None:
            config = dataclasses.replace(config, balance=recall_lanes(config.balance, saved))
        init, origin = _origin(init, saved, run_dir)
        prepared = together(lambda: prepare(config, topology, say))
        if origin is not None:
            prepared = dataclasses.replace(prepared, identity={**prepared.identity, "init": origin})
        if _DRY_RUN.value:
            agree(_agreement(prepared))
            dry_run(prepared, say, lengths=Path(_LENGTHS.value) if topology.is_main and _LENGTHS.value else None)
            say(f"dry run: {time.monotonic() - start:.1f} s in all, nothing was compiled or trained")
            return EXIT_DONE
        from_main(
            lambda: check_run_dir(
                run_dir,
                prepared.identity,
                resume=_RESUME.value,
                on_changed_balance=config.runtime.on_changed_balance,
            )
        )
        agree(_agreement(prepared))
    except ValueError as error:
        return fail(error, EXIT_BAD_INPUT)
    say(f"run directory: {run_dir}; inputs ready after {time.monotonic() - start:.1f} s")
    if (share := evaluation_share(prepared)) > MUCH_EVALUATION:
        say(
            f"warning: the evaluations take as much work as {share:.0%} of all training: raise runtime.eval_every, or "
            "lower corpus.eval_share"
        )
    say(f"bigram model: eval loss {prepared.bigram_loss:.4f}, in nats a response token, as all losses here")
    try:
        programs = warm_up(prepared, say)
    except ValueError as error:
        return fail(error, EXIT_BAD_INPUT)
    try:
        outcome = run_training(prepared, programs, run_dir, init=init, say=write)
    except (CheckpointError, DisagreementError, StartError) as error:
        return fail(error, EXIT_BAD_INPUT)
    except (DivergedError, LateCompilationError, SaveError) as error:
        return fail(error, EXIT_FAILED)
    except OSError as error:
        remedy = "The checkpoints that are there are whole: make room or mend it, then go on with --resume"
        return fail(OSError(f"can't go on in {str(run_dir)!r}: {error}. {remedy}"), EXIT_FAILED)
    if outcome.stopped_by is not None:
        wait_for_all("the checkpoint is saved")  # process 0 is busy with its checksums
        say(
            f"{outcome.stopped_by}: stopped after step {outcome.step} of {prepared.job.steps}, checkpoint saved. Go on "
            f"with the same command and --run_dir={run_dir} --resume"
        )
        return EXIT_STOPPED
    if topology.is_main:
        report(prepared, outcome, programs, run_dir)
    wait_for_all("the report is written")
    say(f"{time.monotonic() - start:.0f} s in all")
    return EXIT_DONE


def _origin(
    init: Path | None, saved: Mapping[str, Any] | None, run_dir: Path
) -> tuple[Path | None, dict[str, Any] | None]:
    """Returns the run to start from, and what the identity says of it. All processes call it together.

    Args:
        init: As the flag says.
        saved: Identity of the run that goes on, None for a new one.
        run_dir: Its directory.
    """
    if saved is None:
        return init, None if init is None else {"run": str(init.absolute()), "step": latest_step(init)}
    origin = saved.get("init")
    if origin is None or from_main(lambda: bool(saved_steps(run_dir))):
        return None, origin
    # It ended before its first checkpoint: without this it would start anew from fresh parameters.
    other = Path(origin["run"])
    step = latest_step(other)
    if step != origin["step"]:
        raise ValueError(
            f"the run in {str(run_dir)!r} began with step {origin['step']} of {str(other)!r} and has no checkpoint of "
            f"its own; that run is at step {step} now: remove {str(run_dir)!r} and start anew with --init={other}"
        )
    return other, origin


def _agreement(prepared: Prepared) -> dict[str, Any]:
    """Returns what all processes must have alike, or they would wait for each other or compute nonsense."""
    runtime = dataclasses.asdict(prepared.config.runtime)
    for of_one_process in ("prefetch_steps", "token_cache", "data_workers"):
        del runtime[of_one_process]
    return {
        **prepared.identity,
        "runtime": runtime,
        "versions": {module.__name__: module.__version__ for module in (jax, np)},
    }


def _silent(line: str) -> None:
    del line


def _run_dir() -> Path:
    if _RUN_DIR.value is not None:
        return Path(_RUN_DIR.value)
    if _RESUME.value:
        raise ValueError("--resume needs --run_dir: which run shall go on?")
    name = Path(_CONFIG.value).stem
    return next(path for i in itertools.count(1) if not (path := Path("runs", f"{name}-{i:03}")).exists())


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
