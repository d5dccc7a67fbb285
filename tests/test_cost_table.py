"""Measured cost tables: what they say of chunks and records, files, and a calibration from end to end."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bcl_grain as bcl
from bcl_grain.cli import main as bcl_main
from bcl_grain.cost_table import CostTable, TableCost, read_cost_table, write_cost_table
from bcl_grain.layouts import RowPackedLayout
from bcl_grain.planner import PlannerConfig
from bcl_grain.simulate import simulate
from tests.tiny_run import tiny_config, tiny_run, write_config, write_corpus
from train import calibrate as command
from train.calibration import Prediction, Timing, full_chunk
from train.config import fingerprint
from train.prepare import prepare
from train.topology import Topology

TIMINGS = [((1, 64), 0.11), ((2, 64), 0.19), ((4, 64), 0.41)]


def test_a_chunk_costs_what_was_measured() -> None:
    cost = TableCost.from_timings(TIMINGS, update_seconds=0.5)
    assert [cost.of_chunk(*shape) for shape, _ in TIMINGS] == [seconds for _, seconds in TIMINGS]
    layout = RowPackedLayout(length=64, rows_per_chunk=4, heights=(1,))
    assert layout.executed_cost([60] * 5, cost) == pytest.approx(0.41 + 0.11)
    with pytest.raises(ValueError, match=r"no chunk of shape \(3, 64\), only \(1, 64\), \(2, 64\), \(4, 64\): calibr"):
        cost.of_chunk(3, 64)


def test_a_record_costs_its_share_of_a_row() -> None:
    """Rows of one length say nothing of squares: 4 rows' tokens must cost about what 4 rows do, however cut up."""
    cost = TableCost.from_timings(TIMINGS)
    assert cost.per_token_squared == 0
    fit = bcl.fit_cost(TIMINGS)
    assert (cost.per_token, cost.per_chunk) == (fit.cost.per_token, fit.cost.per_chunk)
    assert cost({"tokens": np.zeros(64)}) == 4 * cost({"tokens": np.zeros(16)})
    assert cost.per_chunk + cost({"tokens": np.zeros(4 * 64)}) == pytest.approx(0.41, rel=0.1)
    single = TableCost.from_timings([((2, 64), 0.25)])
    assert single({"tokens": np.zeros(128)}) == pytest.approx(0.25)


def test_several_lengths_give_squares_and_shapes_between() -> None:
    truth = bcl.TransformerCost(1e-3, 1e-5, 0.02)
    shapes = [(4, 128), (2, 256), (1, 512), (3, 512)]
    cost = TableCost.from_timings([(shape, truth.of_chunk(*shape)) for shape in shapes])
    assert cost.per_token_squared == pytest.approx(1e-5)
    assert cost.of_chunk(3, 300) == pytest.approx(truth.of_chunk(3, 300))
    assert cost.of_length(100) == pytest.approx(truth.of_length(100))


def test_records_cost_what_they_add_to_packs() -> None:
    """Rows are run whole: a record of a packed row costs its share, though the row's attention is quadratic."""
    truth = bcl.TransformerCost(1e-3, 1e-5, 0.001)
    layout = RowPackedLayout(length=512, rows_per_chunk=1, lengths=(128, 256, 384))
    table = TableCost.from_timings([(shape, truth.of_chunk(*shape)) for shape in layout.shapes])
    assert table.per_token_squared == pytest.approx(1e-5)
    rng = np.random.default_rng(0)
    packs = rng.integers(8, 129, (200, 32)).tolist()
    fitted = table.with_records(layout, packs)
    assert fitted.chunk_seconds == table.chunk_seconds
    others = rng.integers(8, 129, (200, 32)).tolist()
    executed = np.array([layout.executed_cost(pack, table) for pack in others])

    def spread(cost: bcl.TransformerCost) -> float:
        ratio = executed / np.array([cost.of_length(pack).sum() for pack in others])
        return float(ratio.std() / ratio.mean())

    assert spread(fitted) < spread(table)
    assert np.mean([fitted.of_length(pack).sum() for pack in others]) == pytest.approx(executed.mean(), rel=0.1)


@pytest.mark.parametrize(
    ("timings", "match"),
    [
        ([], "at least two different shapes"),
        ([((1, 64), 0.1), ((1, 64), 0.2), ((2, 64), 0.3)], "hold each shape once"),
        ([((1, 64), -0.1)], "at least 0, got -0.0015"),
        ([((1, 64), 0.1), ((2, 64), float("nan"))], "must be positive and finite"),
    ],
)
def test_bad_timings(timings: list[Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        TableCost.from_timings(timings)


def test_bad_update_time() -> None:
    with pytest.raises(ValueError, match="update_seconds must be finite and at least 0, got -1"):
        TableCost.from_timings(TIMINGS, update_seconds=-1.0)


def test_a_file_gives_the_same_back(tmp_path: Path) -> None:
    table = CostTable(TableCost.from_timings(TIMINGS, update_seconds=0.03), {"device": "abacus"})
    write_cost_table(table, tmp_path / "table.json")
    assert read_cost_table(tmp_path / "table.json") == table
    assert read_cost_table(tmp_path / "table.json", feature="ids").cost.feature == "ids"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "can't be read"),
        ("[1", "can't be read"),
        ("[1]", "no cost table of format 1"),
        ('{"kind": "bcl-grain cost table", "format": 2}', "no cost table of format 1"),
        ('{"kind": "bcl-grain cost table", "format": 1}', r"damaged \(KeyError\('record_cost'\)\)"),
    ],
)
def test_a_bad_file(tmp_path: Path, content: str | None, match: str) -> None:
    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=match):
        read_cost_table(path)


def test_the_simulator_counts_in_measured_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = np.random.default_rng(0).integers(1, 65, 400)
    path = tmp_path / "table.json"
    write_cost_table(CostTable(TableCost.from_timings(TIMINGS), {}), path)
    np.save(tmp_path / "lengths.npy", lengths)
    options = ["--ranks=2", "--pack-size=8", "--lookahead=4", "--policies=windowed", f"--cost=table:{path}"]
    layout = ["--layout=row-packed:length=64,rows_per_chunk=4,heights=1", "--draws=order", "--quiet", "--json=-"]
    assert bcl_main(["simulate", str(tmp_path / "lengths.npy"), *options, *layout]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    # By hand: the planner with the records' costs, and then what each chunk was measured to take.
    cost = TableCost.from_timings(TIMINGS)
    run = simulate(
        PlannerConfig(pack_size=8, lookahead=4, policy="windowed", num_packs=25),
        np.stack([lengths[0::2], lengths[1::2]]),
        cost,
        RowPackedLayout(length=64, rows_per_chunk=4, heights=(1,)),
    )
    assert run.executed is not None
    assert result["executed_step_cost_mean"] == pytest.approx(run.executed.max(axis=0).mean())


def test_timing_and_prediction() -> None:
    assert Timing.of([1.0, 5.0, 2.0, 3.0, 4.0]) == Timing(seconds=3.0, spread=2 / 6, repeats=5)
    exact = Prediction((1.0, 2.0, 4.0), (1.0, 2.0, 4.0))
    assert (exact.r_squared, exact.median_error, exact.ratio) == (1, 0, 1)
    off = Prediction((1.1, 1.8, 4.0), (1.0, 2.0, 4.0))
    assert off.median_error == pytest.approx(0.1)
    assert off.r_squared == pytest.approx(1 - 0.05 / (14 / 3))
    assert off.ratio == pytest.approx(7 / 6.9)


def test_a_full_chunk_has_no_padding() -> None:
    chunk = full_chunk((2, 10), vocab_size=7, record_tokens=4)
    np.testing.assert_array_equal(chunk["tokens_segment_ids"][1], [1, 1, 1, 1, 2, 2, 2, 2, 3, 3])
    np.testing.assert_array_equal(chunk["tokens_positions"][0], [0, 1, 2, 3, 0, 1, 2, 3, 0, 1])
    assert chunk["tokens"].max() < 7
    assert (full_chunk((1, 5), vocab_size=3)["tokens_segment_ids"] == 1).all()


def test_calibration_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_corpus(tmp_path / "pairs.jsonl")
    config = write_config(tmp_path / "tiny.py", corpus)
    output = tmp_path / "new" / "table.json"
    arguments = [f"--config={config}", f"--output={output}", "--compile_cache=", "--repeats=2", "--steps=5"]
    assert command.main([*arguments, "--set=balance.pack_size=5"]) == command.EXIT_DONE
    said = capsys.readouterr().out
    cost, about = read_cost_table(output)
    assert dict(cost.chunk_seconds).keys() == {(1, 64), (2, 64)}
    assert cost.update_seconds > 0
    prediction = about["prediction"]
    assert prediction["steps"] == len(prediction["measured_seconds"]) == len(prediction["predicted_seconds"]) == 5
    assert f"against 5 whole steps: R^2 {prediction['r_squared']:.4f}" in said
    assert about["timings"]["2x64"]["repeats"] == 2

    # A run plans and counts with it; what it holds is a part of the run's identity, where it lies is not.
    flops = tiny_run(tmp_path)
    (tmp_path / "elsewhere.json").write_bytes(output.read_bytes())
    measured, moved = (
        prepare(_with_table(corpus, path), Topology(process_index=0, process_count=1, local_devices=1), lambda _: None)
        for path in (output, tmp_path / "elsewhere.json")
    )
    assert measured.lay_out.cost == cost
    pack = measured.lay_out(measured.train[:6])
    assert pack.executed_cost == sum(cost.of_chunk(*chunk["tokens"].shape) for chunk in pack.chunks)
    assert pack.cost == pytest.approx(sum(cost(record) for record in measured.train[:6]))
    assert fingerprint(measured.identity) == fingerprint(moved.identity) != fingerprint(flops.identity)


def _with_table(corpus: Path, table: Path, **model: Any) -> Any:
    config = tiny_config(corpus)
    return dataclasses.replace(
        config,
        balance=dataclasses.replace(config.balance, cost_table=str(table)),
        model=dataclasses.replace(config.model, **model),
    )


def test_a_table_of_another_model_or_layout_is_refused(tmp_path: Path) -> None:
    corpus, table = write_corpus(tmp_path / "pairs.jsonl"), tmp_path / "table.json"
    topology = Topology(process_index=0, process_count=1, local_devices=1)
    model = json.loads(json.dumps(dataclasses.asdict(tiny_run(tmp_path).model)))
    write_cost_table(CostTable(TableCost.from_timings(TIMINGS), {"model": model}), table)
    prepare(_with_table(corpus, table), topology, lambda _: None)
    with pytest.raises(ValueError, match="measured with a model of other dimensions: calibrate anew"):
        prepare(_with_table(corpus, table, hidden=9), topology, lambda _: None)
    write_cost_table(CostTable(TableCost.from_timings(TIMINGS[1:]), {"model": model}), table)
    with pytest.raises(ValueError, match=r"no time for chunks of shape \[\(1, 64\)\]: calibrate anew"):
        prepare(_with_table(corpus, table), topology, lambda _: None)


def test_bad_input_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([f"--config={tmp_path}/none.py"]) == command.EXIT_BAD_INPUT
    assert "there is no config file" in capsys.readouterr().err
