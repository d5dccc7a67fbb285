"""Tokens are made once, by one process, in whole; kept ones are used while all that they depend on is the same."""

from __future__ import annotations

import ast
import concurrent.futures
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import train.token_files
from tests.chat_formats import CHATML_MARKED, CHATML_TOOLS, chat_format, learned
from train.chat_data import Block, RowReader
from train.conversations import Columns
from train.jsonl import FileChangedError
from train.sources import Source, open_source
from train.token_files import ABOUT_FILE, ENTRIES_FILE, FRACTIONS_FILE, TOKENS_FILE, SourceTokens, source_tokens
from train.tokenizing import read_blocks

READER = RowReader(chat_format=chat_format(CHATML_TOOLS))


@pytest.fixture
def data(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "data.jsonl"
    rows = [json.dumps({"prompt": f"question {i}", "response": "hello " * (1 + i % 7)}) for i in range(150)]
    rows[70] = "{"
    path.write_text("\n".join(rows))
    return path


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets an entry for each pass over a source."""
    made: list[str] = []

    def counted(*arguments: Any, **named: Any) -> Iterator[Block]:
        made.append("")
        return read_blocks(*arguments, **named)

    monkeypatch.setattr(train.token_files, "read_blocks", counted)
    return made


def tokens(data: pathlib.Path, cache: pathlib.Path | None, reader: RowReader = READER) -> SourceTokens:
    return source_tokens(str(data), reader, cache=cache, workers=1, say=lambda _: None)


def assert_same(found: SourceTokens, expected: SourceTokens) -> None:
    assert found.table.checksum == expected.table.checksum
    assert found.fractions.tolist() == expected.fractions.tolist()
    assert found.check == expected.check
    for one, other in zip(found.table, expected.table, strict=True):
        assert one["tokens"].tolist() == other["tokens"].tolist()
        assert one["loss_mask"].tolist() == other["loss_mask"].tolist()


def test_kept_tokens_are_those_that_were_made(data: pathlib.Path, tmp_path: pathlib.Path, passes: list[str]) -> None:
    made = tokens(data, tmp_path / "cache")
    assert made.check.num_broken == 1
    assert made.check.problems[0].place.endswith("line 71")
    assert [learned(READER.chat_format, record) for record in made.table][:2] == [
        ["hello <|im_end|>"],
        ["hello hello <|im_end|>"],
    ]
    kept = tokens(data, tmp_path / "cache")
    assert len(passes) == 1
    assert_same(kept, made)
    assert_same(tokens(data, None), made)
    assert len(passes) == 2


def test_nothing_is_left_where_nothing_is_kept(
    data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    found = tokens(data, None)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert len(found.table[148]["tokens"]) == found.table.sizes[148], "what was mapped can still be read"


@pytest.mark.parametrize(
    "reader",
    [
        dataclasses.replace(READER, train_on="all"),
        dataclasses.replace(READER, by_answer=True),
        dataclasses.replace(READER, columns=Columns(system="prompt", prompt="response")),
        dataclasses.replace(READER, tool_format="text"),
        dataclasses.replace(READER, chat_format=chat_format(CHATML_MARKED)),
        *(
            dataclasses.replace(READER, chat_format=dataclasses.replace(READER.chat_format, template=template))
            for template in (
                dataclasses.replace(READER.chat_format.template, variables={"bos_token": "<s>"}),
                dataclasses.replace(READER.chat_format.template, date=datetime.datetime(2020, 1, 1)),
            )
        ),
    ],
)
def test_other_settings_are_other_tokens(
    reader: RowReader, data: pathlib.Path, tmp_path: pathlib.Path, passes: list[str]
) -> None:
    tokens(data, tmp_path / "cache")
    assert_same(tokens(data, tmp_path / "cache", reader), tokens(data, None, reader))
    assert len(passes) == 3


def test_another_version_of_a_library_is_other_tokens(
    data: pathlib.Path, tmp_path: pathlib.Path, passes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {name: importlib.metadata.version(name) for name in train.token_files._LIBRARIES}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    for count, name in enumerate(("", *versions)):
        versions[name] = "another"
        tokens(data, tmp_path / "cache")
        assert len(passes) == count + 1


def test_a_changed_file_is_read_again(data: pathlib.Path, tmp_path: pathlib.Path, passes: list[str]) -> None:
    before = tokens(data, tmp_path / "cache")
    data.write_text(data.read_text().replace("question 7", "question 8"))  # of the same size
    after = tokens(data, tmp_path / "cache")
    assert len(passes) == 2
    assert len(after.table) == len(before.table)
    assert after.table.checksum != before.table.checksum


def test_a_file_that_changes_meanwhile_keeps_nothing(
    data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(*arguments: Any, **named: Any) -> Iterator[Block]:
        yield from read_blocks(*arguments, **named)
        with data.open("a") as file:
            file.write("\n{}")

    monkeypatch.setattr(train.token_files, "read_blocks", changing)
    with pytest.raises(FileChangedError, match=r"data\.jsonl' was changed while in use"):
        tokens(data, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("name", [TOKENS_FILE, ENTRIES_FILE, FRACTIONS_FILE, ABOUT_FILE])
@pytest.mark.parametrize("damage", ["cut", "gone", "empty"])
def test_damaged_tokens_are_made_again(
    name: str, damage: str, data: pathlib.Path, tmp_path: pathlib.Path, passes: list[str]
) -> None:
    made = tokens(data, tmp_path / "cache")
    expected = tokens(data, None)
    (file,) = (tmp_path / "cache").glob(f"*/{name}")
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: -file.stat().st_size // 2] if damage == "cut" else b"")
    del made
    assert_same(tokens(data, tmp_path / "cache"), expected)
    assert len(passes) == 3
    assert_same(tokens(data, tmp_path / "cache"), expected)
    assert len(passes) == 3


@settings(max_examples=30)
@given(st.sampled_from([ENTRIES_FILE, FRACTIONS_FILE, ABOUT_FILE]), st.integers(0), st.integers(0, 7))
def test_any_flipped_bit_beside_the_tokens_is_noticed_at_once(name: str, place: int, bit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder, "data.jsonl")
        data.write_text('{"prompt": "hi", "response": "yo"}\n' * 3 + "{")
        expected = tokens(data, pathlib.Path(folder, "cache"))
        (file,) = pathlib.Path(folder, "cache").glob(f"*/{name}")
        content = bytearray(file.read_bytes())
        content[place % len(content)] ^= 1 << bit
        file.write_bytes(content)
        assert train.token_files._kept(file.parent) is None
        assert_same(tokens(data, pathlib.Path(folder, "cache")), expected)
        assert train.token_files._kept(file.parent) is not None


def test_kept_tokens_are_read_where_nothing_can_be_written(
    data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tokens(data, tmp_path / "cache")

    def refused(*_: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(train.token_files, "_only_one", refused)
    assert_same(tokens(data, tmp_path / "cache"), made)
    data.write_text('{"prompt": "hi", "response": "yo"}')
    with pytest.raises(ValueError, match=r"can't keep the tokens of .* read-only"):
        tokens(data, tmp_path / "cache")


def test_the_split_does_not_depend_on_how_the_data_is_named(
    data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on who has filled the cache."""
    (tmp_path / "folder").mkdir()
    data.rename(tmp_path / "folder" / "data.jsonl")
    names = ["folder", "folder/data.jsonl", "folder/*.jsonl", str(tmp_path / "folder"), "./folder/../folder/da*"]
    monkeypatch.chdir(tmp_path)
    found = [tokens(pathlib.Path(name), cache) for name in names for cache in (None, tmp_path / "cache")]
    monkeypatch.chdir(tmp_path / "folder")
    found += [tokens(pathlib.Path(name), cache) for name in ("data.jsonl", ".") for cache in (None, tmp_path / "cache")]
    (tmp_path / "folder").rename(tmp_path / "renamed")
    found += [tokens(tmp_path / "renamed", tmp_path / "cache")]
    for one in found:
        assert one.fractions.tolist() == found[0].fractions.tolist()


def test_the_same_file_below_another_folder_is_another_source(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Its rows are held out by another name."""
    (tmp_path / "above" / "below").mkdir(parents=True)
    data.rename(tmp_path / "above" / "below" / "data.jsonl")
    for name in ("above", "above/below"):
        kept, made = (tokens(tmp_path / name, cache) for cache in (tmp_path / "cache", None))
        assert kept.fractions.tolist() == made.fractions.tolist()


def test_a_file_that_comes_meanwhile_keeps_nothing(
    data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def coming(path: str) -> Source:
        shutil.copy(data, data.with_name("more.jsonl"))
        return open_source(path)

    monkeypatch.setattr(train.token_files, "open_source", coming)
    with pytest.raises(FileChangedError, match=r"files came or went under '.*\*\.jsonl' while in use"):
        tokens(data.with_name("*.jsonl"), tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_file_that_may_not_be_read_is_not_a_lack_of_room(
    data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: str) -> Source:
        raise PermissionError(f"Permission denied: {path!r}")

    monkeypatch.setattr(train.token_files, "open_source", refused)
    with pytest.raises(ValueError, match=r"can't read '.*data\.jsonl': Permission denied"):
        tokens(data, tmp_path / "cache")


def test_a_host_that_does_not_see_the_lock_and_is_slower_takes_what_is_there(
    data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(*arguments: Any, **named: Any) -> Iterator[Block]:
        monkeypatch.undo()
        yield from read_blocks(*arguments, **named)
        monkeypatch.setattr(train.token_files, "_only_one", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(socket, "gethostname", lambda: "faster")
        faster.append(tokens(data, tmp_path / "cache"))
        (directory,) = (path for path in (tmp_path / "cache").iterdir() if path.suffix == "")
        inodes.append(directory.stat().st_ino)

    faster: list[SourceTokens] = []
    inodes: list[int] = []
    monkeypatch.setattr(train.token_files, "read_blocks", overtaken)
    assert_same(tokens(data, tmp_path / "cache"), faster[0])
    (final,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert [final.stat().st_ino] == inodes, "the other host may have mapped it"


def test_several_at_once_make_them_once(data: pathlib.Path, tmp_path: pathlib.Path, passes: list[str]) -> None:
    told: list[str] = []
    together = threading.Barrier(3)

    def work() -> SourceTokens:
        together.wait()
        return source_tokens(str(data), READER, cache=tmp_path / "cache", workers=1, say=told.append)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = [future.result() for future in [pool.submit(work) for _ in range(3)]]
    assert len(passes) == 1
    for one in found[1:]:
        assert_same(one, found[0])
    assert any("another process makes the tokens" in line for line in told)


def test_what_a_killed_process_left_is_cleared_away(
    data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tokens(data, tmp_path / "cache")
    (final,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    left = final.with_name(f"{final.name}.making-{socket.gethostname()}-1")
    shutil.copytree(final, left)
    others = final.with_name(f"{final.name}.making-another.host-1")
    shutil.copytree(final, others)
    shutil.rmtree(final)
    assert_same(tokens(data, tmp_path / "cache"), made)
    assert not left.exists()
    assert others.exists(), "it may be at work, if locks are not seen on all hosts"


def test_no_room_is_said_in_words(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(
        ValueError, match=r"can't keep the tokens of '.*data\.jsonl' in '.*cache'.*runtime\.token_cache"
    ):
        tokens(data, tmp_path / "cache")


def test_a_source_of_broken_rows_alone_has_no_tokens(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    data.write_text("{\n" * 3)
    for _ in range(2):
        found = tokens(data, tmp_path / "cache")
        assert (len(found.table), found.check.num_broken) == (0, 3)


def test_the_split_does_not_follow_the_order(data: pathlib.Path) -> None:
    """What is held out is spread over the file."""
    fractions = tokens(data, None).fractions
    assert np.corrcoef(fractions, np.arange(len(fractions)))[0, 1] == pytest.approx(0, abs=0.25)
    assert 0.3 < np.mean(fractions < 0.5) < 0.7


def test_the_key_holds_all_code_that_makes_tokens() -> None:
    """What the reading of rows imports, and what that imports: a change of any of it must make tokens anew."""
    folder = pathlib.Path(train.token_files.__file__).parent
    found: set[str] = set()
    left = ["chat_data", "tables", "token_files"]
    while left:
        name = left.pop()
        found.add(name)
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("train."):
                imported = (node.module or "").removeprefix("train.")
                if imported not in found:
                    left.append(imported)
    assert found == set(train.token_files._CODE)
