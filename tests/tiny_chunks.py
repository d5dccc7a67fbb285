"""Chunks of made-up records for a model that compiles in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from train.model import ModelConfig

CONFIG = ModelConfig(vocab_size=31, layers=2, width=16, heads=2, kv_heads=1, head_dim=8, hidden=24)
SHAPES = ((1, 16), (2, 16))


def make_chunk(rng: np.random.Generator, shape: tuple[int, int]) -> dict[str, npt.NDArray[Any]]:
    """Returns a chunk of two records and padding in every row."""
    rows, length = shape
    chunk: dict[str, npt.NDArray[Any]] = {
        name: np.zeros(shape, np.float32 if name == "loss_mask" else np.int32)
        for name in ("tokens", "tokens_segment_ids", "tokens_positions", "loss_mask")
    }
    for row in range(rows):
        start = 0
        for segment in (1, 2):
            n = int(rng.integers(2, length // 2 + 1))
            here = row, slice(start, start + n)
            # Arithmetic sequences: there is something to learn.
            chunk["tokens"][here] = (rng.integers(0, 31) + rng.integers(1, 3) * np.arange(n)) % 31
            chunk["tokens_segment_ids"][here] = segment
            chunk["tokens_positions"][here] = np.arange(n)
            chunk["loss_mask"][here] = rng.random(n) < 0.8
            start += n
    return chunk


def make_pack(
    *, num_chunks: int, seed: int, shapes: Sequence[tuple[int, int]] = SHAPES
) -> list[dict[str, npt.NDArray[Any]]]:
    """Returns chunks of shapes drawn from `shapes`."""
    rng = np.random.default_rng(seed)
    return [make_chunk(rng, shapes[int(rng.integers(len(shapes)))]) for _ in range(num_chunks)]
