"""The command line: files, exit codes, bad input, and a real kill."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from absl.testing import flagsaver

import train.loop
import train.step
from tests.full_disk import largest_file
from tests.tiny_run import STEPS, write_config, write_corpus
from train import main as command
from train.metrics_log import METRICS_FILE, read_events
from train.prepare import Prepared
from train.programs import Programs
from train.token_files import Say
from train.warm_up import warm_up

pytestmark = pytest.mark.usefixtures("parsed_flags")

ROOT = Path(__file__).parents[1]
KILLED_STEPS = 60
_COMPILED: list[Programs] = []


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs in this process have one model and one layout: the first one's programs serve the others too."""

    def once(prepared: Prepared, say: Say) -> Programs:
        if not _COMPILED:
            _COMPILED.append(warm_up(prepared, say))
        return _COMPILED[0]

    monkeypatch.setattr(command, "warm_up", once)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path / "tiny.py", write_corpus(tmp_path / "pairs.jsonl"))


def run(config: Path, *, assignments: tuple[str, ...] = (), **given: Any) -> int:
    """Runs the command in this process, without the compile cache, which is a setting of the whole process."""
    with flagsaver.flagsaver(config=str(config), set=list(assignments), compile_cache="", **given):
        return command.main(["train.main"])


def start(config: Path, *arguments: str, cache: Path) -> subprocess.Popen[str]:
    """Runs the command in a process of its own, on two devices."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-m", "train.main", f"--config={config}", f"--compile_cache={cache}", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """Returns once the run has told of `step`."""
    path = run_dir / METRICS_FILE
    while process.poll() is None and f'"kind": "train", "step": {step},' not in (
        path.read_text() if path.exists() else ""
    ):
        time.sleep(0.002)
    assert process.poll() is None, process.communicate()[0]


def losses(run_dir: Path) -> list[tuple[str, int, float]]:
    return [(event["kind"], event["step"], event["loss"]) for event in read_events(run_dir) if "loss" in event]


def test_a_killed_run_resumes_bit_for_bit(config: Path, tmp_path: Path) -> None:
    options = (f"--steps={KILLED_STEPS}", "--set=runtime.checkpoint_every=7", "--set=runtime.eval_every=20")
    undisturbed, disturbed, cache = tmp_path / "undisturbed", tmp_path / "disturbed", tmp_path / "cache"
    process = start(config, *options, f"--run_dir={undisturbed}", cache=cache)
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    assert "compilations after warm-up: 0" in output

    step = random.SystemRandom().randint(1, KILLED_STEPS * 2 // 3)
    process = start(config, *options, f"--run_dir={disturbed}", cache=cache)
    wait_for_step(process, disturbed, step)
    process.kill()
    process.communicate(timeout=400)
    assert process.returncode == -signal.SIGKILL
    assert len(losses(disturbed)) < len(losses(undisturbed))

    process = start(config, *options, f"--run_dir={disturbed}", "--resume", cache=cache)
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    assert losses(disturbed) == losses(undisturbed), f"killed at step {step}"


def test_a_run_prints_its_result_and_leaves_its_files(config: Path, tmp_path: Path, capsys: Any) -> None:
    run_dir = tmp_path / "run"
    assert run(config, run_dir=str(run_dir)) == 0
    output = capsys.readouterr().out
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["compilations_after_warmup"] == 0
    assert f"bigram model: eval loss {summary['bigram_eval_loss']:.4f}" in output
    verdict = "beats" if summary["last_eval_loss"] < summary["bigram_eval_loss"] else "does NOT beat"
    assert f"the model {verdict} it" in output
    arms = summary["comparison"]["policies"]
    assert list(arms) == ["arrival", "windowed", "streaming"]
    assert arms["windowed"]["cost_cv"] < arms["arrival"]["cost_cv"]
    for arm in arms.values():
        assert arm["total_waste"] > arm["sync_waste"]
        assert f"{arm['cost_cv']:>13.4f}{arm['sync_waste']:>13.4f}{arm['total_waste']:>13.4f}" in output
    assert (run_dir / "run.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))
    assert (run_dir / "checkpoints" / str(STEPS) / "data" / "lane_0-of-1.json").exists()

    # A second run does not touch it, and a resumed one that is over already changes nothing.
    before = (run_dir / METRICS_FILE).read_text()
    assert run(config, run_dir=str(run_dir)) == 2
    assert "is not empty: pass --resume" in capsys.readouterr().err
    assert run(config, run_dir=str(run_dir), resume=True) == 0
    assert (run_dir / METRICS_FILE).read_text() == before
    assert run(config, run_dir=str(run_dir), resume=True, steps=STEPS + 1) == 2
    assert f"belongs to another run: config.steps was {STEPS}, now {STEPS + 1}; job.steps" in capsys.readouterr().err


def test_a_terminated_run_says_how_to_go_on(config: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    original, calls = train.step.train_step, itertools.count(1)

    def terminated(*given: Any) -> Any:
        if next(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return original(*given)

    monkeypatch.setattr(train.loop, "train_step", terminated)
    assert run(config, run_dir=str(tmp_path / "run")) == 75
    message = f"SIGTERM: stopped after step 3 of {STEPS}, checkpoint saved. Go on with the same command and --run_dir="
    assert message + f"{tmp_path / 'run'} --resume" in capsys.readouterr().out
    assert run(config, run_dir=str(tmp_path / "run"), resume=True) == 0
    assert f"resumed at step 3 of {STEPS}" in capsys.readouterr().out


class Killed(BaseException):
    """As if the process had been killed."""


def kill_at(step: int, monkeypatch: Any, config: Path, **given: Any) -> None:
    """Starts a run that dies when it would dispatch a step."""
    original, calls = train.step.train_step, itertools.count(1)

    def dying(*given: Any) -> Any:
        if next(calls) == step:
            raise Killed
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(train.loop, "train_step", dying)
        with pytest.raises(Killed):
            run(config, **given)


def test_a_run_that_died_before_its_first_checkpoint_starts_anew(
    config: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    assert run(config, run_dir=str(tmp_path / "undisturbed")) == 0
    kill_at(3, monkeypatch, config, run_dir=str(tmp_path / "run"))
    assert run(config, run_dir=str(tmp_path / "run")) == 2
    assert "is not empty: pass --resume to go on with the run in it" in capsys.readouterr().err
    assert run(config, run_dir=str(tmp_path / "run"), resume=True) == 0
    assert "the run ended before its first checkpoint: it starts anew, at step 0" in capsys.readouterr().out
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")


def test_it_starts_anew_from_the_parameters_that_it_had(
    config: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    assert run(config, run_dir=str(first)) == 0
    for run_dir in (second, third):
        kill_at(2, monkeypatch, config, run_dir=str(run_dir), init=str(first))
    assert run(config, run_dir=str(second), resume=True) == 0
    assert f"parameters from {first}" in capsys.readouterr().out
    assert losses(second)[0][2] == losses(first)[-1][2]
    # Now it has a checkpoint of its own, and whatever becomes of the other run does not matter to it any more.
    shutil.rmtree(first / "checkpoints" / f"{STEPS}")
    assert run(config, run_dir=str(second), resume=True) == 0
    assert run(config, run_dir=str(third), resume=True) == 2
    error = capsys.readouterr().err
    assert f"began with step {STEPS} of '{first}' and has no checkpoint of its own; that run is at step 16 now" in error
    assert f"remove '{third}' and start anew with --init={first}" in error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's
@pytest.mark.parametrize(("num_bytes", "what"), [(100, "go on"), (7500, "write the checkpoint of step 8")])
def test_a_full_disk_ends_a_run_that_goes_on_when_there_is_room(
    num_bytes: int, what: str, config: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Whatever can't be written first: the metrics, or the next checkpoint."""
    original, calls = train.step.train_step, itertools.count(1)
    with contextlib.ExitStack() as full:

        def filling(*given: Any) -> Any:
            if next(calls) == 6:
                full.enter_context(largest_file(num_bytes))
            return original(*given)

        monkeypatch.setattr(train.loop, "train_step", filling)
        assert run(config, run_dir=str(tmp_path / "run")) == 1
    error = capsys.readouterr().err
    assert re.search(rf"^error: can't {what} .*go on with --resume$", error, re.MULTILINE)
    assert run(config, run_dir=str(tmp_path / "run"), resume=True) == 0
    assert f"resumed at step 4 of {STEPS}" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_bad_input_and_names_the_last_good_one(
    config: Path, tmp_path: Path, capsys: Any
) -> None:
    run_dir = tmp_path / "run"
    assert run(config, run_dir=str(run_dir)) == 0
    (damaged,) = (run_dir / "checkpoints" / f"{STEPS}" / "meta").glob("metadata")
    damaged.write_text(damaged.read_text().replace("f", "e", 1))
    assert run(config, run_dir=str(run_dir), resume=True) == 2
    error = capsys.readouterr().err
    assert f"error: checkpoint {STEPS} is damaged: meta/metadata has" in error
    assert "The last good one is that of step 16: to go on from there, remove" in error
    assert "Traceback" not in error


def test_a_resumed_run_takes_another_lookahead_and_policy_on_request(
    config: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    original, calls = train.step.train_step, itertools.count(1)

    def terminated(*given: Any) -> Any:
        if next(calls) == 5:
            signal.raise_signal(signal.SIGTERM)
        return original(*given)

    run_dir = tmp_path / "run"
    monkeypatch.setattr(train.loop, "train_step", terminated)
    assert run(config, run_dir=str(run_dir)) == 75
    changes = ("balance.lookahead=2", "balance.policy=windowed")
    assert run(config, assignments=changes, run_dir=str(run_dir), resume=True) == 2
    error = capsys.readouterr().err
    assert "config.balance.lookahead was 3, now 2; config.balance.policy was" in error
    assert "or change it from here on: --set=runtime.on_changed_balance=finish_pool" in error
    on_request = (*changes, "runtime.on_changed_balance=finish_pool")
    assert run(config, assignments=(*on_request, "seed=7"), run_dir=str(run_dir), resume=True) == 2
    assert "config.seed was 0, now 7. Resume" in capsys.readouterr().err
    assert run(config, assignments=on_request, run_dir=str(run_dir), resume=True) == 0
    assert f"resumed at step 5 of {STEPS}" in capsys.readouterr().out
    steps = [event for event in read_events(run_dir) if event["kind"] == "train"]
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert len({event["records"] for event in steps}) == 1
    assert run(config, assignments=changes, run_dir=str(run_dir), resume=True) == 0  # they are the run's own now
    assert run(config, run_dir=str(run_dir), resume=True) == 2


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "balance.polcy=arrival",
            "'balance.polcy=arrival': BalanceConfig has no field 'polcy', only pack_size, lookahead",
        ),
        ("stepz=3", "TrainConfig has no field 'stepz', only corpus, balance"),
        ("balance.policy=fastest", "'balance.policy=fastest': expected"),
        ("steps=many", "'steps=many': expected int | None, got 'many'"),
        ("steps=1.5", "'steps=1.5': expected int | None, got '1.5'"),
        ("corpus.chat_paths=[a.jsonl]", 'got \'[a.jsonl]\': a list is written as ["A", "B"], the whole flag in quotes'),
        ("balance", "expected name=value, got 'balance'"),
        ("balance=3", "'balance' is a group of fields: set one of them, balance.<field>=value"),
        ("steps.x=3", "'steps' has no fields"),
        ("balance.pack_size=0", "pack_size must be an integer of at least 1, got 0"),
        ("balance.lookahead=0", "lookahead must be an integer of at least 1, got 0"),
        ("balance.pack_size=1000", "one step takes 1000 (1 ranks of pack_size 1000): lower balance.pack_size"),
        ("corpus.tokenizer=/nowhere/tokenizer.json", "can't read tokenizer '/nowhere/tokenizer.json'"),
        ("corpus.path=/nowhere/pairs.jsonl", "can't read '/nowhere/pairs.jsonl'"),
        ("corpus.max_tokens=65", "corpus.max_tokens 65 is longer than the layout's longest row 64"),
        ("corpus.max_tokens=30", "more than max_tokens 30: raise corpus.max_tokens"),
        ("corpus.on_oversize=split", "expected"),
        ("corpus.eval_share=0", "eval_share must be between 0 and 1, got 0.0"),
        ("model.vocab_size=100", "model.vocab_size 100 is below the tokenizer's 260"),
        ("model.head_dim=3", "head_dim must be even"),
        ("optimizer.learning_rate=-1", "must be positive, got -1.0"),
        ("optimizer.warmup_steps=18", "optimizer.warmup_steps must be at least 0 and below the run's 18 steps, got 18"),
        ("runtime.eval_every=0", "eval_every must be an integer of at least 1, got 0"),
        ("seed=-1", "seed must be an integer of at least 0, got -1"),
    ],
)
def test_a_bad_setting_is_one_clear_line(
    assignment: str, message: str, config: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run(config, assignments=(assignment,), run_dir=str(tmp_path / "run")) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_warm_up_longer_than_the_run_is_refused_before_the_data_is_read(
    config: Path, tmp_path: Path, capsys: Any
) -> None:
    assignments = ("optimizer.warmup_steps=18", "corpus.path=/nowhere/pairs.jsonl")
    assert run(config, assignments=assignments, run_dir=str(tmp_path / "run")) == 2
    output = capsys.readouterr()
    assert "optimizer.warmup_steps must be" in output.err
    assert output.out == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"resume": True}, "--resume needs --run_dir"),
        ({"resume": True, "init": "runs/x", "run_dir": "runs/y"}, "pass one"),
        ({"resume": True, "run_dir": "runs/nowhere"}, "there is no run to resume in 'runs/nowhere'"),
        ({"init": "runs/nowhere", "run_dir": "runs/y"}, "there is no run with checkpoints in 'runs/nowhere'"),
    ],
)
def test_init_and_resume_cannot_be_confused(
    given: dict[str, Any], message: str, config: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(config, **given) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs" / "y").exists()


def test_unknown_flags_and_arguments_are_bad_input() -> None:
    arguments = [sys.executable, "-m", "train.main", "--config=configs/default.py"]
    result = subprocess.run([*arguments, "--stepz=3"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "error: Unknown command line flag 'stepz'. Did you mean: steps" in result.stderr
    with flagsaver.flagsaver(config="configs/default.py"):
        assert command.main(["train.main", "steps=3"]) == 2
