"""The benchmark for accelerators, in its toy size on a CPU: nothing in it may surprise on the first GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.attention_paths import Case
from benchmarks.gpu import _limited, _recorded

ROOT = Path(__file__).parents[1]
WITHOUT_GRAIN = "import sys; sys.modules['grain'] = None; from benchmarks.gpu import main; main(sys.argv[1:])"


def test_it_runs_without_grain(tmp_path: Path) -> None:
    """In a process of its own: it sets the compile cache, which is a setting of the whole process."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, "-W", "error", "-c", WITHOUT_GRAIN, "--toy", f"--output={tmp_path}", "--name=toy"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    document = json.loads((tmp_path / "toy.json").read_text())
    sections = document["sections"]
    assert list(sections) == ["attention", "ladder", "cached", "tables", "lowering"]
    assert [name for name, section in sections.items() if "error" in section] == []
    _check_attention(sections["attention"])
    ladder = sections["ladder"]
    assert ladder["chunks"].keys() == {"1x128", "2x128"}
    assert all(chunk["tokens_per_second"] > 0 for chunk in ladder["chunks"].values())
    assert ladder["prediction"]["steps"] == 3
    cold, cached = ladder["compile_cold"], sections["cached"]["compile_cached"]
    assert (cold["cache_hits"], cached["cache_hits"]) == (0, cold["programs"])
    (table,) = (value for name, value in sections["tables"].items() if name.endswith("ranks"))
    assert table["arrival"]["speedup"] == 1
    assert sections["lowering"]["accumulate"]["text_bytes"] > 10_000


def _check_attention(section: dict[str, Any]) -> None:
    cases = {name: paths for name, paths in section.items() if "x" in name}
    assert len(cases) == 2
    for name, paths in cases.items():
        for path in ("masked", "blockwise", "pallas"):
            assert paths[path]["finite"]
            assert max(paths[path]["forward_error"], *paths[path]["gradient_errors"]) < 1e-5
            assert paths[path].get("segment_leak", 0) == 0
        assert ("segment_leak" in paths["masked"]) == name.startswith("packed")
        assert "needs a GPU" in paths["cudnn-masked"]["error"]
        assert ("cudnn" in paths) == name.startswith("one record")
        assert paths["fastest"] in paths


@pytest.mark.parametrize("one_record", [True, False])
def test_cases_have_padding_everywhere(one_record: bool) -> None:
    case = Case(rows=4, length=64, heads=2, kv_heads=1, head_dim=8, one_record_rows=one_record)
    ids = case.segment_ids
    assert (ids[:, -1] == 0).all()
    assert (ids[3] == 0).all()
    assert [len(set(row[row > 0])) for row in ids[:3]] == [1 if one_record else 4] * 3
    assert len({int((row > 0).sum()) for row in ids}) == 4
    weights = np.asarray(case.inputs(np.float32)[3])
    assert ((weights == 0).all(axis=(2, 3)) == (ids == 0)).all()


def test_a_section_that_takes_too_long_is_cut_and_others_follow() -> None:
    figures: dict[str, Any] = {}
    with pytest.raises(TimeoutError), _recorded(figures, "slow"), _limited(0.05):
        time.sleep(10)
    assert figures["slow"]["error"] == "the section's time was over"
    with _recorded(figures, "bad") as part:
        part["so far"] = 1
        raise ZeroDivisionError("0 / 0")
    assert figures["bad"]["so far"] == 1
    assert figures["bad"]["error"] == "ZeroDivisionError: 0 / 0"
