"""A dry run tells what the run then is, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from absl.testing import flagsaver

import train.main as command
from bcl_grain.inputs import read_lengths
from tests.tiny_run import STEPS, tiny_run, write_config, write_corpus
from train.compiling import CompileCounter
from train.dry_run import dry_run, evaluation_share
from train.report import compare_all

pytestmark = pytest.mark.usefixtures("parsed_flags")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path / "tiny.py", write_corpus(tmp_path / "pairs.jsonl"))


def run(config: Path, **given: Any) -> int:
    with flagsaver.flagsaver(config=str(config), compile_cache="", **given):
        return command.main(["train.main"])


def test_a_dry_run_compiles_trains_and_writes_nothing(config: Path, tmp_path: Path, capsys: Any) -> None:
    before = set(tmp_path.iterdir())
    counter = CompileCounter()
    assert run(config, dry_run=True, run_dir=str(tmp_path / "run")) == 0
    assert counter.programs == 0
    assert set(tmp_path.iterdir()) == before
    output = capsys.readouterr().out
    assert f"job: {STEPS} steps of 6 records (1 lanes, 1 packs of 6 each)" in output
    for policy in ("arrival", "windowed", "streaming"):
        assert f"  {policy:>13}" in output


def test_it_says_what_the_run_will_report(tmp_path: Path) -> None:
    prepared = tiny_run(tmp_path)
    lines: list[str] = []
    comparison = dry_run(prepared, lines.append)
    assert comparison.figures() == compare_all(prepared).figures()
    assert any(f"evaluation: {len(prepared.evaluation)} records" in line for line in lines)


def test_a_small_corpus_is_compared_with_fewer_ranks(tmp_path: Path) -> None:
    prepared = tiny_run(tmp_path)
    runtime = dataclasses.replace(prepared.config.runtime, simulated_ranks=1000)
    many = dataclasses.replace(prepared, config=dataclasses.replace(prepared.config, runtime=runtime))
    assert compare_all(prepared).ranks == 2
    assert compare_all(many).ranks == len(prepared.train) // 6 > 2


def test_evaluations_are_counted_as_work(tmp_path: Path) -> None:
    """18 steps, evaluated at 0, 5, 10, 15 and 18: forward passes over the held-out records alone."""
    prepared = tiny_run(tmp_path)
    cost = prepared.lay_out.cost
    held_out = sum(cost(record) for record in prepared.evaluation)
    step = 6 * np.mean([cost(record) for record in prepared.train])
    assert evaluation_share(prepared) == pytest.approx(5 * held_out / 3 / (18 * step))
    rare = dataclasses.replace(
        prepared,
        config=dataclasses.replace(
            prepared.config, runtime=dataclasses.replace(prepared.config.runtime, eval_every=100)
        ),
    )
    assert evaluation_share(rare) == pytest.approx(2 * held_out / 3 / (18 * step))


def test_a_run_that_mostly_evaluates_is_warned_of(config: Path, capsys: Any) -> None:
    """The warning stands before anything is compiled; here the run ends then, as no memory is enough."""
    for eval_every, warned in ((1, True), (1000, False)):
        changes = [f"runtime.eval_every={eval_every}", "runtime.memory_gib=1e-9"]
        assert run(config, set=changes) == 2
        output = capsys.readouterr()
        assert ("warning: the evaluations take as much work as" in output.out) == warned
        assert "memory" in output.err or "GiB" in output.err


def test_lengths_are_written_for_the_command_line(config: Path, tmp_path: Path) -> None:
    assert run(config, dry_run=True, lengths=str(tmp_path / "lengths.npy")) == 0
    expected = tiny_run(tmp_path).train.sizes
    np.testing.assert_array_equal(read_lengths(str(tmp_path / "lengths.npy")).values, expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lengths": "lengths.npy"}, "--lengths goes with --dry_run"),
        ({"dry_run": True, "lengths": "/nowhere/lengths.npy"}, "can't write the lengths to '/nowhere/lengths.npy'"),
        ({"dry_run": True, "set": ["steps=0"]}, "steps must be"),
        ({"dry_run": True, "set": ["runtime.memory_gib=0.001"]}, "the device has 0.001 GiB"),
    ],
)
def test_bad_input_is_told(given: dict[str, Any], message: str, config: Path, capsys: Any) -> None:
    assert run(config, **given) == 2
    assert message in capsys.readouterr().err
