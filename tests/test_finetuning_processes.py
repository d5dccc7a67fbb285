"""Fine-tuning by several processes: the losses, answers and files of one process, and runs that change their number."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from absl.testing import flagsaver

import train.loop
import train.main as command
import train.step
from tests.chat_formats import write_chat_model
from tests.test_processes import start_job
from tests.tiny_tuning import LORA, ONE_SHAPE, eval_losses, write_config, write_talk
from train.prepare import Prepared
from train.programs import Programs
from train.samples import SAMPLES_FILE
from train.token_files import Say
from train.warm_up import warm_up

pytestmark = pytest.mark.usefixtures("parsed_flags")

LANES = ("balance.lanes=2", "balance.packs_per_step=1")
STEPS = 6
QUESTIONS = ("hello", "what is it?")


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Config files by what is trained how."""
    directory = tmp_path_factory.mktemp("tuning")
    write = functools.partial(
        write_config, model=write_chat_model(directory / "pretrained"), data=write_talk(directory / "talk.jsonl")
    )
    return {
        "full": write(directory / "full.py"),
        "adapters": write(directory / "adapters.py", lora=LORA),
        "one program": write(directory / "one_program.py", lora=LORA, layout=ONE_SHAPE),
    }


@pytest.fixture(scope="module")
def programs() -> dict[Any, Programs]:
    """Those of the runs of one process, which share them."""
    return {}


@pytest.fixture(autouse=True)
def compiled_once(programs: dict[Any, Programs], monkeypatch: pytest.MonkeyPatch) -> None:
    def once(prepared: Prepared, say: Say) -> Programs:
        key = prepared.model, prepared.lay_out.layout.shapes, prepared.config.step
        if key not in programs:
            programs[key] = warm_up(prepared, say)
        return programs[key]

    monkeypatch.setattr(command, "warm_up", once)


def run_alone(config: Path, run_dir: Path, *assignments: str, resume: bool = False) -> None:
    with flagsaver.flagsaver(
        config=str(config), set=[*LANES, *assignments], compile_cache="", run_dir=str(run_dir), resume=resume
    ):
        assert command.main(["train.main"]) == 0


def run_two(config: Path, run_dir: Path, *assignments: str, flags: tuple[str, ...] = ()) -> str:
    """Runs two processes; returns what they printed."""
    settings = [f"--set={assignment}" for assignment in (*LANES, *assignments)]
    job = start_job(
        "--processes",
        "2",
        "--",
        f"--config={config}",
        "--compile_cache=",
        f"--run_dir={run_dir}",
        *settings,
        *flags,
        quick_to_compile=True,
    )
    output = job.communicate(timeout=300)[0]
    assert job.returncode == 0, output
    assert "compilations after warm-up: 0" in output
    return output


def cut(run_dir: Path, export: str) -> None:
    """Takes away what the run has left after its checkpoint of step 4."""
    shutil.rmtree(run_dir / "checkpoints" / f"{STEPS}")
    shutil.rmtree(run_dir / export)


def answers(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / SAMPLES_FILE).read_text().splitlines()]


def check_same(run_dir: Path, wanted: Path, export: str) -> None:
    """The same evaluations to rounding, one answer each, and one export of the same tensors."""
    losses = eval_losses(wanted)
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.05
    np.testing.assert_allclose(eval_losses(run_dir), losses, rtol=1e-5)
    assert [(line["step"], line["prompt"]) for line in answers(run_dir)] == [
        (step, question) for step in (0, 4, STEPS) for question in QUESTIONS
    ]
    assert answers(run_dir) == answers(wanted)
    (file,) = (run_dir / export).glob("*.safetensors")
    assert {path.name for path in (run_dir / export).iterdir()} == {path.name for path in (wanted / export).iterdir()}
    ours, theirs = (safetensors.numpy.load_file(path) for path in (file, wanted / export / file.name))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, rtol=1e-3, atol=1e-5 * np.abs(tensor).max(), err_msg=name)


def test_two_processes_start_anew_what_one_had_not_saved_yet_and_one_goes_on(
    configs: dict[str, Path], tmp_path: Path, monkeypatch: Any
) -> None:
    """All parameters. The first process dies in its second step, before the first checkpoint."""
    config, wanted, run_dir = configs["full"], tmp_path / "wanted", tmp_path / "run"
    run_alone(config, wanted)

    class Killed(BaseException):
        pass

    original, calls = train.step.train_step, itertools.count(1)

    def dying(*given: Any) -> Any:
        if next(calls) == 2:
            raise Killed
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(train.loop, "train_step", dying)
        with pytest.raises(Killed):
            run_alone(config, run_dir)
    assert {line["step"] for line in answers(run_dir)} == {0}

    output = run_two(config, run_dir, flags=("--resume",))
    assert "the run ended before its first checkpoint: it starts anew, at step 0" in output
    assert output.count("exported: ") == 1
    check_same(run_dir, wanted, "model")
    reload = (f"pretrained={run_dir / 'model'}", "steps=2", "runtime.sample_prompts=[]")
    run_alone(config, tmp_path / "reloaded", *reload)
    assert eval_losses(tmp_path / "reloaded")[0] == pytest.approx(eval_losses(run_dir)[-1], abs=1e-6)

    cut(run_dir, "model")
    run_alone(config, run_dir, resume=True)
    check_same(run_dir, wanted, "model")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of what one process makes of adapters; filled by the first test that asks `adapters_run` for it."""
    return tmp_path_factory.mktemp("adapters") / "run"


@pytest.fixture
def adapters_run(adapted: Path, configs: dict[str, Path]) -> Path:
    if not adapted.exists():
        run_alone(configs["adapters"], adapted)
    return adapted


def test_two_processes_start_from_adapters_in_one_program_and_one_goes_on(
    configs: dict[str, Path], adapters_run: Path, tmp_path: Path
) -> None:
    """The optimizer's state is cut up between the two (ZeRO-1), and whole again in the one that goes on."""
    config = configs["one program"]
    onwards = ("step=spmd", f"adapters={adapters_run / 'adapters'}")
    run_alone(config, tmp_path / "wanted", *onwards)
    assert eval_losses(tmp_path / "wanted")[0] == pytest.approx(eval_losses(adapters_run)[-1], abs=1e-6)
    run_two(config, tmp_path / "run", *onwards, "runtime.zero1=True")
    check_same(tmp_path / "run", tmp_path / "wanted", "adapters")
    cut(tmp_path / "run", "adapters")
    run_alone(config, tmp_path / "run", *onwards, resume=True)
    check_same(tmp_path / "run", tmp_path / "wanted", "adapters")


def test_two_processes_go_on_with_what_one_has_saved(
    configs: dict[str, Path], adapters_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(adapters_run, tmp_path / "run")
    cut(tmp_path / "run", "adapters")
    output = run_two(configs["adapters"], tmp_path / "run", "runtime.zero1=True", flags=("--resume",))
    assert f"resumed at step 4 of {STEPS}" in output
    check_same(tmp_path / "run", adapters_run, "adapters")
