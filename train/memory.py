"""Whether a run fits a device, before anything is compiled: the arithmetic of `bcl_grain.memory` for this trainer.

With T parameters trained a device holds, in bytes, 4 T of parameters, 4 T of accumulated gradients, 4 T of a chunk's
gradient and 8 T of Adam's state: 20 T. With ZeRO-1 on N devices Adam's state is 8 T / N. With adapters alone T is their
number, and the model's parameters take 2 bytes each, in bfloat16. Activations of one chunk come on top; `model.remat`
keeps those of one layer instead of all.

The update of several devices has no activations, but the sum of their gradients beside what each has accumulated, and
the new one's pieces: 24 T, with ZeRO-1 12 T + 12 T / N. It decides where chunks are small. A step that is one program
adds up in place.

A CPU computes in float32 and needs more: the frozen parameters are widened as a whole; a block of queries has its
scores in memory several times, quadratic in a row's length; each block keeps the keys and values that it has seen;
matrix products have workspace that no compiler's account shows; and the interpreter with all libraries lives in the
same memory.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence

import jax

from bcl_grain.memory import GIB, MemoryModel
from bcl_grain.models import ModelDims
from train.attention import MAX_QUERY_BLOCKS, QUERY_BLOCK_TOKENS, pallas_takes
from train.global_programs import cut_axis
from train.lora import split_params
from train.loss import logits_at_once_on
from train.model import ModelConfig, init_params
from train.token_table import TokenTable

CPU_PROCESS_BYTES = 3 * GIB // 4
"""Measured: Python, JAX and its compiler's leavings, before the first array. On a CPU they take of the same memory."""

_CPU_SCORES = 8  # of one block, measured: scores, weights, their gradients: 7, and workspace

_STEP_TOKENS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """How a run uses its devices, as far as memory goes.

    Attributes:
        platform: "cpu" or "gpu".
        devices: All that take part, those of other processes included.
        zero1: Whether each keeps a part of the optimizer's state only.
        one_program: Whether the step is one program; else decoupled.
        one_record_rows: Whether no row holds two records; see `train.attention.attention_for`.
    """

    platform: str = "gpu"
    devices: int = 1
    zero1: bool = False
    one_program: bool = False
    one_record_rows: bool = False


def device_gib(device: jax.Device) -> float | None:
    """Returns a device's memory; None where nobody tells. A CPU's is its part of the machine's."""
    if device.platform == "cpu":
        try:
            whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError):
            return None
        return whole / GIB / jax.local_device_count("cpu")
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


def state_bytes(config: ModelConfig, setup: Setup = Setup()) -> int:
    """Returns what a device holds while it runs a chunk, whatever the chunk: parameters, gradients, optimizer state."""
    trained, cut = _trained_parameters(config, setup.devices if setup.zero1 else 1)
    state = 12 * trained + 8 * cut
    if config.lora is not None:
        state += config.num_parameters * (6 if setup.platform == "cpu" else 2)
    return state + (CPU_PROCESS_BYTES if setup.platform == "cpu" else 0)


def update_bytes(config: ModelConfig, setup: Setup = Setup()) -> int:
    """Returns what a device holds while all update: no activations, but what the devices add up.

    >>> config = ModelConfig(vocab_size=1024, layers=4, width=256)
    >>> [update_bytes(config, Setup(devices=n)) / config.num_parameters for n in (1, 8)]
    [20.0, 24.0]
    """
    trained, cut = _trained_parameters(config, setup.devices if setup.zero1 else 1)
    state = 12 * trained + 8 * cut
    if setup.devices > 1 and not setup.one_program:
        state += 4 * cut
    if config.lora is not None:
        state += config.num_parameters * 2
    return state + (CPU_PROCESS_BYTES if setup.platform == "cpu" else 0)


def peak_bytes(config: ModelConfig, rows: int, length: int, setup: Setup = Setup()) -> int:
    """Returns the memory of a step whose largest chunk is [rows, length].

    >>> config = ModelConfig(vocab_size=49152, layers=30, width=576, heads=9, kv_heads=3, head_dim=64, hidden=1536)
    >>> f"{peak_bytes(config, 2, 2048) / 2**30:.1f} GiB"
    '7.0 GiB'
    """
    return max(state_bytes(config, setup) + _chunk_bytes(config, rows, length, setup), update_bytes(config, setup))


def check_memory(
    config: ModelConfig,
    shapes: Sequence[tuple[int, int]],
    *,
    budget_gib: float,
    setup: Setup = Setup(),
    reserve: float = 0.1,
    records: TokenTable | None = None,
) -> None:
    """Refuses a run whose chunks do not fit a device.

    Args:
        config: The model.
        shapes: (rows, length) of every chunk that can come.
        budget_gib: Memory of the device.
        setup: How the run uses its devices.
        reserve: Share of the budget for what the arithmetic leaves out.
        records: Those to learn from: the message says what of them a cap would touch.

    Raises:
        ValueError: If one does not fit; the message says what takes how much, and the longest row that would fit.
    """
    usable = (1 - reserve) * budget_gib * GIB
    rows, length = max(shapes, key=lambda shape: _chunk_bytes(config, shape[0], shape[1], setup))
    if peak_bytes(config, rows, length, setup) <= usable:
        return
    state, update = state_bytes(config, setup), update_bytes(config, setup)
    process = f", {CPU_PROCESS_BYTES / GIB:g} GiB of them for the process itself" if setup.platform == "cpu" else ""
    chunk = _chunk_bytes(config, rows, length, setup)
    needed = (
        f"a chunk of {rows} x {length} tokens takes {chunk / GIB:.1f} GiB on top of "
        f"{state / GIB:.1f} GiB for parameters, gradients and optimizer state{process}; the update takes "
        f"{update / GIB:.1f} GiB; the device has {budget_gib:g} GiB, of which {reserve:.0%} are kept in reserve"
    )
    raise ValueError(f"{needed}: {_remedy(config, setup, usable, records)}")


def _remedy(config: ModelConfig, setup: Setup, usable: float, records: TokenTable | None) -> str:
    longest = 0
    while peak_bytes(config, 1, longest + _STEP_TOKENS, setup) <= usable:
        longest += _STEP_TOKENS
    zero1 = ", or set runtime.zero1" if setup.devices > 1 and not setup.zero1 and config.lora is None else ""
    if longest == 0:
        return f"no row fits: train adapters alone (model.lora){zero1}, or take a smaller model"
    touched = "" if records is None else f" ({_touched(records, longest)})"
    remat = "" if config.remat else ", or set model.remat"
    return (
        f"cap records at {longest} tokens{touched} and lay them out in rows of that length, one a chunk{remat}{zero1}"
    )


def _touched(records: TokenTable, cap: int) -> str:
    """Returns what of the records a cap would touch, in words."""
    above = records.select(records.sizes > cap)
    if not len(above):
        return "no training record is longer"
    tokens = above.sizes.sum(dtype=float) / records.sizes.sum(dtype=float)
    cut_off = int((above.cut(cap).loss_tokens == 0).sum())
    text = f"{len(above):,} of {len(records):,} training records are longer, with {tokens:.0%} of all tokens"
    if len(above) == len(records):
        text += ": none would be left if they are dropped"
    return f"{text}; truncated, {cut_off:,} of them have no token left that is learnt"


@functools.lru_cache(maxsize=16)
def _trained_parameters(config: ModelConfig, pieces: int) -> tuple[int, int]:
    """Returns the number of parameters that are trained, and of those whose optimizer state one device keeps."""
    abstract = split_params(jax.eval_shape(lambda: init_params(config, jax.random.key(0))))[0]
    leaves = jax.tree.leaves(abstract)
    cut = (x.size if cut_axis(x.shape, pieces) is None else x.size // pieces for x in leaves)
    return sum(x.size for x in leaves), sum(cut)


def _chunk_bytes(config: ModelConfig, rows: int, length: int, setup: Setup) -> int:
    """Returns the activations of a chunk [rows, length]."""
    cpu = setup.platform == "cpu"
    fused = cpu or setup.one_record_rows or pallas_takes(length, config.head_dim)
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
        activation_bytes=4 if cpu else 2,
        remat=config.remat,
        attention="fused" if fused else "dense",
        logits_at_once=logits_at_once_on(setup.platform),
    )
    return model.chunk_bytes(rows, length) + (_block_bytes(config, rows, length) if cpu else 0)


def _block_bytes(config: ModelConfig, rows: int, length: int) -> int:
    """Returns what `train.attention.blockwise_attention` takes: a block's scores, and what blocks keep of a layer."""
    block = min(length, max(QUERY_BLOCK_TOKENS, -(-length // MAX_QUERY_BLOCKS)))
    stops = sum(min(start + block, length) for start in range(0, length, block))
    scores = _CPU_SCORES * 4 * config.heads * block * length
    # Each block's keys and values up to its end, its queries, and its mask of one byte.
    kept = 4 * config.head_dim * (2 * config.kv_heads * stops + config.heads * length) + block * stops
    return rows * (scores + (1 if config.remat else config.layers) * kept)
