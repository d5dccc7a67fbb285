"""Fine-tuning that is over in seconds: made-up conversations, a config for a tiny chat model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from train.metrics_log import read_events

LORA = 'LoraConfig(rank=2, alpha=4.0, targets=("query", "down"))'
ROWS, ONE_SHAPE = "RowPackedLayout(length=192, rows_per_chunk=1)", "RowPackedOneShapeLayout(rows=4, length=192)"

_CONFIG = """
from bcl_grain.layouts import RowPackedLayout, RowPackedOneShapeLayout
from train.config import BalanceConfig, CorpusConfig, OptimizerConfig, RuntimeConfig, TrainConfig
from train.lora import LoraConfig
from train.model import ModelConfig

def get_config():
    return TrainConfig(
        pretrained={model!r},
        corpus=CorpusConfig(chat_paths=({data!r},), eval_share=0.2, max_tokens=192),
        balance=BalanceConfig(pack_size=4, lookahead=3),
        layout={layout},
        model=ModelConfig(vocab_size=1, lora={lora}),
        optimizer=OptimizerConfig(warmup_steps=1, learning_rate=1e-2),
        runtime=RuntimeConfig(
            on_late_compilation="error", eval_every=4, checkpoint_every=2, simulated_ranks=2, simulated_steps=4,
            token_cache={cache!r}, sample_prompts=("hello", "what is it?"), sample_tokens=8,
        ),
        steps=6,
    )
"""


def write_config(path: Path, *, model: Path, data: Path, lora: str = "None", layout: str = ROWS) -> Path:
    """Writes a config file of 6 steps, evaluated at 0, 4 and 6, saved at every second."""
    cache = str(path.parent / "tokens")
    path.write_text(_CONFIG.format(model=str(model), data=str(data), lora=lora, layout=layout, cache=cache))
    return path


def write_talk(path: Path) -> Path:
    """Writes 60 conversations of one or two turns."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(60):
        turns = []
        for turn in range(int(rng.integers(1, 3))):
            turns.append({"role": "user", "content": f"question {i} {turn}"})
            turns.append({"role": "assistant", "content": "hello the " * int(rng.integers(1, 6))})
        rows.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(rows) + "\n")
    return path


def eval_losses(run_dir: Path) -> list[float]:
    """The loss of each evaluation, in order."""
    return [event["loss"] for event in read_events(run_dir) if event["kind"] == "eval"]
