"""The benchmark of slow ranks: arms hold the same records, predictions are the simulator's, and all of it runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bcl_grain.cost_table import TableCost
from bcl_grain.layouts import RowPackedLayout
from bcl_grain.mffd import pooled_mffd
from bcl_grain.planner import PlannerConfig
from bcl_grain.simulate import simulate
from benchmarks import straggler
from benchmarks.straggler_arms import ARMS, SPMD, Block, Plan, Work, check_same_records, chunk_counts, make_plan
from benchmarks.straggler_rank import make_chunks

LENGTHS = np.random.default_rng(0).integers(2, 65, (2, 8 * 12))
LAYOUT = RowPackedLayout(length=64, rows_per_chunk=2, heights=(1,), lengths=(24, 48), chunk_overhead_rows=0.2)
TIMINGS = (((1, 24), 0.04), ((1, 48), 0.08), ((1, 64), 0.1), ((2, 64), 0.15))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(LENGTHS, LAYOUT, pack_size=8, lookahead=4, seed=3)


def test_arms_hold_the_same_records_in_as_many_steps(plan: Plan) -> None:
    assert tuple(plan.arms) == ARMS
    for schedule in plan.arms.values():
        assert [len(works) for works in schedule] == [12, 12]
        for work in (work for works in schedule for work in works):
            for block in work.blocks:
                assert sum(block.heights) >= len(block.rows)
                assert all(sum(work.sizes[i] for i in row) <= block.length for row in block.rows)
    assert all(work.shapes == [plan.spmd_shape] for works in plan.arms[SPMD] for work in works)
    assert any((1, 24) in work.shapes for works in plan.arms["mffd"] for work in works)
    with pytest.raises(ValueError, match="arm 'b' does not hold every record once"):
        check_same_records({"a": plan.arms["arrival"], "b": _without_a_record(plan.arms["arrival"])}, LENGTHS)
    short = [plan.arms["arrival"][0], plan.arms["arrival"][1][:-1]]
    with pytest.raises(ValueError, match=r"arm 'b' has \[12, 11\] steps by rank, not 12"):
        check_same_records({"a": plan.arms["arrival"], "b": short}, LENGTHS)


def _without_a_record(schedule: list[list[Work]]) -> list[list[Work]]:
    work = schedule[0][0]
    first, *others = work.blocks
    block = first._replace(rows=[*first.rows[:-1], first.rows[-1][1:]])
    return [[work._replace(blocks=[block, *others]), *schedule[0][1:]], *schedule[1:]]


def test_predictions_are_the_simulators(plan: Plan) -> None:
    # Records cost their tokens, so that the plans are the same to the last tie.
    timings = (*TIMINGS, (plan.spmd_shape, 0.5))
    cost = TableCost(per_token=1.0, chunk_seconds=timings, update_seconds=0.03)
    for policy, order in (("arrival", "aligned"), ("windowed", "shuffled"), ("streaming", "aligned")):
        config = PlannerConfig(pack_size=8, lookahead=4, policy=policy, order=order, num_packs=12, seed=3)  # type: ignore[arg-type]
        run = simulate(config, LENGTHS, cost, LAYOUT)
        assert run.executed is not None
        np.testing.assert_allclose(straggler.predict_steps(plan, policy, cost), run.executed.max(axis=0) + 0.03)
    np.testing.assert_allclose(straggler.predict_steps(plan, SPMD, cost), 0.53)


def test_pooled_bins_are_rows(plan: Plan) -> None:
    batch = np.concatenate([LENGTHS[0, :8], LENGTHS[1, :8]])
    for rank, bins in enumerate(pooled_mffd(batch, 64, 2)):
        work = plan.arms["mffd"][rank][0]
        placed = [[work.sizes[i] for i in row] for block in work.blocks for row in block.rows]
        assert sorted(placed) == sorted(batch[members].tolist() for members in bins)


def test_chunks_hold_the_records_as_the_work_says() -> None:
    work = Work([5, 3, 4], [Block(8, [2], [[1, 0]]), Block(4, [1], [[2]])])
    first, second = make_chunks(work, 11, seed=0)
    np.testing.assert_array_equal(first["tokens_segment_ids"], [[1, 1, 1, 2, 2, 2, 2, 2], [0] * 8])
    np.testing.assert_array_equal(second["tokens_segment_ids"], [[1, 1, 1, 1]])
    assert first["loss_mask"].sum() == 8
    assert chunk_counts([[work]], [(1, 8), (2, 8), (1, 4)]).tolist() == [[[0, 1, 1]]]


def test_measured_times_are_medians_over_rounds() -> None:
    def run(begin: float, local: float, end: float) -> dict[str, Any]:
        times = {"begin": [begin], "local": [local], "end": [end], "busy": [local - begin]}
        return {"kind": "blocked", "corpus": "c", "arm": "a", **times}

    results = [
        {"runs": [run(0.0, 1.0, 5.0), run(10.0, 12.0, 14.0), run(20.0, 20.5, 29.0)]},
        {"runs": [run(0.5, 4.0, 5.5), run(10.0, 13.0, 14.5), run(20.0, 22.0, 28.0)]},
    ]
    measured = straggler.measure_steps(results, "c", "a")
    assert measured.seconds.tolist() == [5.5]  # of 5.5, 4.5 and 9
    assert measured.waited.tolist() == [[1.5], [0.0]]  # of 3, 1 and 1.5
    assert measured.busy.tolist() == [3.0]  # medians 1 and 3: the busiest rank's


@pytest.mark.parametrize("real", [True, False])
def test_lengths_fill_a_row_at_most(real: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if real and not straggler.LENGTHS.is_dir():
        pytest.skip(f"no lengths at {straggler.LENGTHS}")
    if not real:
        monkeypatch.setattr(straggler, "LENGTHS", Path("nowhere"))
    setup = straggler.Setup()
    for corpus in setup.corpora:
        lengths = straggler.draw_lengths(corpus, setup)
        assert lengths.shape == (2, 8 * 32)
        assert lengths.min() >= 2
        assert lengths.max() == 512


def test_the_benchmark_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # it compiles the longest
    straggler.main(["--quick", "--steps", "3", "--output", str(tmp_path)])
    assert "streaming's gain less 3%" in capsys.readouterr().out
    document = json.loads((tmp_path / "straggler.json").read_text())
    assert (tmp_path / "straggler.png").exists()
    assert document["compiled_after_warm_up"] == [0, 0]
    (summary,) = document["corpora"].values()
    lengths = straggler.draw_lengths("medquad", dataclasses.replace(straggler.QUICK, steps=3))
    assert summary["loss_tokens"] == lengths.sum() - lengths.size  # the first token of a record is not predicted
    assert summary["records"] == lengths.size
    for arm in ARMS:
        figures = summary["arms"][arm]
        assert len(figures["measured_steps"]) == len(figures["predicted_steps"]) == 3
        assert figures["measured_step_seconds"] > 0 < figures["free_step_seconds"]


def test_a_rank_that_fails_is_told(tmp_path: Path) -> None:
    setup = dataclasses.replace(straggler.QUICK, model={"vocab_size": -1}, timeout_seconds=60.0)
    lengths = straggler.draw_lengths("medquad", setup)
    plan = make_plan(lengths, setup.layout, pack_size=4, lookahead=3)
    with pytest.raises(RuntimeError, match=r"(?s)ranks \[.*failed.*vocab_size must be at least 1"):
        straggler.run_ranks(setup, {"medquad": plan})
