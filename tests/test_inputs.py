from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bcl_grain.inputs import read_lengths
from bcl_grain.workloads import load_workload

VALUES = [5, 17, 3]


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def save_npz(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def save_parquet(path: Path, **columns: Any) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path)
    return str(path)


def test_a_workload_s_table_stands_for_its_corpus() -> None:
    lengths, workload = read_lengths("medquad"), load_workload("medquad")
    assert not lengths.has_order
    assert lengths.values.size == workload.records
    assert lengths.values.mean() == pytest.approx(workload.mean, rel=0.01)
    assert np.percentile(lengths.values, 99) == pytest.approx(workload.p99, rel=0.01)


def test_every_kind_of_file_gives_the_same_lengths_in_order(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array(VALUES, np.int32))
    files = [
        str(tmp_path / "a.npy"),
        save_npz(tmp_path / "a.npz", len=VALUES, other=[1, 2, 3]),
        save_npz(tmp_path / "b.npz", prompt_len=[1, 2, 1], response_len=[4, 15, 2]),
        write(tmp_path / "a.csv", "id,length\n0,5\n1,17.0\n\n2,3\n"),
        write(tmp_path / "b.csv", "prompt_len,response_len,who\n1,4,me\n2,15,you\n1,2,us\n"),
        write(tmp_path / "c.csv", "anything\n5\n17\n3\n"),
        save_parquet(tmp_path / "a.parquet", length=VALUES, text=["a", "b", "c"]),
        write(tmp_path / "a.jsonl", "".join(json.dumps({"text": n * "x"}) + "\n" for n in VALUES)),
    ]
    for file in files:
        lengths = read_lengths(file)
        assert lengths.values.tolist() == VALUES, file
        assert lengths.values.dtype == np.int64
        assert lengths.has_order


def test_a_named_column_wins(tmp_path: Path) -> None:
    for file in (
        save_npz(tmp_path / "a.npz", len=[1, 1, 1], mine=VALUES),
        write(tmp_path / "a.csv", "len,mine\n1,5\n1,17\n1,3\n"),
        save_parquet(tmp_path / "a.parquet", len=[1, 1, 1], mine=VALUES),
    ):
        assert read_lengths(file, column="mine").values.tolist() == VALUES


def test_texts_and_messages_are_counted_in_bytes(tmp_path: Path) -> None:
    call = {"name": "order", "arguments": {"item": "é"}}
    rows: list[Any] = [
        {"prompt": "two", "response": "é", "id": "not read"},
        {"system": "s", "prompt": "pp", "response": "r"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]},
        {"conversations": [{"from": "human", "value": "four"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    ]
    lengths = read_lengths(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))))
    parts = len(json.dumps([{"type": "text", "text": "x"}]))
    calls = len(json.dumps([call], ensure_ascii=False).encode())
    assert lengths.values.tolist() == [5, 4, 2 + calls, 4, parts]
    assert lengths.unit == "UTF-8 bytes"


def test_a_tokenizer_counts_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    file = write(tmp_path / "a.jsonl", '{"prompt": "a b c", "response": "a"}\n{"text": "b"}\n')
    lengths = read_lengths(file, tokenizer=str(tmp_path / "tokenizer.json"))
    assert lengths.values.tolist() == [4, 1]
    with pytest.raises(ValueError, match=r"no tokenizer 'gone\.json': pass a tokenizer\.json, or leave it out"):
        read_lengths(file, tokenizer="gone.json")
    with pytest.raises(ValueError, match="is not a Hugging Face tokenizer"):
        read_lengths(file, tokenizer=write(tmp_path / "other.json", "{}"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "len\n5\n-3\n0\n", r"length -3\.0 in line 3 of .* positive integers: remove or mend .*\(2 such"),
        ("a.csv", 'text,len\n"two\nlines",5\nx,0\n', r"length 0\.0 in line 4"),
        ("a.csv", "len\n5\nnan\n", r"length nan in line 3"),
        ("a.csv", "len\n5\n1.5\n", r"length 1\.5 in line 3"),
        ("a.csv", "len\n5\nfive\n", r"'five' in line 3 of .*, column 'len', is no number: mend it"),
        ("a.csv", "len,x\n5,1\n,1\n", r"'' in line 3"),
        ("a.csv", "x,y\n5,1\n", r"no usable column among \['x', 'y'\]: pass the one with the lengths"),
        ("a.csv", "5\n6\n", r"does not start with a line of column names, but with \['5'\]"),
        ("a.csv", "", "does not start with a line of column names"),
        ("a.csv", "len\n", "holds no vector of lengths"),
        ("a.jsonl", '{"text": "a"}\n{"text": ""}\n', r"length 0 in line 2"),
        ("a.jsonl", '{"text": "a"}\n{"label": 3}\n', r"line 2 of .* has no text: want an object with 'messages' or"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', r"line 2 of .* has no text"),
        ("a.jsonl", '{"text": "a"}\n{"text"\n', r"line 2 of .* is not JSON"),
        ("a.jsonl", '{"text": "a"}\n\n', r"line 2 of .* is empty: remove it"),
        ("a.npz", "not a zip file", r"can't read .*: is it a whole \.npz file\?"),
        ("a.parquet", "not parquet", r"can't read .*: is it a whole \.parquet file\?"),
        ("a.txt", "5\n", "none of the kinds of file that are read"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=message):
        read_lengths(write(tmp_path / name, text))


def test_what_is_wrong_in_an_array_is_named(tmp_path: Path) -> None:
    for values, message in (
        ([5, 0, -1], r"length 0 in record 1 of .*\(2 such in all\)"),
        ([[1, 2]], r"shape \(1, 2\)"),
        (["a"], "holds <U1 where lengths should be"),
    ):
        with pytest.raises(ValueError, match=message):
            read_lengths(save_npz(tmp_path / "a.npz", len=values))
    with pytest.raises(ValueError, match=r"no usable column among \['a', 'b'\]"):
        read_lengths(save_npz(tmp_path / "a.npz", a=VALUES, b=VALUES))
    with pytest.raises(ValueError, match=r"no column 'c': pass one of \['a', 'b'\]"):
        read_lengths(str(tmp_path / "a.npz"), column="c")
    with pytest.raises(ValueError, match=r"row 1 of .*, column 'len', is null"):
        read_lengths(save_parquet(tmp_path / "a.parquet", len=[1, None, 3]))


def test_a_missing_file_and_options_in_vain_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file 'gone\.npz': check the path, or pass a workload's name"):
        read_lengths("gone.npz")
    with pytest.raises(ValueError, match="unknown workload 'medquard': did you mean medquad"):
        read_lengths("medquard")
    with pytest.raises(ValueError, match="column='len' is for files"):
        read_lengths("medquad", column="len")
    with pytest.raises(ValueError, match=r"tokenizer='t\.json' is for \.jsonl"):
        read_lengths(save_npz(tmp_path / "a.npz", len=VALUES), tokenizer="t.json")


def test_a_missing_optional_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.split(".")[0] in ("pyarrow", "tokenizers"):
            raise ModuleNotFoundError(name)
        return find(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(
        ModuleNotFoundError, match=r"reading \.parquet needs the package 'pyarrow': pip install pyarrow"
    ):
        read_lengths(write(tmp_path / "a.parquet", ""))
    with pytest.raises(ModuleNotFoundError, match="needs the package 'tokenizers'"):
        read_lengths(write(tmp_path / "a.jsonl", "{}"), tokenizer="t.json")
