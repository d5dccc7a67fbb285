"""The command line answers with tables, JSON and pictures, from files and workloads."""

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
from tests.commands import MEMORY, SMALL, refuse, run, run_json, write_lengths

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_lengths(tmp_path)


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `plan` try its settings over few steps."""
    monkeypatch.setattr(trial, "STEPS", 64)


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
