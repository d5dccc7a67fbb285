"""Whether a run fits a device, before anything is compiled: the arithmetic of `bcl_grain.memory` for this trainer.

With all of P parameters trained a device holds, in bytes, 4 P of parameters, 4 P of accumulated gradients, 4 P of a
chunk's gradient and 8 P of Adam's state: 20 P. With adapters alone it holds 2 P in bfloat16, and 20 for each of the
adapters' parameters. Activations of one chunk come on top; `model.remat` keeps those of one layer instead of all.

On a CPU, which computes in float32, there is more: the frozen parameters are widened as a whole, and a block of queries
has its scores in memory several times, quadratic in a row's length.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax

from bcl_grain.memory import GIB, MemoryModel
from bcl_grain.models import ModelDims
from train.attention import MAX_QUERY_BLOCKS, QUERY_BLOCK_TOKENS, pallas_takes
from train.loss import logits_at_once_on
from train.model import ModelConfig

_TRAINED_BYTES = 20  # parameter, accumulator, gradient, and two of Adam's, in float32
_CPU_SCORES = 6  # of one block, measured: scores, weights, their gradients

_STEP_TOKENS = 128


def device_gib(device: jax.Device) -> float | None:
    """Returns a device's memory; None where nobody tells. A CPU's is the machine's."""
    if device.platform == "cpu":
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        except (ValueError, OSError):
            return None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else limit / GIB


def adapter_parameters(config: ModelConfig) -> int:
    """Returns the number of parameters of a model's adapters.

    >>> from train.lora import LoraConfig
    >>> adapter_parameters(ModelConfig(vocab_size=9, layers=2, width=8, lora=LoraConfig(rank=1, targets=("query",))))
    272
    """
    if config.lora is None:
        return 0
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    sizes = {
        "query": config.width + queries,
        "key": config.width + keys,
        "value": config.width + keys,
        "output": config.width + queries,
        "gate": config.width + config.hidden,
        "up": config.width + config.hidden,
        "down": config.width + config.hidden,
    }
    return config.layers * config.lora.rank * sum(sizes[target] for target in config.lora.targets)


def state_bytes(config: ModelConfig, *, platform: str = "gpu") -> int:
    """Returns what a run holds whatever the chunks: parameters, gradients, optimizer state."""
    if config.lora is None:
        return _TRAINED_BYTES * config.num_parameters
    frozen = config.num_parameters * (6 if platform == "cpu" else 2)
    return frozen + _TRAINED_BYTES * adapter_parameters(config)


def peak_bytes(
    config: ModelConfig, rows: int, length: int, *, platform: str = "gpu", one_record_rows: bool = False
) -> int:
    """Returns the memory of a step whose largest chunk is [rows, length].

    Args:
        config: The model.
        rows: Rows of the chunk.
        length: Tokens of a row.
        platform: "cpu" or "gpu".
        one_record_rows: Whether no row holds two records; see `train.attention.attention_for`.

    >>> config = ModelConfig(vocab_size=49152, layers=30, width=576, heads=9, kv_heads=3, head_dim=64, hidden=1536)
    >>> f"{peak_bytes(config, 2, 2048) / 2**30:.1f} GiB"
    '7.0 GiB'
    """
    fused = platform == "cpu" or one_record_rows or pallas_takes(length, config.head_dim)
    model = MemoryModel(
        dims=ModelDims(
            layers=config.layers,
            width=config.width,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            hidden=config.hidden,
            vocab_size=config.vocab_size,
            tied_embeddings=config.tied_embeddings,
            qkv_bias=config.qkv_bias,
        ),
        activation_bytes=4 if platform == "cpu" else 2,
        remat=config.remat,
        attention="fused" if fused else "dense",
        logits_at_once=logits_at_once_on(platform),
    )
    chunk = model.chunk_bytes(rows, length)
    if platform == "cpu":
        block = max(QUERY_BLOCK_TOKENS, -(-length // MAX_QUERY_BLOCKS))
        chunk += _CPU_SCORES * 4 * rows * config.heads * min(block, length) * length
    return state_bytes(config, platform=platform) + chunk


def check_memory(
    config: ModelConfig,
    shapes: Sequence[tuple[int, int]],
    *,
    budget_gib: float,
    platform: str = "gpu",
    one_record_rows: bool = False,
    reserve: float = 0.1,
) -> None:
    """Refuses a run whose chunks do not fit a device.

    Args:
        config: The model.
        shapes: (rows, length) of every chunk that can come.
        budget_gib: Memory of the device.
        platform: "cpu" or "gpu".
        one_record_rows: Whether no row holds two records.
        reserve: Share of the budget for what the arithmetic leaves out.

    Raises:
        ValueError: If one does not fit; the message says what takes how much, and the longest row that would fit.
    """
    usable = (1 - reserve) * budget_gib * GIB

    def peak(rows: int, length: int) -> int:
        return peak_bytes(config, rows, length, platform=platform, one_record_rows=one_record_rows)

    rows, length = max(shapes, key=lambda shape: peak(*shape))
    if peak(rows, length) <= usable:
        return
    state = state_bytes(config, platform=platform)
    needed = (
        f"a chunk of {rows} x {length} tokens takes {(peak(rows, length) - state) / GIB:.1f} GiB on top of "
        f"{state / GIB:.1f} GiB for parameters, gradients and optimizer state; the device has {budget_gib:g} GiB, of "
        f"which {reserve:.0%} are kept in reserve"
    )
    longest = 0
    while peak(1, longest + _STEP_TOKENS) <= usable:
        longest += _STEP_TOKENS
    if longest == 0:
        remedy = "no row fits: train adapters alone (model.lora), or take a smaller model"
    else:
        remedy = f"cap records at {longest} tokens and lay them out in rows of that length, one a chunk"
    remat = "" if config.remat else ", or set model.remat"
    raise ValueError(f"{needed}: {remedy}{remat}")
