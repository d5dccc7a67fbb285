"""A run's directory belongs to one run, and says so to whoever wants it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import train.loop
import train.run_directory
import train.step
from train.run_directory import check_run_dir, claim_run_dir, find_differences, wait_until_seen


def test_a_directory_is_new_or_belongs_to_the_run(tmp_path: Path) -> None:
    identity = {"config": {"seed": 1, "layout": {"heights": (1, 2)}}}
    run_dir = tmp_path / "run"
    check_run_dir(run_dir, identity, resume=False)
    with pytest.raises(ValueError, match="no run to resume"):
        check_run_dir(run_dir, identity, resume=True)
    run_dir.mkdir()
    (run_dir / "run.tmp").write_text("")  # of a claim that found the disk full
    check_run_dir(run_dir, identity, resume=False)
    with pytest.raises(ValueError, match=r"no run to resume .*: start one without --resume$"):
        check_run_dir(run_dir, identity, resume=True)
    (run_dir / "of mine").write_text("")
    with pytest.raises(ValueError, match=r"is not empty, and no run's: give another --run_dir"):
        check_run_dir(run_dir, identity, resume=False)
    with pytest.raises(ValueError, match=r"no run to resume .*: start one in another --run_dir$"):
        check_run_dir(run_dir, identity, resume=True)
    claim_run_dir(run_dir, identity)
    check_run_dir(run_dir, identity, resume=True)
    with pytest.raises(ValueError, match="is not empty: pass --resume"):
        check_run_dir(run_dir, identity, resume=False)
    with pytest.raises(ValueError, match=r"belongs to another run: config.seed was 1, now 2\. Resume with"):
        check_run_dir(run_dir, {"config": {**identity["config"], "seed": 2}}, resume=True)
    (run_dir / "run.json").write_text("{")
    with pytest.raises(ValueError, match="no run to resume"):
        check_run_dir(run_dir, identity, resume=True)


def test_a_directory_that_another_process_has_claimed_is_seen_or_told_of(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(train.run_directory, "VISIBLE_SECONDS", 0.3)
    claim_run_dir(tmp_path / "shared", {"seed": 1})
    wait_until_seen(tmp_path / "shared", {"seed": 1})
    for name, seed in (("shared", 2), ("elsewhere", 1)):
        with pytest.raises(ValueError, match=rf"is not seen in '{tmp_path / name}': give a --run_dir on a file system"):
            wait_until_seen(tmp_path / name, {"seed": seed})
    claiming = threading.Timer(0.1, claim_run_dir, (tmp_path / "late", {"seed": 1}))
    claiming.start()
    wait_until_seen(tmp_path / "late", {"seed": 1})
    claiming.join()


def test_differences_are_found_at_any_depth() -> None:
    assert find_differences({"a": [1, 2], "b": {"c": None}}, {"a": [1, 3], "b": {"c": 0}}) == [
        ("a", "[1, 2]", "[1, 3]"),
        ("b.c", "null", "0"),
    ]
    assert find_differences({"a": 1}, {}) == [("a", "1", "absent")]
