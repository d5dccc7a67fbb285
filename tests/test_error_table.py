"""The table of error messages in docs/finetuning.md: each of them stands in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GAP = "\0"


def rows() -> list[str]:
    """The table's messages."""
    page = (ROOT / "docs" / "finetuning.md").read_text()
    table = page.partition("## What errors mean")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def texts() -> list[str]:
    """All texts that the trainer may write, with a gap where a value goes."""
    found = []
    for file in sorted((ROOT / "train").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else GAP for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def stands_in(message: str, text: str) -> bool:
    """Whether the fixed parts of a message come in a text, in this order, each "…" being a value."""
    parts = map(re.escape, message.split("…"))
    return re.search(GAP.join(parts).strip(GAP), text) is not None


@pytest.fixture(scope="module")
def written() -> list[str]:
    return texts()


def test_every_message_of_the_table_stands_in_the_code(written: list[str]) -> None:
    assert len(rows()) > 25
    assert [message for message in rows() if not any(stands_in(message, text) for text in written)] == []


def test_a_message_that_is_not_there_is_found(written: list[str]) -> None:
    assert stands_in("the loss of step … is …: lower", f"the loss of step {GAP} is {GAP}: lower")
    assert not any(stands_in("the loss of step … was …: lower", text) for text in written)
    assert not any(stands_in("… is not a model: take a Hugging Face directory", text) for text in written)
