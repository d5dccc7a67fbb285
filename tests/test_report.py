from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bcl_grain import plots, report
from bcl_grain.boundary import CapEffect, cap_effect, memory_boundary
from bcl_grain.costs import TransformerCost, token_cost
from bcl_grain.inputs import read_lengths
from bcl_grain.length_profile import LengthProfile, profile_lengths, verdict
from bcl_grain.memory import MemoryModel
from bcl_grain.models import KNOWN_MODELS
from bcl_grain.simulate import StreamRun
from bcl_grain.tally import Tally

JOB = {"ranks": 4, "pack_size": 16, "lookahead": 8}


def run_of(estimated: list[list[float]], executed: list[list[float]] | None = None) -> StreamRun:
    return StreamRun(
        estimated=np.array(estimated),
        executed=None if executed is None else np.array(executed),
        useful_tokens=6,
        executed_tokens=None if executed is None else 8,
        records=4,
        max_wait_cycles=2,
        planning_seconds=8e-6,
    )


ARRIVAL = Tally.of(run_of([[1.0, 3.0], [3.0, 1.0]], [[2.0, 4.0], [4.0, 2.0]]), 0, 2)
BALANCED = Tally.of(run_of([[2.0, 2.0], [2.0, 2.0]], [[3.0, 2.0], [2.0, 3.0]]), 0, 2)


def test_a_result_holds_exactly_the_documented_figures() -> None:
    result = report.arm_result("windowed", BALANCED, ARRIVAL, order="aligned", records_in=4, records_capped=1)
    assert tuple(result) == report.RESULT_KEYS
    assert result == {
        "policy": "windowed",
        "order": "aligned",
        "cost_cv": 0.0,
        "cost_cv_reduction": 1.0,
        "sync_waste": 0.0,
        "total_waste": 0.5,
        "step_cost_mean": 2.0,
        "executed_step_cost_mean": 3.0,
        "speedup_vs_arrival": 4.0 / 3.0,
        "padding_fraction": 0.25,
        "bins_per_rank": None,
        "max_wait_cycles": 2,
        "records_in": 4,
        "records_out": 4,
        "records_capped": 1,
        "planning_us_per_record": 2.0,
    }


def test_speed_up_takes_estimates_where_one_arm_was_not_laid_out() -> None:
    bare = Tally.of(run_of([[2.0, 2.0], [2.0, 2.0]]), 0, 2)
    assert report.speedup(ARRIVAL.arm(), bare.arm()) == 1.5


def test_tallies_add_up_whatever_the_order() -> None:
    runs = [run_of([[1.0, 5.0]], [[2.0, 5.0]]), run_of([[4.0, 2.0]], [[4.0, 3.0]])]
    for order in (runs, runs[::-1]):
        tally = Tally.of(order[0], 0, 2)
        tally.add(Tally.of(order[1], 0, 2))
        assert tally.step_max.tolist() == [4.0, 5.0]
        assert tally.ideal == 3.0
        assert tally.arm().sync_waste == pytest.approx(0.5)
        assert tally.arm().total_waste == pytest.approx(0.5)
        assert (tally.records, tally.useful_tokens, tally.executed_tokens) == (8, 12, 16)
    with pytest.raises(ValueError, match="ranks differ in steps: 2 and 1"):
        Tally.of(runs[0], 0, 2).add(Tally.of(run_of([[1.0]]), 0, 1))


def test_json_has_null_for_what_is_absent_and_plain_numbers(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    report.write_json({"a": np.float64(1.5), "b": float("inf"), "c": (None, np.int64(3), [np.bool_(True)])}, str(path))
    assert json.loads(path.read_text()) == {"a": 1.5, "b": None, "c": [None, 3, [True]]}


def test_the_table_leaves_out_columns_without_figures() -> None:
    result = report.arm_result("kk", ARRIVAL, ARRIVAL, order=None, records_in=4, records_capped=0)
    head, row = report.results_table([{**result, "max_wait_cycles": None}]).splitlines()
    assert "sync waste" in head
    assert "bins/rank" not in head
    assert "max wait" not in head
    assert len(row) <= len(head)


def test_a_cap_s_effect_is_counted_by_hand() -> None:
    effect = cap_effect(np.array([1, 2, 3, 10]), TransformerCost(1.0, 1.0), "p75", 3)
    cost = 2 + 6 + 12 + 110
    assert effect == CapEffect(
        name="p75",
        cap=3,
        records=0.25,
        tokens_truncated=7 / 16,
        tokens_dropped=10 / 16,
        cost_truncated=(110 - 12) / cost,
        cost_dropped=110 / cost,
    )


@pytest.fixture(scope="module")
def profile() -> LengthProfile:
    return profile_lengths(read_lengths("medquad"), token_cost(), **JOB)


def test_a_profile_says_where_the_cost_is(profile: LengthProfile) -> None:
    values = read_lengths("medquad").values
    assert sum(profile.histogram_records) == profile.records == values.size
    assert sum(profile.histogram_cost) == pytest.approx(1.0)
    assert profile.top_cost_share == pytest.approx(
        np.sort(values)[-values.size // 100 + 1 :].sum() / values.sum(), abs=1e-3
    )
    assert profile.clumping is None
    assert profile.windowed_waste < 0.5 * profile.arrival_waste


def make_profile(profile: LengthProfile, **changes: Any) -> list[str]:
    return verdict(LengthProfile(**{**vars(profile), **changes}), **JOB)


def test_the_verdict_follows_the_figures(profile: LengthProfile) -> None:
    assert "uneven" in make_profile(profile)[0].lower()
    even = make_profile(profile, arrival_waste=0.01, windowed_waste=0.0, outlier_packs=0.1)
    assert even[0].startswith("Even: with packs of 16")
    assert even[1:] == ["There is little to gain from balancing."]
    (outlier,) = (s for s in make_profile(profile, outlier_packs=2.5) if "dearest record" in s)
    assert "2.5 mean packs" in outlier
    (sorted_file,) = (s for s in make_profile(profile, clumping=9.0) if "Shuffle" in s)
    assert "9.0 times" in sorted_file
    few = make_profile(profile, clumping=3.1, records=64)
    assert not any("Shuffle" in sentence for sentence in few)  # 4 packs can differ as much by chance


def test_a_sorted_file_is_noticed_and_a_shuffled_one_is_not(tmp_path: Path) -> None:
    values = np.random.default_rng(0).lognormal(4, 1, 4096).astype(np.int64) + 1
    clumping = []
    for order in (values, np.sort(values)):
        np.save(tmp_path / "a.npy", order)
        clumping.append(profile_lengths(read_lengths(str(tmp_path / "a.npy")), token_cost(), **JOB).clumping)
    assert clumping[0] == pytest.approx(1.0, abs=0.35)
    assert clumping[1] is not None
    assert clumping[1] > 10


def test_plots_are_files_that_say_what_they_show(tmp_path: Path, profile: LengthProfile) -> None:
    pytest.importorskip("matplotlib")
    lengths = read_lengths("medquad").values
    memory = MemoryModel(dims=KNOWN_MODELS["smollm2-135m"])
    boundary = memory_boundary(
        lengths, token_cost(), memory, budget_gib=8, pack_sizes=(1, 8), num_packs=32, lookahead=8
    )
    drawn = [
        plots.draw_simulation(str(tmp_path / "new"), {"arrival": ARRIVAL, "windowed": BALANCED}, title="two"),
        plots.draw_profile(str(tmp_path), profile, unit="tokens", title="medquad"),
        plots.draw_boundary(str(tmp_path), boundary, budget_gib=8, usable_gib=7.2, title="medquad"),
    ]
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000


def test_without_matplotlib_a_plot_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ModuleNotFoundError, match=r"plots need matplotlib: pip install 'bcl-grain\[plot\]'"):
        plots.draw_simulation(str(tmp_path), {"arrival": ARRIVAL}, title="")


def test_the_boundary_shrinks_with_the_pack_and_grows_with_the_cap() -> None:
    lengths = read_lengths("medquad").values
    memory = MemoryModel(dims=KNOWN_MODELS["smollm2-135m"])
    boundary = memory_boundary(
        lengths,
        token_cost(),
        memory,
        budget_gib=4,
        pack_sizes=(1, 4, 16, 64),
        percentiles=(99.0,),
        num_packs=64,
        lookahead=8,
    )
    by_place = {(c.cap, c.pack_size, c.layout): c for c in boundary.cells}
    assert len(by_place) == 2 * 4 * 4
    for cell in boundary.cells:
        assert cell.fits == memory.fits(cell.rows, cell.length, 4)
    for cap in ("none", "p99"):
        longest = {e.name: e.cap for e in boundary.caps}[cap]
        padded = by_place[cap, 64, "padded"]
        assert (padded.rows, padded.length) == (64, -(-longest // 128) * 128)
        arrival, windowed = (by_place[cap, 64, f"one-shape {p}"].rows for p in ("arrival", "windowed"))
        mean = 64 * np.minimum(lengths, longest).mean() / padded.length
        assert mean < windowed <= arrival < 64
        assert by_place[cap, 64, "chunks"].rows == 1
    assert (boundary.largest_pack("none", "padded") or 0) < (boundary.largest_pack("p99", "padded") or 0)
