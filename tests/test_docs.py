"""The commands in the documentation: they are taken as they stand, and what they print is what stands below them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from bcl_grain.cli import build_parser, main
from train.overrides import load_config, override

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "configs").glob("*.py"))]
TIMED = "us/record"  # the last column of a table: it differs from run to run


def settings() -> Iterator[tuple[str, list[str]]]:
    """The config and the assignments of every command that names a config of ours."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for config, rest in re.findall(r"train\.\w+ [^`\n]*--config=(configs/\w+\.py)([^`\n]*)", text):
            if (ROOT / config).exists():
                words = shlex.split(rest, comments=True)
                yield config, [word.removeprefix("--set=") for word in words if word.startswith("--set=")]


def test_every_setting_of_a_documented_command_is_one() -> None:
    found = list(settings())
    assert sum(bool(assignments) for _, assignments in found) >= 2
    for config, assignments in found:
        override(load_config(ROOT / config), assignments)


def test_a_setting_that_is_none_would_be_found() -> None:
    with pytest.raises(ValueError, match="FitRows has no field 'rows_per_chunk'"):
        override(load_config(ROOT / "configs" / "default.py"), ["layout.rows_per_chunk=4"])


def printed(command: str) -> tuple[list[str], list[str]]:
    """A command of docs/cli.md as words, and the words that it prints there."""
    blocks = re.findall(r"```\n\$ bcl-grain (.*)\n((?:.*\n)*?)```", (ROOT / "docs" / "cli.md").read_text())
    (block,) = [(line, output) for line, output in blocks if line.startswith(command)]
    return shlex.split(block[0]), words(block[1])


def words(output: str) -> list[str]:
    timed = TIMED in output
    lines = (line.split() for line in output.splitlines())
    return [word for line in lines for word in (line[:-1] if timed and line and line[-1][-1].isdigit() else line)]


def number(word: str) -> float | None:
    try:
        return float(word.replace(",", "").rstrip(".:"))
    except ValueError:
        return None


@pytest.mark.parametrize("command", ["profile", "simulate", "boundary"])
def test_a_command_prints_what_its_page_shows(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv, shown = printed(command)
    assert main([*argv, "--quiet"]) == 0
    now = words(capsys.readouterr().out)
    assert [word for word in now if number(word) is None] == [word for word in shown if number(word) is None]
    assert [number(word) for word in now if number(word) is not None] == pytest.approx(
        [number(word) for word in shown if number(word) is not None], rel=0.02, abs=0.011
    )


def test_the_page_of_the_command_line_has_every_command() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    shown = re.findall(r"^\$ bcl-grain (\w+)", page, re.MULTILINE)
    assert shown == re.findall(r"^## (profile|simulate|plan|boundary)$", page, re.MULTILINE)
    assert set(re.findall(r"^ {4}(\w+) DATA", build_parser().description or "", re.MULTILINE)) == set(shown)
