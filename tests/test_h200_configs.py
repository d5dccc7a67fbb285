"""The memory that the H200 configurations state is what the trainer's own arithmetic gives."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from bcl_grain.cli import main
from bcl_grain.memory import GIB
from tests.tiny_run import shapes_of
from train.config import TrainConfig
from train.memory import Setup, adapter_parameters, check_memory, peak_bytes, state_bytes, update_bytes
from train.model import ModelConfig
from train.overrides import load_config

CONFIGS = Path(__file__).parents[1] / "configs"
LLAMA = ModelConfig(vocab_size=128_256, rope_base=5e5, heads=32, kv_heads=8)
MODELS = {
    "llama_1b_h200": dataclasses.replace(LLAMA, layers=16, width=2048, head_dim=64, hidden=8192),
    "llama_8b_lora_h200": dataclasses.replace(
        LLAMA, layers=32, width=4096, head_dim=128, hidden=14_336, tied_embeddings=False
    ),
}


VISIBLE_GIB = 139
JAX_GIB = 0.75 * VISIBLE_GIB  # what JAX takes of it by default


def configured(name: str) -> tuple[TrainConfig, ModelConfig, Setup, list[float]]:
    """Returns a configuration, its model, its 8 devices, and the GiB that its header states, in order."""
    config = load_config(CONFIGS / f"{name}.py")
    model = dataclasses.replace(MODELS[name], lora=config.model.lora, remat=config.model.remat)
    header = (CONFIGS / f"{name}.py").read_text().split('"""')[1]
    stated = [float(value) for value in re.findall(r"([\d.]+)\s+GiB", header)]
    return config, model, Setup(devices=8, zero1=config.runtime.zero1), stated


@pytest.mark.parametrize("name", MODELS)
def test_stated_memory(name: str) -> None:
    config, model, setup, stated = configured(name)
    assert stated[0] == pytest.approx(state_bytes(model, setup) / GIB, abs=0.06)
    largest = max(peak_bytes(model, *shape, setup) for shape in shapes_of(config))
    assert stated[1] == pytest.approx(largest / GIB, abs=0.06)
    assert stated[2] == VISIBLE_GIB
    check_memory(model, shapes_of(config), budget_gib=JAX_GIB, setup=setup)


def test_stated_update() -> None:
    _, model, setup, stated = configured("llama_1b_h200")
    assert stated[3] == pytest.approx(update_bytes(model, setup) / GIB, abs=0.06)


def test_all_parameters_of_the_large_one_would_not_fit_without_zero1() -> None:
    config, model, _, stated = configured("llama_8b_lora_h200")
    model = dataclasses.replace(model, lora=None)
    alone, shared = Setup(devices=8), Setup(devices=8, zero1=True)
    figures = state_bytes(model, alone), state_bytes(model, shared), update_bytes(model, shared)
    assert stated[-3:] == pytest.approx([figure / GIB for figure in figures], abs=0.06)
    with pytest.raises(ValueError, match=r"no row fits: train adapters alone \(model\.lora\), or set runtime\.zero1"):
        check_memory(model, shapes_of(config), budget_gib=VISIBLE_GIB, setup=alone)
    check_memory(model, shapes_of(config), budget_gib=VISIBLE_GIB, setup=shared)


@pytest.mark.parametrize(
    ("name", "known", "options"),
    [
        ("llama_1b_h200", "llama-3.2-1b", ["--optimizer-shards=8"]),
        ("llama_8b_lora_h200", "llama-3.1-8b", ["--precision=frozen"]),
    ],
)
def test_the_command_line_agrees(name: str, known: str, options: list[str], tmp_path: Path) -> None:
    config, model, setup, _ = configured(name)
    longest = config.corpus.max_tokens
    np.save(tmp_path / "lengths.npy", np.full(64, longest))
    options += ["--logits-at-once=134217728", "--pack-sizes=1,2", "--quiet", f"--json={tmp_path / 'out.json'}"]
    arguments = ["boundary", str(tmp_path / "lengths.npy"), f"--model={known}", f"--memory-gib={JAX_GIB}", *options]
    assert main(arguments) == 0
    cells = json.loads((tmp_path / "out.json").read_text())["results"]
    adapters = 20 * adapter_parameters(model)
    for rows in (1, 2):
        (cell,) = (c for c in cells if (c["cap"], c["layout"], c["pack_size"]) == ("none", "padded", rows))
        assert (cell["rows"], cell["length"], cell["fits"]) == (rows, longest, True)
        assert cell["peak_gib"] * GIB == pytest.approx(peak_bytes(model, rows, longest, setup) - adapters, rel=1e-9)
