"""The memory that the H200 configurations state is what the trainer's own arithmetic gives."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from bcl_grain.memory import GIB
from tests.tiny_run import shapes_of
from train.memory import check_memory, peak_bytes, state_bytes
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


@pytest.mark.parametrize("name", MODELS)
def test_stated_memory(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.py")
    model = dataclasses.replace(MODELS[name], lora=config.model.lora, remat=config.model.remat)
    header = (CONFIGS / f"{name}.py").read_text().split('"""')[1]
    state, peak = (float(value) for value in re.findall(r": ([\d.]+)\s+GiB", header)[:2])
    assert state == pytest.approx(state_bytes(model) / GIB, abs=0.06)
    largest = max(peak_bytes(model, *shape) for shape in shapes_of(config))
    assert peak == pytest.approx(largest / GIB, abs=0.06)
    check_memory(model, shapes_of(config), budget_gib=131)


def test_all_parameters_of_the_large_one_would_not_fit() -> None:
    config = load_config(CONFIGS / "llama_8b_lora_h200.py")
    model = dataclasses.replace(MODELS["llama_8b_lora_h200"], remat=True)
    assert state_bytes(model) / GIB == pytest.approx(149.6, abs=0.06)
    with pytest.raises(ValueError, match=r"no row fits: train adapters alone"):
        check_memory(model, shapes_of(config), budget_gib=131)
