"""What comes from outside is data: nothing in it runs, grows without bound, or is written where it says."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bcl_grain import inputs, json_files
from bcl_grain.cost_table import read_cost_table
from bcl_grain.inputs import read_lengths
from bcl_grain.models import load_model
from bcl_grain.priors import read_prior
from tests.pipelines import pipeline
from tests.tiny_run import tiny_config, write_corpus
from train.hf_weights import open_hf_model
from train.loop import run_training
from train.prepare import prepare
from train.run_directory import saved_identity
from train.sources import open_source
from train.topology import Topology
from train.warm_up import warm_up

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for folder in ("bcl_grain", "train", "configs") for path in (ROOT / folder).glob("*.py"))
RUNS_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "torch"}
CODE_FROM_TEXT = {"eval", "exec", "compile", "__import__"}


class Bomb:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_module_unpickles_or_runs_text(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.partition(".")[0] for alias in node.names} & RUNS_CODE
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in RUNS_CODE
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            assert name not in CODE_FROM_TEXT, f"line {node.lineno}"
            for keyword in node.keywords:
                assert keyword.arg != "shell", f"line {node.lineno}"
                if keyword.arg == "allow_pickle":
                    assert isinstance(keyword.value, ast.Constant)
                    assert keyword.value.value is False, f"line {node.lineno}"
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "np.load":
                assert "allow_pickle" in {keyword.arg for keyword in node.keywords}, f"line {node.lineno}"


def test_pickled_data_is_refused_and_not_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    payload = np.array([Bomb(made)], dtype=object)
    np.save(tmp_path / "lengths.npy", payload, allow_pickle=True)
    np.savez(tmp_path / "lengths.npz", len=payload)
    (tmp_path / "raw.npy").write_bytes(pickle.dumps(Bomb(made)))
    for name in ("lengths.npy", "lengths.npz", "raw.npy"):
        with pytest.raises(ValueError, match="can't read"):
            read_lengths(str(tmp_path / name))
    for suffix in ("pkl", "pickle", "pt", "pth", "bin"):
        path = tmp_path / f"data.{suffix}"
        path.write_bytes(pickle.dumps(Bomb(made)))
        with pytest.raises(ValueError, match="pickles can run code"):
            open_source(str(path))
    assert not made.exists()
    pickle.loads(pickle.dumps(Bomb(made)))
    assert made.exists()  # it would have gone off


def test_a_state_is_data(tmp_path: Path) -> None:
    made = tmp_path / "made"
    iterator = iter(pipeline(20))
    state = iterator.get_state()
    call = f"__import__('pathlib').Path({str(made)!r}).touch()"
    for name in state:
        for value in (call, {"py/reduce": call}, [call], pickle.dumps(Bomb(made))):
            with pytest.raises((ValueError, TypeError, KeyError)):
                iter(pipeline(20, on_changed_settings="finish_pool")).set_state({**state, name: value})
    assert not made.exists()


READERS: dict[str, Callable[[Path], Any]] = {
    "cost table": read_cost_table,
    "prior": lambda path: read_prior(str(path), cost="tokens", pack_size=2),
    "model": lambda path: load_model(str(path)),
    "run": lambda path: saved_identity(Path(path).parent),
}


@pytest.mark.parametrize("name", READERS)
def test_json_is_read_with_limits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    for text in (b"[" * 100_000, b'{"a": ' * 100_000, b"\xff\xfe", b"", b"{} {}", b"[1]", b'"text"', b"null"):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=r"run\.json|run to resume"):
            READERS[name](path)
    path.write_text(json.dumps({"a": "x" * 2000}))
    monkeypatch.setattr(json_files.read_json, "__kwdefaults__", {"max_bytes": 1000})
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        READERS[name](path)


def test_archives_and_lines_are_read_with_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    np.save(content, np.ones(10**6, np.int64))
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("len.npy", content.getvalue())
    assert (tmp_path / "bomb.npz").stat().st_size < 100_000
    assert read_lengths(str(tmp_path / "bomb.npz")).values.size == 10**6
    monkeypatch.setattr(inputs, "_MAX_UNPACKED_BYTES", 10**6)
    with pytest.raises(ValueError, match="unpacks to 8,000,128 bytes, over the limit"):
        read_lengths(str(tmp_path / "bomb.npz"))
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "x"}) + "\n" + json.dumps({"text": "x" * 5000}))
    monkeypatch.setattr(inputs, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match=r"line 2 of .*long.jsonl' has more than 1,000 bytes"):
        read_lengths(str(tmp_path / "long.jsonl"))


@pytest.mark.parametrize("name", ["../stolen.safetensors", "/etc/passwd", "sub/part.safetensors"])
def test_a_weight_index_stays_in_its_directory(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "stolen.safetensors").write_bytes(b"")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "num_hidden_layers": 1}
    config |= {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="names files outside its directory"):
        open_hf_model(model)


def test_a_run_writes_into_its_directory_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever text the config holds: no field of it is a place to write."""
    corpus = write_corpus(tmp_path / "pairs.jsonl")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    before = set(tmp_path.rglob("*"))
    config = dataclasses.replace(tiny_config(Path("..") / "work" / ".." / corpus.name), steps=4)
    prepared = prepare(config, Topology(process_index=0, process_count=1, local_devices=1), say=lambda line: None)
    run_training(prepared, warm_up(prepared, say=lambda line: None), tmp_path / "run", say=lambda line: None)
    made = set(tmp_path.rglob("*")) - before
    assert tmp_path / "run" / "metrics.jsonl" in made
    assert all(path.is_relative_to(tmp_path / "run") for path in made)
