"""The training loop: one update after the other, everything about them written down, nothing lost when it is stopped.

The order inside a step must not change:

1. take the step's packs from the pipeline, those of the lanes that this process serves;
2. dispatch the update;
3. only now read the metrics of the step before, so that the devices never wait for the host;
4. at a boundary: read this step's metrics too (a diverged state is never saved), evaluate, save. The pipeline has then
   given exactly the packs of the updates made, so that both are saved as of the same moment.

All processes go through it in step. Process 0 alone writes the run's files, checkpoints aside, and speaks to the user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
from absl import logging
from tqdm import tqdm

import bcl_grain as bcl
from train.checkpoints import Checkpoints, load_params
from train.clock import StepClock, Watch
from train.compiling import CompileCounter
from train.config import fingerprint
from train.data import Pack, balance_figures, eval_chunks, train_dataset
from train.exporting import export
from train.global_programs import Metrics
from train.metrics_log import MetricsLog
from train.model import Params
from train.notes import decode, note_of, pack_figures, time_figures
from train.prepare import Prepared
from train.processes import agree, wait_for_all
from train.programs import Programs
from train.run_directory import began
from train.samples import cut_samples
from train.starting import claim, start
from train.state import TrainState
from train.step import Chunk, evaluate, train_step
from train.stopping import StopRequest
from train.token_files import Say
from train.topology import deal, packs_per_step


class DivergedError(Exception):
    """The loss is no longer a number."""


class LateCompilationError(Exception):
    """A program was compiled after warm-up."""


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
    data_seconds: float
    watch: Watch


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
        StartError: If the model or the adapters to start from can't be used, or not all processes see `run_dir`.
    """
    config = prepared.config
    state, frozen, sampler = start(prepared, programs)
    if init is not None:
        state = dataclasses.replace(state, params=load_params(init, programs.abstract_state.params))
        say(f"parameters from {init}")
    going_on = began(run_dir)
    claim(prepared, run_dir)
    topology, packs = prepared.topology, packs_per_step(config.balance)
    if packs % topology.ranks:
        idle = max(0, topology.ranks - packs)
        having = f"{idle} of them have none" if idle else "some have one more than others"
        say(f"{packs} packs a step for {topology.ranks} devices: {having}, and the rest wait for them")
    stop = StopRequest() if stop is None else stop
    with contextlib.ExitStack() as cleanup:
        checkpoints = Checkpoints(
            run_dir, fingerprint=fingerprint(prepared.identity), keep=config.runtime.keep_checkpoints
        )
        cleanup.callback(checkpoints.close)
        telemetry: dict[int, bcl.Telemetry] = {}
        iterator = _train_iterator(prepared, telemetry)
        cleanup.callback(iterator.close)
        agree({"latest checkpoint": checkpoints.latest_step})
        if checkpoints.latest_step is not None:
            state = checkpoints.restore(programs.abstract_state, iterator)
            say(f"resumed at step {int(state.step)} of {prepared.job.steps}")
        elif going_on:
            say("the run ended before its first checkpoint: it starts anew, at step 0")
        log = None
        if topology.is_main:
            cut_samples(run_dir, int(state.step))
            log = MetricsLog(run_dir, first_step=int(state.step))
            cleanup.callback(log.close)
        clock = cleanup.enter_context(StepClock(len(programs.local_devices)))
        counter, begin = CompileCounter(), time.monotonic()
        write_samples = None if sampler is None else functools.partial(sampler.write, run_dir)
        loop = _Loop(
            prepared, programs, iterator, checkpoints, log, clock, counter, say, telemetry, frozen, write_samples
        )
        with stop.listening():
            state, step = loop.run(state, stop)
        if step == prepared.job.steps and prepared.pretrained is not None and config.runtime.export:
            if topology.is_main:
                say(f"exported: {export(prepared, state.params, run_dir)}")
            wait_for_all("the model is exported")
        return Outcome(
            step=step,
            stopped_by=(stop.signal_name or "another process") if step < prepared.job.steps else None,
            late_programs=counter.programs,
            training_seconds=time.monotonic() - begin,
        )


def _train_iterator(prepared: Prepared, telemetry: dict[int, bcl.Telemetry]) -> grain.DatasetIterator[list[Pack]]:
    topology, config = prepared.topology, prepared.config
    return iter(
        train_dataset(
            prepared.train,
            prepared.job,
            balance=config.balance,
            prior=prepared.prior,
            lay_out=prepared.lay_out,
            seed=config.seed,
            capacity=prepared.one_shape,
            host=topology.process_index,
            num_hosts=topology.process_count,
            prefetch_steps=config.runtime.prefetch_steps,
            telemetry=telemetry,
            on_changed_balance=config.runtime.on_changed_balance,
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
        log: MetricsLog | None,
        clock: StepClock,
        counter: CompileCounter,
        say: Say,
        telemetry: Mapping[int, bcl.Telemetry],
        frozen: Params | None,
        write_samples: Callable[[int, Params, Params | None], None] | None,
    ) -> None:
        self._frozen = frozen
        self._write_samples = write_samples
        self._prepared = prepared
        self._programs = programs
        self._iterator = iterator
        self._checkpoints = checkpoints
        self._log = log
        self._clock = clock
        self._counter = counter
        self._say = say
        self._telemetry = telemetry
        self._compiled = 0
        self._eval_packs = _eval_packs(prepared, len(programs.local_devices))
        self._recent_losses: list[float] = []
        self._last_read = 0.0
        self._times: list[dict[str, Any]] = [{}] * len(programs.local_devices)  # what the next notes tell of time
        self._asked_to_stop = False  # by any process's note
        self._progress: Any = None

    def run(self, state: TrainState, stop: StopRequest) -> tuple[TrainState, int]:
        """Makes the remaining updates; returns the state, and how many there are in all by then."""
        runtime, last = self._prepared.config.runtime, self._prepared.job.steps
        step = int(state.step)
        # Shown only on a terminal; a log file gets the evaluations' lines.
        hidden = None if self._prepared.topology.is_main else True
        with tqdm(total=last, initial=step, unit="step", disable=hidden) as self._progress:
            if step == 0:
                self._evaluate(state, step)
            self._restart_clocks()
            before: _Dispatched | None = None
            while step < last:
                step += 1
                state, now = self._dispatch(state, step, stop)
                if before is not None:
                    self._read(before)
                before = now
                stopping = self._stopping(stop)
                evaluating = step % runtime.eval_every == 0 or step == last
                saving = step % runtime.checkpoint_every == 0 or step == last or stopping
                if evaluating or saving:
                    self._read(before)
                    before = None
                    if evaluating:
                        self._evaluate(state, step)
                    if saving:
                        self._checkpoints.save(state, self._iterator)
                    self._restart_clocks()
                if stopping:
                    break
        return state, step

    def _dispatch(self, state: TrainState, step: int, stop: StopRequest) -> tuple[TrainState, _Dispatched]:
        begin = time.monotonic()
        packs = deal(next(self._iterator), len(self._programs.local_devices))
        ready = time.monotonic()
        asked = stop.signal_name is not None
        notes = [note_of(own, stop=asked, **times) for own, times in zip(packs, self._times, strict=True)]
        self._times = [{}] * len(notes)
        chunks = [[chunk for pack in own for chunk in pack.chunks] for own in packs]
        state, metrics = train_step(self._programs, state, chunks, self._frozen, notes, self._clock.dispatched)
        watch = self._clock.watch(ready, metrics["loss"])
        return state, _Dispatched(step=step, metrics=metrics, data_seconds=ready - begin, watch=watch)

    def _stopping(self, stop: StopRequest) -> bool:
        """Whether this is the last step for now; several processes must decide alike, by what all have read."""
        if self._prepared.topology.process_count > 1:
            return self._asked_to_stop
        return stop.signal_name is not None

    def _restart_clocks(self) -> None:
        self._last_read = time.monotonic()
        self._clock.restart()

    def _read(self, done: _Dispatched) -> None:
        """Waits for an update and writes down what it did."""
        values = {name: float(value) for name, value in done.metrics.items() if name != "notes"}
        notes = decode(done.metrics["notes"])
        if not math.isfinite(values["loss"]):
            raise DivergedError(
                f"the loss of step {done.step} is {values['loss']}: lower optimizer.learning_rate, raise "
                "optimizer.warmup_steps, or look at the records of this step. The last checkpoint is from before it"
            )
        now = time.monotonic()
        seconds = {"step_seconds": now - self._last_read, "data_seconds": done.data_seconds}
        self._last_read = now
        self._check_compilations(done.step)
        self._write("train", done.step, {**values, **pack_figures(notes), "compilations": self._compiled, **seconds})
        if notes["timed_step"][0]:
            figures, by_rank = time_figures(notes)
            self._write("time", int(notes["timed_step"][0]), figures, by_rank)
        self._asked_to_stop = self._asked_to_stop or bool(notes["stop"].any())
        self._times = _time_notes(done)
        self._recent_losses.append(values["loss"])
        self._progress.set_postfix(loss=f"{values['loss']:.3f}", refresh=False)
        self._progress.update()

    def _write(
        self, kind: str, step: int, values: Mapping[str, float], by_rank: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        if self._log is not None:
            self._log.write(kind, step, values, by_rank)

    def _evaluate(self, state: TrainState, step: int) -> None:
        begin = time.monotonic()
        metrics = evaluate(self._programs, state.params, self._eval_packs, self._frozen)
        values = {name: float(value) for name, value in metrics.items()}
        if step:
            self._write("balance", step, balance_figures(self._telemetry.values()))
        self._write("eval", step, values | {"eval_seconds": time.monotonic() - begin})
        line = f"step {step:>5}/{self._prepared.job.steps}: eval loss {values['loss']:.4f}"
        if self._recent_losses:
            mean = sum(self._recent_losses) / len(self._recent_losses)
            line += f", training loss {mean:.4f} (mean since the last evaluation)"
        self._recent_losses.clear()
        self._say(line)
        if self._write_samples is not None:
            self._write_samples(step, state.params, self._frozen)
        self._check_compilations(step)

    def _check_compilations(self, step: int) -> None:
        if self._counter.programs > self._compiled:
            late = self._counter.programs - self._compiled
            message = f"{late} programs were compiled after warm-up, by step {step}: all should have been before it"
            if self._prepared.config.runtime.on_late_compilation == "error":
                raise LateCompilationError(message)
            logging.warning("%s", message)
            self._compiled = self._counter.programs


def _eval_packs(prepared: Prepared, num_devices: int) -> list[list[Chunk]]:
    """Returns each local device's share of the held-out records' chunks."""
    chunks = eval_chunks(
        prepared.evaluation,
        layout=prepared.eval_layout,
        pack_size=prepared.config.balance.pack_size,
        shard=prepared.topology.process_index,
        num_shards=prepared.topology.process_count,
    )
    return [[*chunks[device::num_devices]] for device in range(num_devices)]


def _time_notes(done: _Dispatched) -> list[dict[str, Any]]:
    """Returns what each local device tells of the time that a step took."""
    times = done.watch.times()
    return [
        {
            "timed_step": done.step,
            "data_seconds": done.data_seconds,
            "idle_seconds": idle,
            "local_seconds": local,
            "step_seconds": times.step,
        }
        for idle, local in zip(times.idle, times.local, strict=True)
    ]
