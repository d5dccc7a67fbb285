"""Several processes: one job whatever their number; they agree beforehand, end together, and others can go on."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import train.launch
from tests.tiny_run import quiet, tiny_run, write_config, write_corpus
from train.checkpoints import load_params
from train.config import BalanceConfig
from train.launch import run
from train.loop import run_training
from train.metrics_log import METRICS_FILE, read_events
from train.prepare import Prepared
from train.processes import agree, exchange, from_main, join, leave, main_first, together
from train.programs import Programs
from train.run_directory import saved_identity
from train.stopping import StopRequest
from train.topology import Topology, deal, recall_lanes, settle_lanes
from train.warm_up import warm_up

ROOT = Path(__file__).parents[1]
STEPS = 20
LANES = ("--set=balance.lanes=2", "--set=balance.packs_per_step=1")
OPTIONS = (f"--steps={STEPS}", "--set=runtime.checkpoint_every=4", "--compile_cache=")


def losses(run_dir: Path) -> dict[tuple[str, int], float]:
    return {(e["kind"], e["step"]): e["loss"] for e in read_events(run_dir) if "loss" in e}


def start_job(*arguments: str, quick_to_compile: bool = False) -> subprocess.Popen[str]:
    """Starts the launcher, from the checkout; compilations take half as long if the programs may be slow."""
    options = "--xla_backend_optimization_level=0" if quick_to_compile else ""
    return subprocess.Popen(
        [sys.executable, "-m", "train.launch", *arguments],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {options}".strip()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(job: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    path = run_dir / METRICS_FILE
    while job.poll() is None and f'"kind": "train", "step": {step},' not in (path.read_text() if path.exists() else ""):
        time.sleep(0.01)
    assert job.poll() is None, job.communicate()[0]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextlib.contextmanager
def capture_lines() -> Iterator[list[str]]:
    """Takes what is printed inside the block, both streams."""
    lines: list[str] = []
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        yield lines
    lines += text.getvalue().splitlines()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Prepared, Programs, Path]:
    """A corpus, and the run that one process makes of it: the corpus' config, the run, its programs and directory."""
    directory = tmp_path_factory.mktemp("corpus")
    balance = BalanceConfig(pack_size=6, lookahead=3, lanes=2, packs_per_step=1)
    prepared = tiny_run(directory, steps=STEPS, balance=balance)
    runtime = dataclasses.replace(prepared.config.runtime, checkpoint_every=4)
    prepared = dataclasses.replace(prepared, config=dataclasses.replace(prepared.config, runtime=runtime))
    programs = warm_up(prepared, quiet)
    run_dir = directory / "run"
    run_training(prepared, programs, run_dir, say=quiet)
    return write_config(directory / "tiny.py", directory / "pairs.jsonl"), prepared, programs, run_dir


def test_shapes_may_differ_at_every_step(tmp_path: Path) -> None:
    (first, _), (second, _) = two_processes("decoupled", tmp_path)
    assert first == second
    together, alone = first["together"], first["alone"]
    assert together["compiled"] == alone["compiled"] == 0
    np.testing.assert_allclose(together["losses"], alone["losses"], rtol=1e-5)
    end, wanted = np.array(together["params"]), np.array(alone["params"])
    assert np.linalg.norm(end - wanted) <= 1e-6 * np.linalg.norm(wanted)


def test_two_processes_train_like_one_and_one_goes_on_when_one_is_killed(
    alone: tuple[Path, Prepared, Programs, Path], tmp_path: Path
) -> None:
    config, prepared, programs, run_dir = alone
    options = ["--processes", "2", "--", f"--config={config}", *OPTIONS, *LANES]
    job = start_job(*options, f"--run_dir={tmp_path / 'whole'}")
    output = job.communicate(timeout=300)[0]
    assert job.returncode == 0, output
    assert "compilations after warm-up: 0" in output
    assert not [line for line in output.splitlines() if line.startswith("[1]") and "Gloo" not in line]  # 0 speaks
    one, two = losses(run_dir), losses(tmp_path / "whole")
    assert one.keys() == two.keys()
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-5)
    params = [load_params(path, programs.abstract_state.params) for path in (run_dir, tmp_path / "whole")]
    first, second = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(p)]).astype(float) for p in params)
    assert np.linalg.norm(first - second) <= 1e-6 * np.linalg.norm(first)
    assert saved_identity(run_dir) == saved_identity(tmp_path / "whole")  # whoever serves it, it is the same run

    # A process is killed: the other ends with it, and one alone goes on from the last checkpoint.
    job = start_job(
        "--processes", "2", "--", f"--config={config}", *OPTIONS, *LANES, f"--run_dir={tmp_path / 'killed'}"
    )
    wait_for_step(job, tmp_path / "killed", 9)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    begin = time.monotonic()
    output = job.communicate(timeout=300)[0]
    assert time.monotonic() - begin < 60
    assert job.returncode == 1, output
    assert "error: process 1 of the job was killed by SIGKILL: the others are ended" in output
    # Process 0 finds the connection broken, in a step or in a save, or JAX ends it.
    assert re.search(r"^\[0\] (error: .*died|.*another task died)", output, re.MULTILINE), output
    events = read_events(tmp_path / "killed")
    assert events[-1]["step"] < STEPS
    run_training(prepared, programs, tmp_path / "killed", say=quiet)
    again = losses(tmp_path / "killed")
    assert again.keys() == one.keys()
    np.testing.assert_allclose(list(again.values()), list(one.values()), rtol=1e-5)


def test_four_devices_go_on_with_what_one_began_and_stop_together_when_asked(
    alone: tuple[Path, Prepared, Programs, Path], tmp_path: Path
) -> None:
    """Another number of processes, and of devices of each; ZeRO-1 besides, which changes nothing either."""
    config, prepared, programs, run_dir = alone
    stop = StopRequest()
    stop.signal_name = "SIGTERM"
    for _ in range(3):
        run_training(prepared, programs, tmp_path / "run", say=quiet, stop=stop)  # a step each
    options = ["--processes", "2", "--devices-per-process", "2", "--", f"--config={config}", *OPTIONS]
    job = start_job(*options, f"--run_dir={tmp_path / 'run'}", "--resume", "--set=runtime.zero1=True")
    wait_for_step(job, tmp_path / "run", 6)
    job.send_signal(signal.SIGTERM)
    output = job.communicate(timeout=300)[0]
    assert job.returncode == 75, output
    assert "resumed at step 3 of 20" in output
    assert "2 packs a step for 4 devices: 2 of them have none" in output
    assert "SIGTERM: stopped after step" in output
    run_training(prepared, programs, tmp_path / "run", say=quiet)
    one, again = losses(run_dir), losses(tmp_path / "run")
    assert again.keys() == one.keys()
    np.testing.assert_allclose(list(again.values()), list(one.values()), rtol=1e-5)


def test_a_global_jit_does_not_notice_what_agreement_does(tmp_path: Path) -> None:
    """8 rows on one process, 16 on the other: both train happily, with different losses of the "same" step."""
    (loss, _), (other, _) = two_processes("naive", tmp_path)
    assert len(loss) == len(other) == 3
    assert min(abs(a - b) for a, b in zip(loss, other, strict=True)) > 0.5
    for message, code in two_processes("agreeing", tmp_path):
        assert code == 0
        assert message.startswith(
            "chunk shapes is [[8, 4]] on process 0 and [[16, 4]] on process 1: all processes need"
        )


def test_processes_wait_for_a_late_one_as_long_as_they_are_told_to(tmp_path: Path) -> None:
    (first, code), (second, other) = two_processes("waiting", tmp_path)
    assert code == other == 0
    assert first[0] == second[0] == [0, 1]
    for message in (first[1], second[1]):
        assert message.startswith("the processes did not meet within 0.5 s (exchange): one of them is stuck")


def test_a_process_that_is_gone_is_no_bad_input(tmp_path: Path) -> None:
    """JAX raises a ValueError, as which the trainer takes bad input: with an exit code that says not to try again."""
    (message, code), (nothing, other) = two_processes("leaving", tmp_path)
    assert (nothing, other) == (None, 9)
    assert code == 0
    assert message.startswith("another process is gone: ")


def test_a_model_that_one_process_can_not_read_is_told_by_all(tmp_path: Path) -> None:
    """The others would wait for it in the first step."""
    (first, code), (second, other) = two_processes("starting", tmp_path)
    assert code == other == 0
    assert second == "the model can't be read: a disk of one process alone"
    assert first == f"process 1: {second}"


def test_a_job_can_be_terminated_before_it_trains() -> None:
    """JAX's own handler only takes note of the signal."""
    join_and_terminate = (
        "import os, signal, time; from train.processes import join; "
        f"join(coordinator_address={free_address()!r}, num_processes=1, process_id=0); "
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(1)"
    )
    job = subprocess.run([sys.executable, "-c", join_and_terminate], cwd=ROOT, capture_output=True, check=False)
    assert job.returncode == -signal.SIGTERM, job.stderr


def two_processes(how: str, tmp_path: Path) -> list[tuple[Any, int]]:
    """Runs both processes of `tests/two_processes.py`; returns what they printed, and their exit codes."""
    address = free_address()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_COORDINATOR_BIND_ADDRESS": address}
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # compiling takes most of the time
    outputs = [tmp_path / f"{how}-{process}.json" for process in range(2)]
    processes = []
    for process, output in enumerate(outputs):
        command = [sys.executable, str(ROOT / "tests/two_processes.py"), address, str(process), how, str(output)]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL))
    codes = [process.wait(timeout=200) for process in processes]
    printed = [json.loads(output.read_text()) if output.exists() else None for output in outputs]
    return list(zip(printed, codes, strict=True))


def test_processes_with_different_data_or_settings_refuse_to_start(tmp_path: Path) -> None:
    """Each has a corpus and a cap of its own: nothing is compiled, nothing written, both values are named."""
    commands = []
    address = free_address()
    for process, pairs in enumerate((120, 121)):
        directory = tmp_path / f"{process}"
        directory.mkdir()
        config = write_config(directory / "tiny.py", write_corpus(directory / "pairs.jsonl", pairs))
        place = [f"--coordinator_address={address}", "--num_processes=2", f"--process_id={process}"]
        flags = [f"--config={config}", "--compile_cache=", f"--run_dir={tmp_path / 'run'}", *LANES]
        commands.append([sys.executable, "-m", "train.main", *place, *flags, f"--set=optimizer.warmup_steps={process}"])
    environment = {**os.environ, "JAX_COORDINATOR_BIND_ADDRESS": address, "PYTHONPATH": str(ROOT)}
    with capture_lines() as lines:
        assert run(commands, environment) == 2
    differences = "error: config.optimizer.warmup_steps is 0 on process 0 and 1 on process 1; data."
    assert any(differences in line for line in lines), lines
    assert not any("warm-up" in line for line in lines)
    assert not (tmp_path / "run").exists()


def test_the_launcher_tells_who_failed_and_ends_the_others() -> None:
    def script(text: str) -> list[str]:
        return [sys.executable, "-c", text]

    sleeping = script("import time; print('here', flush=True); time.sleep(100)")
    begin = time.monotonic()
    with capture_lines() as lines, pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.launch, "GRACE_SECONDS", 0.3)
        assert run([sleeping, script("import sys; print('no data'); sys.exit(2)")], os.environ) == 2
        stubborn = script("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(100)")
        assert run([stubborn, script("import os, time; time.sleep(1); os.kill(os.getpid(), 9)")], os.environ) == 1
    assert time.monotonic() - begin < 60
    assert "[0] here" in lines
    assert "[1] no data" in lines
    assert "error: process 1 of the job failed with exit code 2: the others are ended" in lines
    assert "error: process 1 of the job was killed by SIGKILL: the others are ended" in lines
    assert run([script("pass"), script("pass")], os.environ) == 0
    assert run([script("pass"), script("import sys; sys.exit(75)")], os.environ) == 75


def test_the_launcher_pins_processes_to_cores() -> None:
    core = max(os.sched_getaffinity(0))
    text = "import os, time; time.sleep(0.5); print(sorted(os.sched_getaffinity(0)))"
    with capture_lines() as lines:
        assert run([[sys.executable, "-c", text]], os.environ, cores=[core]) == 0
    assert lines == [f"[0] [{core}]"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "2"], "give the flags of train.main after --"),
        (["--processes", "0", "--", "--config=c"], "--processes must be at least 1, got 0"),
        (["--processes", "2", "--devices-per-process", "0", "--", "-"], "--devices-per-process must be at least 1"),
        (["--processes", "9999", "--pin", "--", "-"], "--pin needs a core for each of 9999 processes, there are"),
        (["--", "--config=c"], "the following arguments are required: --processes"),
    ],
)
def test_bad_arguments_of_the_launcher(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as error:
        train.launch.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_processes": 2}, "--coordinator_address is missing: give coordinator_address, num_processes and"),
        ({"coordinator_address": "h:1", "process_id": 0}, "--num_processes is missing"),
        (
            {"coordinator_address": "h:1", "num_processes": 2, "process_id": 2},
            r"process_id must be in 0\.\.1 for 2 processes, got 2",
        ),
        ({"coordinator_address": "h", "num_processes": 2, "process_id": 0}, "must be host:port, got 'h'"),
    ],
)
def test_a_place_in_a_job_is_given_in_whole(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        join(**given)


def test_a_process_alone_agrees_with_itself() -> None:
    join()
    agree({"a": 1})
    assert exchange({"a": (1, 2)}) == [{"a": [1, 2]}]
    assert from_main(lambda: 3) == together(lambda: 3) == 3
    with pytest.raises(ValueError, match="no such file"):
        together(lambda: int("no such file"))
    with main_first("nobody waits"):
        pass
    assert leave(2) == 2


def test_lanes_are_settled_at_the_first_start_and_kept() -> None:
    start = Topology(process_index=1, process_count=8, local_devices=4)
    settled = settle_lanes(BalanceConfig(), start)
    assert (settled.lanes, settled.packs_per_step) == (8, 4)
    identity = {"config": {"balance": {"lanes": 8, "packs_per_step": 4}}}
    for processes, devices in ((4, 8), (2, 1), (1, 3)):
        later = Topology(process_index=0, process_count=processes, local_devices=devices)
        assert settle_lanes(recall_lanes(BalanceConfig(), identity), later) == settled
    with pytest.raises(ValueError, match="16 hosts can't share 8 lanes evenly: run on one of 1, 2, 4, 8 hosts"):
        settle_lanes(settled, Topology(process_index=0, process_count=16, local_devices=1))
    many = settle_lanes(BalanceConfig(lanes=64), start)
    assert (many.lanes, many.packs_per_step) == (64, 1)


@pytest.mark.parametrize(("packs", "devices"), [(0, 2), (1, 2), (4, 4), (7, 3), (16, 1)])
def test_packs_are_dealt_out_evenly(packs: int, devices: int) -> None:
    dealt = deal(list(range(packs)), devices)
    assert [pack for own in dealt for pack in own] == list(range(packs))
    assert len(dealt) == devices
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
