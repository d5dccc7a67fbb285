"""A run's directory: whose it is, and who may go on in it.

It belongs to one run: the run's identity is written into it before anything else, and compared with the one of whoever
wants to go on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bcl_grain.json_files import read_json
from bcl_grain.planner_config import OnChangedSettings
from train.config import CHANGEABLE

IDENTITY_FILE = "run.json"
VISIBLE_SECONDS = 60.0
"""How long a file may take to be seen on other machines: some file systems remember for so long what was not there."""


def check_run_dir(
    run_dir: Path, identity: Mapping[str, Any], *, resume: bool, on_changed_balance: OnChangedSettings = "error"
) -> None:
    """Makes sure that a run directory is new, or with `resume` that it belongs to the run that wants to go on.

    Args:
        run_dir: The directory.
        identity: What the run's result depends on, JSON-safe.
        resume: Whether the run goes on with what is there.
        on_changed_balance: See `RuntimeConfig`.

    Raises:
        ValueError: If the directory is not empty and `resume` is false, or if `resume` is true and the directory
            is not a run's, or another run's: the message shows each difference with both values.
    """
    if not resume:
        if began(run_dir):
            raise ValueError(
                f"{str(run_dir)!r} is not empty: pass --resume to go on with the run in it, or another --run_dir"
            )
        if not _is_free(run_dir):
            raise ValueError(f"{str(run_dir)!r} is not empty, and no run's: give another --run_dir")
        return
    differences = find_differences(saved_identity(run_dir), json.loads(json.dumps(identity)))
    changeable = {f"config.balance.{name}" for name in CHANGEABLE}
    hint = ""
    if on_changed_balance == "finish_pool":
        differences = [difference for difference in differences if difference[0] not in changeable]
    elif differences and {name for name, _, _ in differences} <= changeable:
        hint = "; or change it from here on: --set=runtime.on_changed_balance=finish_pool"
    if differences:
        raise ValueError(
            f"{str(run_dir)!r} belongs to another run: "
            + "; ".join(f"{name} was {then}, now {now}" for name, then, now in differences)
            + ". Resume with the settings it was started with, or start a new run in another --run_dir"
            + hint
        )


def began(run_dir: Path) -> bool:
    """Returns whether a directory is a run's, be it that nothing came of it."""
    return (run_dir / IDENTITY_FILE).exists()


def _is_free(run_dir: Path) -> bool:
    """Returns whether a new run may have a directory: what a claim that failed has left does not count."""
    if not run_dir.exists():
        return True
    return run_dir.is_dir() and all(path == _claim_file(run_dir) for path in run_dir.iterdir())


def _claim_file(run_dir: Path) -> Path:
    return (run_dir / IDENTITY_FILE).with_suffix(".tmp")


def saved_identity(run_dir: Path) -> dict[str, Any]:
    """Returns the identity of the run in a directory.

    Raises:
        ValueError: If there is none.
    """
    try:
        saved = read_json(run_dir / IDENTITY_FILE)
        if not isinstance(saved, dict):
            raise ValueError(f"expected an object, got {type(saved).__name__}")
    except (OSError, ValueError) as error:
        remedy = "start one without --resume" if _is_free(run_dir) else "start one in another --run_dir"
        raise ValueError(
            f"there is no run to resume in {str(run_dir)!r} ({IDENTITY_FILE}: {error}): {remedy}"
        ) from error
    return saved


def claim_run_dir(run_dir: Path, identity: Mapping[str, Any]) -> None:
    """Writes the run's identity into its directory, in whole or not at all; makes the directory if need be."""
    run_dir.mkdir(parents=True, exist_ok=True)
    temporary = _claim_file(run_dir)
    temporary.write_text(json.dumps(identity, indent=2) + "\n")
    os.replace(temporary, run_dir / IDENTITY_FILE)


def wait_until_seen(run_dir: Path, identity: Mapping[str, Any]) -> None:
    """Returns once the identity that another process has written into the run's directory is seen.

    Raises:
        ValueError: If it is not within `VISIBLE_SECONDS`.
    """
    latest = time.monotonic() + VISIBLE_SECONDS
    while True:
        try:
            if saved_identity(run_dir) == identity:
                return
        except ValueError:
            pass
        if time.monotonic() > latest:
            raise ValueError(
                f"the run that process 0 has begun is not seen in {str(run_dir.absolute())!r}: give a --run_dir on a "
                "file system that all processes share, at the same path"
            )
        time.sleep(0.1)


def find_differences(then: object, now: object, name: str = "") -> list[tuple[str, str, str]]:
    """Returns (dotted name, then, now) for each leaf in which two JSON values differ.

    >>> find_differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3, "d": 4}})
    [('b.c', '2', '3'), ('b.d', 'absent', '4')]
    """
    if isinstance(then, dict) and isinstance(now, dict):
        names = [*then, *(key for key in now if key not in then)]
        return [
            difference
            for key in names
            for difference in find_differences(
                then.get(key, _ABSENT), now.get(key, _ABSENT), f"{name}.{key}" if name else key
            )
        ]
    return [] if then == now else [(name, _shown(then), _shown(now))]


_ABSENT = object()


def _shown(value: object) -> str:
    return "absent" if value is _ABSENT else json.dumps(value)
