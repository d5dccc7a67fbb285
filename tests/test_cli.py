from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from bcl_grain import trial
from bcl_grain.arms import policy_names
from bcl_grain.cli import build_parser, main
from bcl_grain.planner import PlannerConfig, Policy
from bcl_grain.report import RESULT_KEYS

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--ranks", "4", "--pack-size", "8", "--lookahead", "4"]
MEMORY = ["--model", "smollm2-135m", "--memory-gib", "8"]


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A file of 2,000 lengths whose longest record is 400."""
    lengths = np.minimum(np.random.default_rng(1).lognormal(4.2, 0.9, 2000).astype(int) + 1, 400)
    np.savez(tmp_path / "lengths.npz", len=lengths)
    return str(tmp_path / "lengths.npz")


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `plan` try its settings over few steps."""
    monkeypatch.setattr(trial, "STEPS", 64)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    assert main(argv) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    out, _ = run(capsys, *argv, "--json", "-")
    return json.loads(out)


def test_profile_writes_a_table_a_verdict_and_a_prior_that_simulate_takes(
    capsys: pytest.CaptureFixture[str], data: str, tmp_path: Path
) -> None:
    prior = tmp_path / "prior.json"
    out, _ = run(capsys, "profile", data, *SMALL, "--prior-out", str(prior))
    lengths = np.load(data)["len"]
    assert "2,000 records" in out
    assert "neven: with packs of 8 records in order of arrival, 4 ranks take" in out
    written = json.loads(prior.read_text())
    assert written["mean"] == pytest.approx(np.minimum(lengths, written["ceiling"]).mean())
    assert (written["cost"], written["pack_size"]) == ("tokens", 8)
    document = run_json(capsys, "simulate", data, *SMALL, "--policies", "windowed", "--prior", str(prior))
    assert document["config"]["prior"] == written


def test_simulate_gives_every_documented_figure_for_every_policy(capsys: pytest.CaptureFixture[str], data: str) -> None:
    document = run_json(
        capsys, "simulate", data, *SMALL, "--policies", ",".join(policy_names()), "--layout", "row-packed"
    )
    assert [result["policy"] for result in document["results"]] == list(policy_names())
    steps = 2000 // (4 * 8)
    assert document["config"]["steps"] == steps
    for result in document["results"]:
        assert tuple(result) == RESULT_KEYS
        assert result["records_in"] == result["records_out"] == steps * 4 * 8
        assert result["total_waste"] > result["sync_waste"]
        assert 0 < result["padding_fraction"] < 1
        assert (result["bins_per_rank"] is None) == (
            result["policy"] not in ("mffd", "grain-first-fit", "grain-best-fit")
        )
        assert (result["order"] is None) == (result["policy"] not in get_args(Policy)[1:])
    by_policy = {result["policy"]: result for result in document["results"]}
    assert by_policy["arrival"]["speedup_vs_arrival"] == 1.0
    assert by_policy["arrival"]["cost_cv_reduction"] == 0.0
    windowed = by_policy["windowed"]
    assert windowed["cost_cv_reduction"] == pytest.approx(1 - windowed["cost_cv"] / by_policy["arrival"]["cost_cv"])
    assert windowed["sync_waste"] < by_policy["arrival"]["sync_waste"]


def test_absent_figures_are_null_and_arrival_needs_not_be_asked_for(
    capsys: pytest.CaptureFixture[str], data: str
) -> None:
    (result,) = run_json(capsys, "simulate", data, *SMALL, "--policies", "windowed")["results"]
    assert result["policy"] == "windowed"
    assert result["speedup_vs_arrival"] > 1
    assert result["total_waste"] is result["executed_step_cost_mean"] is result["padding_fraction"] is None


def test_the_default_policies_and_formats(capsys: pytest.CaptureFixture[str], data: str, tmp_path: Path) -> None:
    out, err = run(capsys, "simulate", data, *SMALL, "--json", str(tmp_path / "r.json"))
    rows = [line.split()[0] for line in out.splitlines()[2:]]
    assert rows == [*get_args(Policy), "mffd", "kk", "length-grouped"]
    assert "windowed: 100 %" in err
    assert [r["policy"] for r in json.loads((tmp_path / "r.json").read_text())["results"]] == rows
    assert run(capsys, "simulate", data, *SMALL, "--quiet")[1] == ""


def test_simulate_is_deterministic_but_for_time(capsys: pytest.CaptureFixture[str], data: str) -> None:
    def figures(*more: str) -> Any:
        results = run_json(capsys, "simulate", data, *SMALL, "--draws", "iid", "--steps", "40", *more)["results"]
        return [{key: value for key, value in r.items() if key != "planning_us_per_record"} for r in results]

    assert figures() == figures()
    assert figures() != figures("--seed", "1")


def test_a_cap_is_counted(capsys: pytest.CaptureFixture[str], data: str) -> None:
    lengths = np.load(data)["len"][: 4 * 8 * 62]
    (result,) = run_json(capsys, "simulate", data, *SMALL, "--policies", "arrival", "--cap", "100", "--draws", "order")[
        "results"
    ]
    assert result["records_capped"] == (lengths > 100).sum()
    assert result["step_cost_mean"] <= 800


def test_report_restricts_the_figures_and_not_the_job(capsys: pytest.CaptureFixture[str], data: str) -> None:
    whole, part = (
        run_json(capsys, "simulate", data, *SMALL, "--policies", "arrival", *more)["results"][0]
        for more in ([], ["--report", "10:20"])
    )
    assert whole["records_out"] == part["records_out"]
    assert whole["step_cost_mean"] != part["step_cost_mean"]


def test_one_stream_for_a_host_s_devices_wastes_less(capsys: pytest.CaptureFixture[str], data: str) -> None:
    waste = [
        run_json(capsys, "simulate", data, *SMALL, "--policies", "windowed", "--packs-per-step", pooled)["results"][0]
        for pooled in ("1", "4")
    ]
    assert waste[1]["sync_waste"] < 0.5 * waste[0]["sync_waste"]


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        ("row-packed:length=512,rows_per_chunk=2,heights=1", [[1, 512], [2, 512]]),
        ("one-shape:rows=9,length=512", [[9, 512]]),
        ("bucketed:lengths=128+512,tokens_per_chunk=512", [[4, 128], [1, 512]]),
        ("padded", [[8, 512]]),
    ],
)
def test_layouts_are_named_with_their_arguments(
    capsys: pytest.CaptureFixture[str], data: str, layout: str, shapes: list[list[int]]
) -> None:
    document = run_json(capsys, "simulate", data, *SMALL, "--policies", "windowed", "--layout", layout)
    assert document["config"]["layout_shapes"] == shapes
    assert document["results"][0]["total_waste"] > 0


@pytest.mark.usefixtures("short_trials")
@pytest.mark.parametrize("memory_gib", ["8", "2.9"])
def test_the_plan_s_snippet_runs_as_printed(
    capsys: pytest.CaptureFixture[str], data: str, memory_gib: str, tmp_path: Path
) -> None:
    argv = [
        "plan",
        data,
        "--model",
        "smollm2-135m",
        "--memory-gib",
        memory_gib,
        "--ranks",
        "4",
        "--devices-per-host",
        "2",
    ]
    (result,) = run_json(capsys, *argv)["results"]
    out, _ = run(capsys, *argv)
    assert result["snippet"] in out
    for setting, reason in result["reasons"].items():
        assert setting in result
        assert " ".join(reason.split()) in " ".join(out.split())
    assert result["packs_per_step"] == result["streams"] == 2
    program = result["snippet"].replace(
        "    pass", "    shapes = [tuple(c['tokens'].shape) for c in chunks]; steps += 1; seen.update(shapes)"
    )
    names: dict[str, Any] = {"steps": 0, "seen": set()}
    exec(compile(program, "snippet", "exec"), names)
    assert names["steps"] == result["num_packs"] > 0
    assert names["seen"] <= set(map(tuple, result["shapes"]))


@pytest.mark.usefixtures("short_trials")
def test_a_small_device_makes_the_plan_cap_the_longest_records(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lengths = np.random.default_rng(2).integers(1, 300, 3000)
    lengths[::500] = 500_000
    np.save(tmp_path / "long.npy", lengths)
    (result,) = run_json(capsys, "plan", str(tmp_path / "long.npy"), *MEMORY, "--ranks", "2", "--pack-size", "16")[
        "results"
    ]
    assert 300 < result["cap"] < 500_000
    assert "max_size=" in result["snippet"]
    assert result["peak_gib"] <= 0.9 * 8


def test_boundary_has_a_cell_for_every_cap_and_pack_size(capsys: pytest.CaptureFixture[str], data: str) -> None:
    argv = ["boundary", data, *MEMORY, "--lookahead", "4", "--pack-sizes", "8,1"]
    document = run_json(capsys, *argv)
    cells = document["results"]
    places = {(c["cap"], c["pack_size"], c["layout"]) for c in cells}
    assert len(places) == len(cells) == 5 * 2 * 4
    assert {c["cap"] for c in cells} == {"none", "p99.9", "p99", "p95", "p90"}
    p99 = next(c["cap_effect"] for c in cells if c["cap"] == "p99")
    lengths = np.load(data)["len"]
    assert p99["records"] == (lengths > p99["cap"]).mean()
    out, _ = run(capsys, *argv)
    assert "largest pack size that fits" in out


@pytest.mark.parametrize(
    ("command", "name"), [("profile", "profile.png"), ("simulate", "simulate.png"), ("boundary", "boundary.png")]
)
def test_plots_are_written(
    capsys: pytest.CaptureFixture[str], data: str, tmp_path: Path, command: str, name: str
) -> None:
    pytest.importorskip("matplotlib")
    more = [*MEMORY, "--lookahead", "4", "--pack-sizes", "1,8"] if command == "boundary" else SMALL
    run(capsys, command, data, *more, "--plot", str(tmp_path / "plots"))
    assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")


COMMANDS: dict[str, list[str]] = {
    "profile": SMALL,
    "simulate": SMALL,
    "plan": [*MEMORY, "--ranks", "4"],
    "boundary": [*MEMORY, "--lookahead", "4"],
}
EACH_COMMAND = pytest.mark.parametrize("command", COMMANDS)


def refuse(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    try:
        code = main(argv)
    except SystemExit as exit_:  # argparse's own
        code = exit_.code  # type: ignore[assignment]
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    return captured.err


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


def test_a_file_shorter_than_one_window_is_profiled_as_one_window(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(1, 1000, 27))
    out, _ = run(capsys, "profile", str(tmp_path / "a.npy"), *SMALL)
    assert "27 records" in out
    assert "Windowed BCL with lookahead 3 brings that to" in out
    assert run_json(capsys, "profile", str(tmp_path / "a.npy"), *SMALL)["config"]["lookahead"] == 3


def test_a_small_file_can_be_simulated_by_drawing_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(1, 101))
    argv = ["simulate", str(tmp_path / "a.npy"), *SMALL, "--policies", "windowed"]
    assert "pass --lookahead 3 or less, fewer --ranks, or --draws iid" in refuse(capsys, *argv)
    (result,) = run_json(capsys, *argv, "--draws", "iid", "--steps", "40")["results"]
    assert result["records_out"] == 40 * 4 * 8


def test_the_command_line_simulates_the_order_that_a_pipeline_has(
    capsys: pytest.CaptureFixture[str], data: str
) -> None:
    (result,) = run_json(capsys, "simulate", data, *SMALL, "--policies", "windowed")["results"]
    assert result["order"] == PlannerConfig(pack_size=1, packs_per_step=1, lookahead=1).order


def test_help_shows_the_defaults_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    out = capsys.readouterr().out
    assert "(default: 0)" in out
    assert "(default: None)" not in out


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


def test_the_module_runs_as_a_program_and_a_reader_that_stops_is_no_error(data: str) -> None:
    command = [sys.executable, "-m", "bcl_grain", "simulate", data, *SMALL, "--policies", "arrival", "--json", "-"]
    done = subprocess.run([*command, "--quiet"], capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout)["results"][0]["policy"] == "arrival"
    assert done.stderr == ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 0


def test_the_console_script_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"bcl-grain": "bcl_grain.cli:main"}
    assert build_parser().prog == "bcl-grain"
