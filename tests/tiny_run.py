"""A run that is over in seconds: a made-up corpus of uneven pairs, a model of a thousand parameters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from bcl_grain.layouts import RowPackedLayout
from train.config import BalanceConfig, CorpusConfig, FitRows, OptimizerConfig, RuntimeConfig, TrainConfig
from train.model import ModelConfig
from train.prepare import Prepared, prepare
from train.topology import Topology

NUM_PAIRS = 120
STEPS = 18


def write_corpus(path: Path, num_pairs: int = NUM_PAIRS) -> Path:
    """Writes pairs whose lengths spread widely, none above 60 bytes."""
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(2.3, 0.8, num_pairs), 1, 50).astype(int)
    lines = [json.dumps({"prompt": f"{i}", "response": "ab" * (n // 2) + f"{i}"}) for i, n in enumerate(lengths)]
    path.write_text("\n".join(lines))
    return path


def tiny_config(corpus: Path, **changes: Any) -> TrainConfig:
    """Returns a config with two chunk shapes, several planning windows, and an epoch that ends inside the run."""
    config = TrainConfig(
        corpus=CorpusConfig(path=str(corpus), eval_share=0.2, max_tokens=64),
        balance=BalanceConfig(pack_size=6, lookahead=3),
        layout=RowPackedLayout(length=64, rows_per_chunk=2, heights=(1,)),
        model=ModelConfig(vocab_size=1, layers=1, width=8, heads=2, kv_heads=1, head_dim=4, hidden=8),
        optimizer=OptimizerConfig(warmup_steps=2),
        runtime=RuntimeConfig(
            on_late_compilation="error", eval_every=5, checkpoint_every=4, simulated_ranks=2, simulated_steps=6
        ),
        steps=STEPS,
    )
    return dataclasses.replace(config, **changes)


def tiny_run(tmp_path: Path, **changes: Any) -> Prepared:
    """Returns a prepared run on one device."""
    topology = Topology(process_index=0, process_count=1, local_devices=1)
    config = tiny_config(write_corpus(tmp_path / "pairs.jsonl"), **changes)
    return prepare(config, topology, say=lambda line: None)


def shapes_of(config: TrainConfig) -> tuple[tuple[int, int], ...]:
    """The chunk shapes of a config that names its layout."""
    assert not isinstance(config.layout, FitRows)
    return config.layout.shapes


def write_config(path: Path, corpus: Path) -> Path:
    """Writes a config file that gives `tiny_config(corpus)`."""
    path.write_text(
        "from pathlib import Path\n"
        "from tests.tiny_run import tiny_config\n"
        f"def get_config():\n    return tiny_config(Path({str(corpus)!r}))\n"
    )
    return path


def quiet(line: str) -> None:
    """Takes a line, and leaves it."""
    del line


def loss_tokens(prepared: Prepared) -> float:
    """The tokens of the held-out records that count."""
    return float(sum(record["loss_mask"][1:].sum() for record in prepared.evaluation))
