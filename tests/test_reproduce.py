from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import reproduce
from benchmarks.paper.common import Page, Setting, best_row_length, executed_by_row_length, make_job


def page(name: str) -> Page:
    return Page(name, f"({name}) Title", "Text of the page.", {"rows": [{"figure": float("nan")}]}, f"Summary {name}.")


def test_pages_come_with_their_data_and_an_index(tmp_path: Path) -> None:
    for name in ("b", "a"):
        reproduce.write_page(page(name), tmp_path, seconds=3.0, cpu_seconds=5.0)
    reproduce.write_index(tmp_path)
    assert (tmp_path / "a.md").read_text().startswith("# (a) Title\n\nText of the page.\n\nSimulated in 5 s")
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["rows"] == [{"figure": None}]
    assert document["provenance"].keys() >= {"commit", "command", "machine", "versions", "seconds"}
    index = (tmp_path / "README.md").read_text()
    assert index.index("[(a) Title](a.md): Summary a.") < index.index("[(b) Title](b.md): Summary b.")


def test_the_driver_runs_the_parts_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Setting] = []

    def make(setting: Setting) -> Page:
        asked.append(setting)
        return page("d")

    monkeypatch.setitem(reproduce.PARTS, "d", make)
    monkeypatch.setattr(sys, "argv", ["reproduce", "d", "--quick", "--output", str(tmp_path)])
    reproduce.main()
    assert [(s.directory, s.workers, s.scale) for s in asked] == [(tmp_path, 2, 8)]
    assert (tmp_path / "d.md").exists()
    monkeypatch.setattr(sys, "argv", ["reproduce", "z"])
    with pytest.raises(SystemExit):
        reproduce.main()


def test_the_best_row_length_is_that_of_the_least_cost() -> None:
    job = make_job("gsm8k_train", ranks=2, steps=8, pack_size=8)
    executed = executed_by_row_length("windowed", job, [640, 768, 4096], lookahead=4)
    assert {length: cost.shape for length, cost in executed.items()} == dict.fromkeys((640, 768, 4096), (8,))
    assert best_row_length(executed) == min(executed, key=lambda length: executed[length].sum())
    # Four steps of a trial with 2 ranks stand for one of a job with 8.
    eight = {length: cost.reshape(2, 4).max(axis=1).sum() for length, cost in executed.items()}
    assert best_row_length(executed, trials_per_step=4) == min(eight, key=eight.__getitem__)
