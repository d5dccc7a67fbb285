"""Whether the compiled programs fit the device, by what the compiler says of each: known before step 0."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax

from train.programs import Programs

GIB = 2**30


def check_program_memory(programs: Programs, *, budget_bytes: int | None = None) -> dict[str, int]:
    """Refuses a run of which one program does not fit its device beside what stays there.

    What the compiler does not know of, such as other programs' code and the allocator's gaps, is left out: a run that
    passes may still be short of memory.

    Args:
        programs: From `compile_programs`.
        budget_bytes: Memory of the smallest device; default: what the devices tell. CPUs tell nothing.

    Returns:
        Bytes that each program needs while it runs, what stays on the device included, by its name. Empty where the
        backend has no memory analysis.

    Raises:
        ValueError: If one does not fit; the message says which, and what would help.
    """
    needs = dict(_needs(programs))
    if budget_bytes is None:
        limits = [(device.memory_stats() or {}).get("bytes_limit") for device in programs.local_devices]
        known = [limit for limit in limits if limit]
        budget_bytes = min(known) if known else None
    if budget_bytes is None or not needs:
        return needs
    name = max(needs, key=lambda name: needs[name])
    if needs[name] > budget_bytes:
        raise ValueError(
            f"{name} needs {needs[name] / GIB:.2f} GiB, the device has {budget_bytes / GIB:.2f} GiB: make the chunks "
            "smaller (layout.rows_per_chunk, layout.length), set model.remat, train adapters (model.lora), or cut the "
            "optimizer's state up among devices (runtime.zero1)"
        )
    return needs


def _needs(programs: Programs) -> Iterator[tuple[str, int]]:
    """Yields each program's name and its need; one device stands for all of this process."""
    first = programs.local_devices[0]
    opt_state = bytes_on_device(programs.abstract_state.opt_state)
    for what, ladder in (("training on", programs.accumulate), ("evaluating", programs.evaluate)):
        for ((rows, length), device), program in ladder.items():
            if device == first and (peak := _peak(program)):
                yield f"{what} a chunk of {rows} x {length} tokens", peak + opt_state
    if peak := _peak(programs.update):
        if programs.spmd_packs is None:
            yield "the update", peak + bytes_on_device(programs.abstract_frozen)
        else:
            yield "the step", peak


def bytes_on_device(tree: Any) -> int:
    """Returns what abstract arrays take on one of the devices that they lie on."""
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))


def _peak(program: jax.stages.Compiled) -> int:
    """Returns the bytes that a program needs on a device while it runs; 0 if the backend does not say."""
    analysis: Any = program.memory_analysis()
    if analysis is None:
        return 0
    return int(
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
