"""The training loop: its order, its records, its checkpoints, and what stops it."""

from __future__ import annotations

import dataclasses
import logging
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train.loop
import train.run_directory
import train.step
from bcl_grain.layouts import RowPackedLayout
from tests.tiny_run import STEPS, loss_tokens, quiet, tiny_run
from train.checkpoints import CheckpointError, Checkpoints, load_params
from train.config import BalanceConfig, RuntimeConfig
from train.data import train_dataset
from train.loop import DivergedError, LateCompilationError, Outcome, run_training
from train.metrics_log import METRICS_FILE, Event, MetricsLog, read_events
from train.prepare import Prepared
from train.programs import Programs, compile_programs
from train.stopping import StopRequest
from train.timeline import draw_timeline
from train.warm_up import warm_up

TIMES = {"step_seconds", "data_seconds", "eval_seconds"}


def figures(run_dir: Path) -> list[Event]:
    """A run's events without what a clock says, or what the pipeline counts since this process began."""
    return [
        {name: value for name, value in event.items() if name not in TIMES}
        for event in read_events(run_dir)
        if event["kind"] not in ("time", "balance")
    ]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return tiny_run(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def programs(prepared: Prepared) -> Programs:
    return warm_up(prepared, quiet)


@pytest.fixture(scope="module")
def undisturbed(
    prepared: Prepared, programs: Programs, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Outcome]:
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    return run_dir, run_training(prepared, programs, run_dir, say=quiet)


def test_a_run_makes_every_step_and_evaluates_at_start_intervals_and_end(
    undisturbed: tuple[Path, Outcome], prepared: Prepared, programs: Programs
) -> None:
    run_dir, outcome = undisturbed
    assert (outcome.step, outcome.stopped_by, outcome.late_programs) == (STEPS, None, 0)
    events = read_events(run_dir)
    train = [event for event in events if event["kind"] == "train"]
    evals = [event for event in events if event["kind"] == "eval"]
    assert [event["step"] for event in train] == list(range(1, STEPS + 1))
    assert [event["step"] for event in evals] == [0, 5, 10, 15, 18]
    assert {event["records"] for event in train} == {6}
    assert {event["tokens"] for event in evals} == {loss_tokens(prepared)}
    assert evals[-1]["loss"] < evals[0]["loss"]


def test_the_eval_loss_does_not_depend_on_how_records_are_laid_out(
    prepared: Prepared, undisturbed: tuple[Path, Outcome], tmp_path: Path
) -> None:
    layout = RowPackedLayout(length=64, rows_per_chunk=3)
    other = dataclasses.replace(
        prepared,
        lay_out=dataclasses.replace(prepared.lay_out, layout=layout),
        job=dataclasses.replace(prepared.job, steps=1),
    )
    run_training(other, warm_up(other, quiet), tmp_path, say=quiet)
    first, expected = read_events(tmp_path)[0], read_events(undisturbed[0])[0]
    assert (first["kind"], first["tokens"]) == ("eval", expected["tokens"])
    assert first["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize("steps_before", [1, 4, 7, 17])
def test_a_stopped_run_goes_on_bit_for_bit(
    steps_before: int,
    prepared: Prepared,
    programs: Programs,
    undisturbed: tuple[Path, Outcome],
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    stop = StopRequest()
    original = train.step.train_step
    calls: list[None] = []

    def counted(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == steps_before:
            stop.signal_name = "SIGTERM"
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train.loop, "train_step", counted)
        outcome = run_training(prepared, programs, tmp_path, say=quiet, stop=stop)
    assert (outcome.step, outcome.stopped_by) == (steps_before, "SIGTERM")
    outcome = run_training(prepared, programs, tmp_path, say=quiet)
    assert (outcome.step, outcome.stopped_by, outcome.late_programs) == (STEPS, None, 0)
    assert figures(tmp_path) == figures(undisturbed[0])


def test_a_resumed_run_may_have_another_prefetch_depth_and_intervals(
    prepared: Prepared, programs: Programs, undisturbed: tuple[Path, Outcome], tmp_path: Path
) -> None:
    short = dataclasses.replace(prepared, job=dataclasses.replace(prepared.job, steps=8))
    run_training(short, programs, tmp_path / "short", say=quiet)
    with pytest.raises(ValueError, match="num_packs=8 became num_packs=18"):  # the job's size is no such setting
        run_training(prepared, programs, tmp_path / "short", say=quiet)
    stop = StopRequest()
    stop.signal_name = "SIGINT"
    assert run_training(prepared, programs, tmp_path / "run", say=quiet, stop=stop).step == 1
    runtime = RuntimeConfig(prefetch_steps=0, eval_every=6, checkpoint_every=100)
    config = dataclasses.replace(prepared.config, runtime=runtime)
    assert config.identity() == prepared.config.identity()
    run_training(dataclasses.replace(prepared, config=config), programs, tmp_path / "run", say=quiet)
    train = [event for event in figures(tmp_path / "run") if event["kind"] == "train"]
    assert train == [event for event in figures(undisturbed[0]) if event["kind"] == "train"]


def test_signals_are_remembered_once_and_then_have_their_usual_effect() -> None:
    stop = StopRequest()
    inherited = signal.getsignal(signal.SIGINT)
    # A shell starts jobs in the background with it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stop.listening():
            signal.raise_signal(signal.SIGINT)
            assert stop.signal_name == "SIGINT"
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)


def test_the_log_tells_how_packs_are_balanced(undisturbed: tuple[Path, Outcome], prepared: Prepared) -> None:
    events = [event for event in read_events(undisturbed[0]) if event["kind"] == "balance"]
    train = [event for event in read_events(undisturbed[0]) if event["kind"] == "train"]
    assert [event["step"] for event in events] == [
        e["step"] for e in read_events(undisturbed[0]) if e["kind"] == "eval"
    ][1:]
    assert events[-1]["records"] == prepared.job.steps * prepared.job.global_batch
    assert events[-1]["records_dropped"] == events[-1]["packs_over_capacity"] == 0
    costs = np.array([event["pack_cost"] for event in train])
    assert events[-1]["pack_cost_cv"] == pytest.approx(costs.std() / costs.mean(), rel=1e-4)


def test_metrics_of_a_step_are_read_after_the_next_is_dispatched(
    prepared: Prepared, programs: Programs, tmp_path: Path, monkeypatch: Any
) -> None:
    order: list[str] = []
    dispatch, write = train.step.train_step, MetricsLog.write

    def noting_dispatch(*args: Any) -> Any:
        order.append("dispatch")
        return dispatch(*args)

    def noting_write(self: MetricsLog, kind: str, step: int, *values: Any) -> None:
        order.append(f"{kind} {step}")
        write(self, kind, step, *values)

    monkeypatch.setattr(train.loop, "train_step", noting_dispatch)
    monkeypatch.setattr(MetricsLog, "write", noting_write)
    runtime = dataclasses.replace(prepared.config.runtime, eval_every=3, checkpoint_every=100)
    config = dataclasses.replace(prepared.config, runtime=runtime)
    run = dataclasses.replace(prepared, config=config, job=dataclasses.replace(prepared.job, steps=4))
    run_training(run, programs, tmp_path, say=quiet)
    assert order == [
        *(
            "eval 0",
            "dispatch",
            "dispatch",
            "train 1",
            "dispatch",
            "train 2",
            "train 3",
            "time 1",
            "balance 3",
            "eval 3",
        ),
        *("dispatch", "train 4", "time 3", "balance 4", "eval 4"),
    ]


@pytest.mark.parametrize("checkpoint_every", [1, 100])
def test_a_loss_that_is_not_a_number_stops_the_run_and_names_the_step(
    checkpoint_every: int, prepared: Prepared, programs: Programs, tmp_path: Path
) -> None:
    poisoned = dict(prepared.train[0])
    poisoned["loss_mask"] = np.where(poisoned["loss_mask"] > 0, np.nan, 0).astype(np.float32)
    runtime = dataclasses.replace(prepared.config.runtime, checkpoint_every=checkpoint_every)
    config = dataclasses.replace(prepared.config, runtime=runtime)
    records: Any = [poisoned, *prepared.train[1:]]
    run = dataclasses.replace(prepared, config=config, train=records)
    packs = train_dataset(
        run.train,
        run.job,
        balance=run.config.balance,
        prior=run.prior,
        lay_out=run.lay_out,
        seed=run.config.seed,
    )
    bad = 1 + next(
        i for i, (pack,) in enumerate(packs) if any(np.isnan(chunk["loss_mask"]).any() for chunk in pack.chunks)
    )
    assert bad > 1
    with pytest.raises(DivergedError, match=f"the loss of step {bad} is nan: lower optimizer.learning_rate"):
        run_training(run, programs, tmp_path, say=quiet)
    checkpoints = Checkpoints(tmp_path, fingerprint="", keep=1)
    assert checkpoints.latest_step == (bad - 1 if checkpoint_every == 1 else None)
    checkpoints.close()
    assert [event["step"] for event in read_events(tmp_path) if event["kind"] == "train"] == list(range(1, bad))


def test_a_compilation_after_warm_up_is_counted_and_warned_of(
    prepared: Prepared, programs: Programs, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    original = train.step.train_step
    calls: list[None] = []

    def compiling(*args: Any) -> Any:
        jax.jit(lambda x: x * 1.25 + len(calls))(jnp.ones(3))
        calls.append(None)
        return original(*args)

    monkeypatch.setattr(train.loop, "train_step", compiling)
    runtime = dataclasses.replace(prepared.config.runtime, on_late_compilation="warn")
    config = dataclasses.replace(prepared.config, runtime=runtime)
    run = dataclasses.replace(prepared, config=config, job=dataclasses.replace(prepared.job, steps=2))
    with caplog.at_level(logging.WARNING, logger="absl"):
        outcome = run_training(run, programs, tmp_path / "warned", say=quiet)
    assert outcome.late_programs >= 2
    train_events = [event for event in read_events(tmp_path / "warned") if event["kind"] == "train"]
    assert train_events[-1]["compilations"] >= 1
    with pytest.raises(LateCompilationError, match=r"\d+ programs were compiled after warm-up, by step 1"):
        run_training(dataclasses.replace(run, config=prepared.config), programs, tmp_path / "failed", say=quiet)
    assert "programs were compiled after warm-up, by step 1" in caplog.text


def test_a_new_run_starts_from_another_ones_parameters(
    prepared: Prepared, programs: Programs, undisturbed: tuple[Path, Outcome], tmp_path: Path
) -> None:
    run = dataclasses.replace(prepared, job=dataclasses.replace(prepared.job, steps=1))
    run_training(run, programs, tmp_path / "new", init=undisturbed[0], say=quiet)
    assert read_events(tmp_path / "new")[0]["loss"] == read_events(undisturbed[0])[-1]["loss"]
    with pytest.raises(CheckpointError, match=r"there is no run with checkpoints in .*nowhere"):
        run_training(run, programs, tmp_path / "other", init=tmp_path / "nowhere", say=quiet)
    params = programs.abstract_state.params
    norm = params["norm"]["scale"]
    wider = {**params, "norm": {"scale": norm.update(shape=(16,))}}
    with pytest.raises(CheckpointError, match=r"has other dimensions: norm.scale has shape \[8\], wanted \[16\]$"):
        load_params(undisturbed[0], wider)
    with pytest.raises(CheckpointError, match=r"has other dimensions: head has shape absent, wanted \[8\]$"):
        load_params(undisturbed[0], {**params, "head": norm})
    assert not (tmp_path / "other").exists()  # so that the next try finds it new


def test_a_checkpoint_that_was_copied_from_another_run_is_refused(
    prepared: Prepared, programs: Programs, undisturbed: tuple[Path, Outcome]
) -> None:
    other = dataclasses.replace(prepared, identity={**prepared.identity, "job": 2})
    with pytest.raises(
        CheckpointError, match=r"checkpoint 18 belongs to another run: its fingerprint is .*, this run's"
    ):
        run_training(other, programs, undisturbed[0], say=quiet)


def test_the_metrics_file_survives_a_kill_and_a_resume(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in range(1, 5):
        log.write("train", step, {"loss": 1 / step})
    log.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"kind": "train", "ste')
    assert [event["step"] for event in read_events(tmp_path)] == [1, 2, 3, 4]
    log = MetricsLog(tmp_path, first_step=2)
    log.write("train", 3, {"loss": float("nan")})
    log.close()
    assert [(event["step"], event["loss"]) for event in read_events(tmp_path)] == [(1, 1.0), (2, 0.5), (3, None)]
    (tmp_path / METRICS_FILE).write_text('{"kind": "train", "step": 1}\n{}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*metrics.jsonl is not a metrics event: '\{\}"):
        read_events(tmp_path)


def test_a_step_that_is_one_program_learns_what_the_decoupled_one_does(tmp_path: Path) -> None:
    balance = BalanceConfig(pack_size=6, lookahead=3, lanes=1, packs_per_step=2)
    prepared = tiny_run(tmp_path, step="spmd", balance=balance)
    rows, length = prepared.lay_out.layout.shapes[0]
    assert (prepared.one_shape, prepared.spmd_packs, length) == ((rows, 64), 2, 64)
    assert prepared.eval_layout.shapes == ((rows, 64),)
    run_training(prepared, warm_up(prepared, quiet), tmp_path / "spmd", say=quiet)
    decoupled = compile_programs(prepared.model, prepared.optimizer, prepared.lay_out.layout.shapes)
    run_training(prepared, decoupled, tmp_path / "decoupled", say=quiet)
    one, two = (
        [event["loss"] for event in read_events(tmp_path / name) if "loss" in event] for name in ("spmd", "decoupled")
    )
    assert len(one) == STEPS + 5
    np.testing.assert_allclose(one, two, rtol=1e-5)
    whole = [event for event in read_events(tmp_path / "spmd") if event["kind"] == "time"]
    assert {event["wait_share"] for event in whole} == {0}  # not to be told apart from the step


def test_a_timeline_is_drawn_of_the_steps_that_were_timed(undisturbed: tuple[Path, Outcome], tmp_path: Path) -> None:
    events = read_events(undisturbed[0])
    timed = [event for event in events if event["kind"] == "time"]
    assert len(timed) > STEPS / 2
    for event in timed:
        assert event["wait_share"] == 0  # one rank waits for nobody
        assert 0 <= event["update_seconds"] <= event["step_seconds"]
    assert draw_timeline(tmp_path / "t.png", events)
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert not draw_timeline(tmp_path / "none.png", [event for event in events if event["kind"] != "time"])
