"""Parquet files and saved Hugging Face data sets give their rows at random, without being read whole."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import pickle
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from train import tables  # noqa: E402 - needs pyarrow
from train.conversations import conversation  # noqa: E402
from train.jsonl import FileChangedError  # noqa: E402
from train.sources import Source, open_source  # noqa: E402

CALL = {"name": "find", "arguments": '{"q": "tea"}'}
ROWS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": f"question {i} é🙂"},
            {"role": "assistant", "content": "", "tool_call": CALL}
            if i % 3
            else {"role": "assistant", "content": "yo"},
        ]
    }
    for i in range(50)
]


def write_parquet(path: pathlib.Path, rows: list[dict[str, Any]], *, group_rows: int = 7) -> pathlib.Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group_rows)
    return path


def write_saved_dataset(directory: pathlib.Path, shards: list[list[dict[str, Any]]], **state: Any) -> pathlib.Path:
    """What `datasets.Dataset.save_to_disk` writes: Arrow streams, and a description of their order."""
    directory.mkdir(exist_ok=True)
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    schema = pa.Table.from_pylist(ROWS).schema
    for name, rows in zip(names, shards, strict=True):
        with pa.ipc.new_stream(str(directory / name), schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema), max_chunksize=5)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], **state}))
    return directory


def conversations(source: Source, order: list[int]) -> list[Any]:
    return [conversation(source[index]) for index in order]


ORDER = np.random.default_rng(3).permutation(50).tolist()
WANTED = [conversation(ROWS[index]) for index in ORDER]


def test_parquet(tmp_path: pathlib.Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    source = open_source(path)
    assert len(source) == 50
    assert conversations(source, ORDER) == WANTED
    assert source.place(41) == f"{path}, row 42"
    assert conversations(pickle.loads(pickle.dumps(source)), ORDER) == WANTED
    with pytest.raises(IndexError):
        source[50]


def test_saved_dataset(tmp_path: pathlib.Path) -> None:
    source = open_source(write_saved_dataset(tmp_path / "set", [ROWS[:22], [], ROWS[22:]]))
    assert len(source) == 50
    assert conversations(source, ORDER) == WANTED
    assert source.place(22) == f"{tmp_path / 'set' / 'data-00002-of-00003.arrow'}, row 1"
    assert conversations(pickle.loads(pickle.dumps(source)), ORDER) == WANTED


def test_a_directory_of_parquet_files(tmp_path: pathlib.Path) -> None:
    write_parquet(tmp_path / "train-00001.parquet", ROWS[30:])
    write_parquet(tmp_path / "train-00000.parquet", ROWS[:30])
    assert conversations(open_source(tmp_path), ORDER) == WANTED


def test_many_threads_read_at_once(tmp_path: pathlib.Path) -> None:
    source = open_source(write_parquet(tmp_path / "a.parquet", ROWS))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(source.__getitem__, ORDER * 4))
    assert [conversation(row) for row in rows] == WANTED * 4


def test_row_groups_are_kept_while_they_fit(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    read_group = tables._read_group

    def counted(file: Any, group: int) -> Any:
        decoded.append(group)
        return read_group(file, group)

    monkeypatch.setattr(tables, "_read_group", counted)
    source = open_source(write_parquet(tmp_path / "a.parquet", ROWS, group_rows=10))
    for index in ORDER:
        source[index]
    assert sorted(decoded) == [0, 1, 2, 3, 4]
    size = read_group(source.file, 0).nbytes  # type: ignore[attr-defined]
    monkeypatch.setattr(tables, "CACHE_BYTES", int(2.5 * size))
    monkeypatch.setattr(tables, "_groups", tables._Groups())
    decoded.clear()
    for index in (0, 10, 1, 20, 2, 11, 21):  # two groups fit: 0 and 1, then 0 and 2, ...
        source[index]
    assert decoded == [0, 1, 2, 1, 2]


def test_large_row_groups_are_refused_or_warned_of(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS, group_rows=25)
    open_source(path)
    assert not caplog.records
    largest = max(pq.ParquetFile(path).metadata.row_group(i).total_byte_size for i in range(2))
    monkeypatch.setattr(tables, "WARN_BYTES", largest - 1)
    monkeypatch.setattr(tables, "CACHE_BYTES", largest)
    open_source(path)
    assert "decodes" in caplog.text
    assert "row_group_size=1000" in caplog.text
    monkeypatch.setattr(tables, "CACHE_BYTES", largest - 1)
    with pytest.raises(ValueError, match=r"row group of .* bytes, over the limit of .*row_group_size=1000"):
        open_source(path)


def test_files_that_are_not_read(tmp_path: pathlib.Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    source = open_source(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"can't read .*a\.parquet' as Parquet"):
        open_source(path)
    with pytest.raises(FileChangedError, match="was changed"):
        source[0]
    path.write_bytes(whole[:4] + bytes(200) + whole[204:])
    with pytest.raises(ValueError, match="can't decode row group 0"):
        open_source(path)[0]
    with pytest.raises(ValueError, match="holds no row"):
        open_source(write_parquet(tmp_path / "empty.parquet", []))


def test_saved_datasets_that_are_not_read(tmp_path: pathlib.Path) -> None:
    splits = tmp_path / "splits"
    splits.mkdir()
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"holds the splits \['train', 'test'\]: give the directory of one"):
        open_source(splits)
    indexed = write_saved_dataset(tmp_path / "a", [ROWS], _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(ValueError, match=r"call flatten_indices\(\)"):
        open_source(indexed)
    with pytest.raises(ValueError, match="holds no row"):
        open_source(write_saved_dataset(tmp_path / "b", [[]]))
    descriptions: list[Any] = [[], [{"filename": "../../secret.arrow"}], [{}]]
    for named in descriptions:
        outside = write_saved_dataset(tmp_path / "c", [ROWS], _data_files=named)
        with pytest.raises(ValueError, match=r"names the data files .* save the data set again"):
            open_source(outside)
    missing = write_saved_dataset(tmp_path / "d", [ROWS])
    (missing / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(ValueError, match=r"can't read .*No such file"):
        open_source(missing)
    (missing / "data-00000-of-00001.arrow").write_bytes(b"not Arrow at all")
    with pytest.raises(ValueError, match="as an Arrow stream"):
        open_source(missing)
    (missing / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"can't read .*state\.json"):
        open_source(missing)


def test_values_that_are_not_json_are_named(tmp_path: pathlib.Path) -> None:
    rows = [{"prompt": "a", "response": b"bytes"}]
    with pytest.raises(ValueError, match="'response' must be a string, got a bytes"):
        conversation(open_source(write_parquet(tmp_path / "a.parquet", rows))[0])
