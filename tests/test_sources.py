"""Rows come back from any file format, in any order, with their places; damage is named; nothing is unpickled."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import pickle
from typing import Any

import grain
import numpy as np
import pytest
from array_record.python import array_record_module
from hypothesis import given, settings
from hypothesis import strategies as st

from train.jsonl import FileChangedError, index_lines, parse_object
from train.sources import Source, open_source

ROWS: list[dict[str, Any]] = [{"prompt": f"question {i}", "response": "é🙂" * i, "n": i} for i in range(20)]


def write_lines(path: pathlib.Path, rows: list[dict[str, Any]]) -> pathlib.Path:
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return path


def write_array_record(path: pathlib.Path, texts: list[bytes]) -> pathlib.Path:
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for text in texts:
        writer.write(text)
    writer.close()
    return path


def all_rows(source: Source) -> list[dict[str, Any]]:
    return [source[index] for index in range(len(source))]


def test_lines(tmp_path: pathlib.Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    source = open_source(path)
    assert all_rows(source) == ROWS
    assert source[17] == ROWS[17]
    assert source.place(17) == f"{path}, line 18"


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([b'{"a": 1}', b' {"a": "\xc3\xa9"} ', b"", b"  ", b"\t"]), max_size=12),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.booleans(),
)
def test_blank_lines_line_ends_and_byte_order_marks(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], end: bytes, mark: bool, last_end: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * mark + end.join(lines) + end * last_end)
    numbered = [(number, json.loads(line)) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        with pytest.raises(ValueError, match="holds no row"):
            index_lines(path)
        return
    source = index_lines(path)
    assert all_rows(source) == [row for _, row in numbered]
    assert [source.place(i) for i in range(len(source))] == [f"{path}, line {number}" for number, _ in numbered]


def test_long_lines_are_rows_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    long = {"a": "x" * (3 * 2**20)}  # over several of the pieces in which the file is indexed
    path = write_lines(tmp_path / "a.jsonl", [ROWS[1], long, ROWS[2]])
    source = index_lines(path, max_line_bytes=2**20)
    assert (source[0], source[2]) == (ROWS[1], ROWS[2])
    with pytest.raises(ValueError, match=r"^3,145,73\d bytes, over the limit of 1,048,576; .*max_line_bytes"):
        source[1]
    assert index_lines(path)[1] == long
    exact = len(json.dumps(ROWS[1]).encode())
    assert index_lines(path, max_line_bytes=exact)[0] == ROWS[1]
    with pytest.raises(ValueError, match="over the limit"):
        index_lines(path, max_line_bytes=exact - 1)[0]


def test_five_megabytes_are_over_the_default_limit(tmp_path: pathlib.Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"a": "x" * 5_000_000}])
    with pytest.raises(ValueError, match="over the limit of 4,194,304"):
        index_lines(path)[0]


def test_a_megabyte_of_blanks_before_a_row_does_not_hide_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b" " * 2**21 + b'{"a": 1}\n' + b'{"a": 2}\n')
    assert all_rows(index_lines(tmp_path / "a.jsonl")) == [{"a": 1}, {"a": 2}]


def test_an_index_holds_no_rows(tmp_path: pathlib.Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"a": "x" * 1000}] * 2000)
    assert len(pickle.dumps(index_lines(path))) < 2000 * 8 + 1000


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON .*one JSON object a line"),
        (b'{"a": 1} {"b": 2}', "not valid JSON"),
        (b"[1]", "want a JSON object, got a list"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": "\x01"}', "not valid JSON"),
        (b'{"a": "x\0"}', "NUL byte at position 8: the file is damaged"),
        (b"\0" * 100, "NUL byte at position 0"),
        (b'{"a": "\xe9"}', "not UTF-8 at byte 7"),
        (b'\xef\xbb\xbf{"a": 1}', "byte order mark in the middle"),
        (b'{"a": ' + b"[" * 10**5, "nests too deep|not valid JSON"),
        (b'{"a": ' + b"9" * 10**5 + b"}", "not valid JSON"),
    ],
)
def test_texts_that_are_no_object(text: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_object(text)


def test_array_records(tmp_path: pathlib.Path) -> None:
    path = write_array_record(tmp_path / "a.array_record", [*(json.dumps(row).encode() for row in ROWS), b"\x80\x04x"])
    source = open_source(path)
    assert [source[index] for index in range(20)] == ROWS
    assert pickle.loads(pickle.dumps(source))[3] == ROWS[3]
    assert source.place(3) == f"{path}, record 4"
    with pytest.raises(ValueError, match="not UTF-8 at byte 0"):
        source[20]
    assert len(source) == 21
    with pytest.raises(ValueError, match="over the limit of 10;"):
        open_source(path, max_line_bytes=10)[0]


def test_files_of_one_directory_or_pattern_follow_one_another(tmp_path: pathlib.Path) -> None:
    (tmp_path / "more").mkdir()
    for name, part in (("b.jsonl", ROWS[7:15]), ("a.jsonl", ROWS[:7]), ("more/c.jsonl", ROWS[15:])):
        write_lines(tmp_path / name, part)
    (tmp_path / "README.md").write_text("not data")
    source = open_source(tmp_path)
    assert all_rows(source) == ROWS
    assert source.place(8) == f"{tmp_path / 'b.jsonl'}, line 2"
    assert all_rows(open_source(f"{tmp_path}/[ab].jsonl")) == ROWS[:15]
    for outside in (-1, 20):
        with pytest.raises(IndexError):
            source[outside]


def test_directories_that_leave_a_doubt(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"want data files of one kind in .*found none"):
        open_source(tmp_path)
    write_lines(tmp_path / "train-0.jsonl", ROWS)
    write_lines(tmp_path / "test-0.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"several splits \(test, train\); .*train-\*"):
        open_source(tmp_path)
    (tmp_path / "test-0.jsonl").unlink()
    write_array_record(tmp_path / "train.array_record", [b"{}"])
    with pytest.raises(ValueError, match=r"found 1 \.array_record, 1 \.jsonl; name them by a pattern"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl.gz", b"", "compressed text can't be read at random"),
        ("a.pkl", b"", "pickles can run code"),
        ("a.csv", b"", "convert it to JSON Lines"),
        ("a", b"", "its name does not end in"),
        ("a.jsonl", b"", "holds no row"),
        ("a.jsonl", b" \n\n", "holds no row"),
        ("a.jsonl", "{}".encode("utf-16"), "is UTF-16; save it as UTF-8"),
        ("a.json", b'[\n{"a": 1},\n{"a": 2}\n]\n', "one JSON array over many lines"),
        ("a.array_record", b"no such thing", "as ArrayRecord"),
    ],
)
def test_files_that_are_not_read(tmp_path: pathlib.Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        open_source(tmp_path / name)


def test_missing_files_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*none\.jsonl"):
        open_source(tmp_path / "none.jsonl")


def test_a_file_that_changed_is_not_read_by_the_old_index(tmp_path: pathlib.Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    source = open_source(path)
    write_lines(path, ROWS[1:])
    with pytest.raises(FileChangedError, match="was changed while in use"):
        source[0]


def test_many_threads_read_at_once(tmp_path: pathlib.Path) -> None:
    source = open_source(write_lines(tmp_path / "a.jsonl", ROWS))
    order = np.random.default_rng(0).integers(0, 20, 400).tolist()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(source.__getitem__, order)) == [ROWS[i] for i in order]


def test_grain_shuffles_a_source_as_a_whole(tmp_path: pathlib.Path) -> None:
    source = open_source(write_lines(tmp_path / "a.jsonl", ROWS))
    read = [row["n"] for row in grain.MapDataset.source(source).shuffle(seed=1).to_iter_dataset()]
    assert sorted(read) == list(range(20))
    assert read != list(range(20))
