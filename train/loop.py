"""The training loop: one update after the other, everything about them written down, nothing lost when it is stopped.

The order inside a step must not change:

1. take the step's packs from the pipeline, one for each local device;
2. dispatch the update;
3. only now read the metrics of the step before, so that the devices never wait for the host;
4. at a boundary: read this step's metrics too (a diverged state is never saved), evaluate, save. The pipeline has then
   given exactly the packs of the updates made, so that both are saved as of the same moment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
from absl import logging
from tqdm import tqdm

from train.checkpoints import Checkpoints, claim_run_dir, load_params
from train.compiling import CompileCounter
from train.config import fingerprint
from train.data import Pack, eval_chunks, train_dataset
from train.metrics_log import MetricsLog
from train.prepare import Prepared, Say
from train.programs import Metrics, Programs, compile_programs
from train.state import TrainState
from train.step import Chunk, evaluate, init_state, train_step
from train.stopping import StopRequest
from train.topology import deal


class DivergedError(Exception):
    """The loss is no longer a number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a call of `run_training` ended.

    Attributes:
        step: Updates made in all.
        stopped_by: Name of the signal that stopped it at `step`, or None if all steps were made.
        late_programs: Programs compiled after the warm-up; any is a defect.
        training_seconds: Time from the first step to the end, evaluation and checkpoints included.
    """

    step: int
    stopped_by: str | None
    late_programs: int
    training_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Dispatched:
    """An update whose metrics were not read yet."""

    step: int
    metrics: Metrics
    packs: Sequence[Pack]
    data_seconds: float


def warm_up(prepared: Prepared, say: Say = print) -> Programs:
    """Compiles everything that the run will need."""
    counter = CompileCounter()
    programs = compile_programs(
        prepared.model,
        prepared.optimizer,
        prepared.lay_out.layout.shapes,
        expected_tokens=prepared.expected_tokens,
        one_record_rows=prepared.one_record_rows,
        attention=prepared.config.runtime.attention,
    )
    say(
        f"warm-up: {counter.programs} programs for the chunk shapes {programs.shapes} in "
        f"{programs.compile_seconds:.1f} s, {counter.cache_hits} of them from the compile cache"
    )
    return programs


def run_training(
    prepared: Prepared,
    programs: Programs,
    run_dir: Path,
    *,
    init: Path | None = None,
    say: Say = print,
    stop: StopRequest | None = None,
) -> Outcome:
    """Trains from the latest checkpoint in `run_dir`, or from the start if there is none, to the last step.

    Args:
        prepared: The run.
        programs: From `warm_up`.
        run_dir: The run's directory, checked with `train.checkpoints.check_run_dir`.
        init: Directory of another run: a new run starts from its latest parameters.
        say: Takes lines for the user; `tqdm.write` keeps them apart from the progress bar.
        stop: Asks to stop at a step's end; by default SIGTERM and SIGINT do.

    Returns:
        How it ended. At a request to stop, a checkpoint of the last update is there when it returns.

    Raises:
        DivergedError: If a loss is not finite; the last checkpoint is from before.
        CheckpointError: If a checkpoint belongs to another run, or `init` can't be used.
    """
    config = prepared.config
    state = init_state(programs, seed=config.seed)
    if init is not None:
        state = dataclasses.replace(state, params=load_params(init, programs.abstract_state.params))
        say(f"parameters from {init}")
    claim_run_dir(run_dir, prepared.identity)
    stop = StopRequest() if stop is None else stop
    with contextlib.ExitStack() as cleanup:
        checkpoints = Checkpoints(
            run_dir, fingerprint=fingerprint(prepared.identity), keep=config.runtime.keep_checkpoints
        )
        cleanup.callback(checkpoints.close)
        iterator = _train_iterator(prepared)
        cleanup.callback(iterator.close)
        if checkpoints.latest_step is not None:
            state = checkpoints.restore(programs.abstract_state, iterator)
            say(f"resumed at step {int(state.step)} of {prepared.job.steps}")
        log = MetricsLog(run_dir, first_step=int(state.step))
        cleanup.callback(log.close)
        counter, start = CompileCounter(), time.monotonic()
        loop = _Loop(prepared, programs, iterator, checkpoints, log, counter, say)
        with stop.listening():
            step = loop.run(state, stop)
        return Outcome(
            step=step,
            stopped_by=stop.signal_name if step < prepared.job.steps else None,
            late_programs=counter.programs,
            training_seconds=time.monotonic() - start,
        )


def _train_iterator(prepared: Prepared) -> grain.DatasetIterator[list[Pack]]:
    topology, config = prepared.topology, prepared.config
    return iter(
        train_dataset(
            prepared.train,
            prepared.job,
            balance=config.balance,
            prior=prepared.prior,
            lay_out=prepared.lay_out,
            seed=config.seed,
            host=topology.process_index,
            num_hosts=topology.process_count,
            prefetch_steps=config.runtime.prefetch_steps,
        )
    )


class _Loop:
    """The state of the loop, beside the model's: what was dispatched and not yet read, and when."""

    def __init__(
        self,
        prepared: Prepared,
        programs: Programs,
        iterator: grain.DatasetIterator[list[Pack]],
        checkpoints: Checkpoints,
        log: MetricsLog,
        counter: CompileCounter,
        say: Say,
    ) -> None:
        self._prepared = prepared
        self._programs = programs
        self._iterator = iterator
        self._checkpoints = checkpoints
        self._log = log
        self._counter = counter
        self._say = say
        self._compiled = 0
        self._eval_packs = _eval_packs(prepared, len(programs.local_devices))
        self._recent_losses: list[float] = []
        self._clock = 0.0
        self._progress: Any = None

    def run(self, state: TrainState, stop: StopRequest) -> int:
        """Makes the remaining updates; returns how many there are in all by then."""
        runtime, last = self._prepared.config.runtime, self._prepared.job.steps
        step = int(state.step)
        # Shown only on a terminal; a log file gets the evaluations' lines.
        with tqdm(total=last, initial=step, unit="step", disable=None) as self._progress:
            if step == 0:
                self._evaluate(state, step)
            self._clock = time.monotonic()
            before: _Dispatched | None = None
            while step < last:
                begin = time.monotonic()
                packs = next(self._iterator)
                data_seconds = time.monotonic() - begin
                state, metrics = train_step(
                    self._programs, state, chunks_by_device(packs, len(self._programs.local_devices))
                )
                step += 1
                now = _Dispatched(step=step, metrics=metrics, packs=packs, data_seconds=data_seconds)
                if before is not None:
                    self._read(before)
                before = now
                stopping = stop.signal_name is not None
                evaluating = step % runtime.eval_every == 0 or step == last
                saving = step % runtime.checkpoint_every == 0 or step == last or stopping
                if evaluating or saving:
                    self._read(before)
                    before = None
                    if evaluating:
                        self._evaluate(state, step)
                    if saving:
                        self._checkpoints.save(state, self._iterator)
                    self._clock = time.monotonic()
                if stopping:
                    break
        return step

    def _read(self, done: _Dispatched) -> None:
        """Waits for an update and writes down what it did."""
        values = {name: float(value) for name, value in done.metrics.items()}
        if not math.isfinite(values["loss"]):
            raise DivergedError(
                f"the loss of step {done.step} is {values['loss']}: lower optimizer.learning_rate, raise "
                "optimizer.warmup_steps, or look at the records of this step. The last checkpoint is from before it"
            )
        now = time.monotonic()
        times = {"step_seconds": now - self._clock, "data_seconds": done.data_seconds}
        self._log.write("train", done.step, {**values, **_pack_figures(done.packs), **times})
        self._clock = now
        self._recent_losses.append(values["loss"])
        self._progress.set_postfix(loss=f"{values['loss']:.3f}", refresh=False)
        self._progress.update()
        self._check_compilations(done.step)

    def _evaluate(self, state: TrainState, step: int) -> None:
        begin = time.monotonic()
        metrics = evaluate(self._programs, state.params, self._eval_packs)
        values = {name: float(value) for name, value in metrics.items()}
        self._log.write("eval", step, values | {"eval_seconds": time.monotonic() - begin})
        line = f"step {step:>5}/{self._prepared.job.steps}: eval loss {values['loss']:.4f}"
        if self._recent_losses:
            mean = sum(self._recent_losses) / len(self._recent_losses)
            line += f", training loss {mean:.4f} (mean since the last evaluation)"
        self._recent_losses.clear()
        self._say(line)
        self._check_compilations(step)

    def _check_compilations(self, step: int) -> None:
        if self._counter.programs > self._compiled:
            logging.warning(
                "%d programs were compiled after warm-up, by step %d: every program should have been compiled before",
                self._counter.programs - self._compiled,
                step,
            )
            self._compiled = self._counter.programs


def _eval_packs(prepared: Prepared, num_devices: int) -> list[list[Chunk]]:
    """Returns each local device's share of the held-out records' chunks."""
    chunks = eval_chunks(
        prepared.evaluation,
        layout=prepared.lay_out.layout,
        pack_size=prepared.config.balance.pack_size,
        shard=prepared.topology.process_index,
        num_shards=prepared.topology.process_count,
    )
    return [[*chunks[device::num_devices]] for device in range(num_devices)]


def chunks_by_device(packs: Sequence[Pack], num_devices: int) -> list[list[Chunk]]:
    """Deals a step's packs out to the local devices."""
    return [[chunk for pack in own for chunk in pack.chunks] for own in deal(packs, num_devices)]


def _pack_figures(packs: Sequence[Pack]) -> Mapping[str, float]:
    """Returns what a step's local packs hold and cost; costs in the model's FLOPs."""
    executed_tokens = sum(pack.executed_tokens for pack in packs)
    return {
        "records": sum(pack.records for pack in packs),
        "pack_cost": sum(pack.cost for pack in packs) / len(packs),
        "pack_cost_max": max(pack.cost for pack in packs),
        "executed_cost_max": max(pack.executed_cost for pack in packs),
        "chunks": sum(len(pack.chunks) for pack in packs),
        "padding": 1 - sum(pack.tokens for pack in packs) / executed_tokens,
    }
