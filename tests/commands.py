"""Runs of the command line inside this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bcl_grain.cli import main

SMALL = ["--ranks", "4", "--pack-size", "8", "--lookahead", "4"]


MEMORY = ["--model", "smollm2-135m", "--memory-gib", "8"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    assert main(argv) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    out, _ = run(capsys, *argv, "--json", "-")
    return json.loads(out)


def write_lengths(directory: Path) -> str:
    """Writes 2,000 lengths whose longest is 400; returns the file."""
    lengths = np.minimum(np.random.default_rng(1).lognormal(4.2, 0.9, 2000).astype(int) + 1, 400)
    np.savez(directory / "lengths.npz", len=lengths)
    return str(directory / "lengths.npz")


def refuse(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Runs what is refused; returns what is said of it."""
    try:
        code = main(argv)
    except SystemExit as exit_:  # argparse's own
        code = exit_.code  # type: ignore[assignment]
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    return captured.err
