"""The command line refuses in one sentence what it can't serve, and prints nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.commands import MEMORY, SMALL, refuse, run, write_lengths

COMMANDS: dict[str, list[str]] = {
    "profile": SMALL,
    "simulate": SMALL,
    "plan": [*MEMORY, "--ranks", "4"],
    "boundary": [*MEMORY, "--lookahead", "4"],
}


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_lengths(tmp_path)


EACH_COMMAND = pytest.mark.parametrize("command", COMMANDS)


@EACH_COMMAND
def test_a_missing_file_is_refused(capsys: pytest.CaptureFixture[str], command: str) -> None:
    err = refuse(capsys, command, "gone.npz", *COMMANDS[command])
    assert err == "bcl-grain: error: no file 'gone.npz': check the path, or pass a workload's name\n"


@EACH_COMMAND
def test_an_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert "unknown workload 'medquud': did you mean medquad?" in refuse(capsys, command, "medquud", *COMMANDS[command])


@EACH_COMMAND
def test_a_file_without_usable_columns_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    err = refuse(capsys, command, str(tmp_path / "a.csv"), *COMMANDS[command])
    assert "no usable column among ['x', 'y']: pass the one with the lengths" in err


@EACH_COMMAND
@pytest.mark.parametrize("length", ["0", "-7"])
def test_a_length_that_is_not_positive_is_refused_with_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, length: str
) -> None:
    (tmp_path / "a.csv").write_text("len\n" + 3000 * "5\n" + f"{length}\n")
    err = refuse(capsys, command, str(tmp_path / "a.csv"), *COMMANDS[command])
    assert f"length {float(length)} in line 3002" in err
    assert "remove or mend the record" in err


@EACH_COMMAND
def test_fewer_records_than_one_window_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    np.save(tmp_path / "a.npy", np.full(3, 9))
    err = refuse(capsys, command, str(tmp_path / "a.npy"), *COMMANDS[command])
    assert "fewer than one window" in err
    assert "bring more records" in err


@pytest.mark.parametrize("command", ["plan", "boundary"])
def test_a_budget_below_the_model_is_refused(capsys: pytest.CaptureFixture[str], data: str, command: str) -> None:
    argv = [data, "--model", "llama-3.1-8b", "--memory-gib", "80", *COMMANDS[command][4:]]
    err = refuse(capsys, command, *argv)
    assert "below the model's own size" in err
    assert "raise the budget" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policies", "arrival,magic"], "unknown policy 'magic': choose among arrival, windowed"),
        (["--policies", ","], "unknown policy"),
        (["--order", "sideways"], "invalid choice: 'sideways'"),
        (["--cost", "transformer:gpt-9"], "unknown model 'gpt-9': pass one of smollm2-135m"),
        (
            ["--cost", "flops"],
            "unknown cost 'flops': pass tokens, transformer:MODEL, linear=A,quadratic=B or table:FILE",
        ),
        (["--cost", "linear=x"], "--cost: 'x' is no value for 'linear': pass a number"),
        (["--cost", "cubic=1"], "--cost doesn't know 'cubic=1'"),
        (["--cost", "linear=-1"], "per_token must be finite and at least 0, got -1.0"),
        (["--layout", "origami"], "unknown layout 'origami': pass none, row-packed, one-shape, bucketed or padded"),
        (["--layout", "padded:rows=3"], "--layout doesn't know 'rows=3'"),
        (
            ["--layout", "row-packed:length=128"],
            "no row longer than 128, but the longest record is 400: cut records by --cap 128",
        ),
        (["--layout", "padded:length=1+2"], "--layout takes one length, got [1, 2]"),
        (["--cap", "pnine"], "unknown cap 'pnine'"),
        (["--cap", "0"], "a cap must be from 1 to 2,147,483,647, got 0"),
        (["--report", "50:20"], "--report '50:20' is no range A:B within 0:62"),
        (["--report", "50"], "--report '50' is no range A:B"),
        (["--ranks", "4", "--packs-per-step", "3"], "--ranks 4 is no multiple of --packs-per-step 3"),
        (["--ranks", "0"], "'0' is no integer from 1 to"),
        (["--ranks", "eight"], "'eight' is no integer from 1 to"),
        (["--steps", "3"], "3 steps have fewer records than one window of --lookahead 4 steps"),
        (["--prior", "gone.json"], "no prior file 'gone.json': `profile DATA --prior-out gone.json` writes one"),
        (["--column", "nope"], "has no column 'nope': pass one of ['len']"),
        (["--bin-tokens", "10"], "is not between 1 and the capacity 10"),
    ],
)
def test_options_that_cannot_be_served_are_refused(
    capsys: pytest.CaptureFixture[str], data: str, argv: list[str], message: str
) -> None:
    assert message in refuse(capsys, "simulate", data, *SMALL, "--quiet", *argv)


def test_what_a_table_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    err = refuse(capsys, "simulate", "medquad", *SMALL, "--draws", "order")
    assert "--draws order needs a file: the table of workload 'medquad' knows no order" in err


def test_a_prior_of_another_cost_is_refused(capsys: pytest.CaptureFixture[str], data: str, tmp_path: Path) -> None:
    prior = str(tmp_path / "prior.json")
    run(capsys, "profile", data, *SMALL, "--prior-out", prior)
    err = refuse(capsys, "simulate", data, *SMALL, "--prior", prior, "--cost", "linear=2")
    assert "with --cost tokens --pack-size 8, but this is --cost linear=2 --pack-size 8: make one for it" in err
    Path(prior).write_text("{}")
    assert "is no prior file" in refuse(capsys, "simulate", data, *SMALL, "--prior", prior)


def test_pack_sizes_must_be_numbers(capsys: pytest.CaptureFixture[str], data: str) -> None:
    for sizes in ("8,many", "0,8", ""):
        err = refuse(capsys, "boundary", data, *COMMANDS["boundary"], "--quiet", "--pack-sizes", sizes)
        assert f"--pack-sizes {sizes!r} is no list of positive integers" in err


def test_a_missing_option_or_command_is_refused(capsys: pytest.CaptureFixture[str], data: str) -> None:
    assert "--memory-gib" in refuse(capsys, "plan", data, "--model", "smollm2-135m")
    assert "COMMAND" in refuse(capsys)


def test_a_directory_that_cannot_be_written_is_refused(capsys: pytest.CaptureFixture[str], data: str) -> None:
    err = refuse(capsys, "simulate", data, *SMALL, "--quiet", "--json", "/nowhere/at/all.json")
    assert "/nowhere/at/all.json" in err
