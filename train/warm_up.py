"""Before the first step: does the run fit the device, and everything that it will need compiled."""

from __future__ import annotations

import jax

from bcl_grain.memory import GIB
from train.memory import Setup, check_memory, device_gib, peak_bytes
from train.prepare import Prepared
from train.program_memory import check_program_memory
from train.programs import Programs, compile_programs
from train.token_files import Say


def check_fit(prepared: Prepared) -> float:
    """Returns what a device will need, in GiB, by arithmetic alone.

    A limit is `runtime.memory_gib`, or else, for a pretrained model, the device's own.

    Raises:
        ValueError: If that is more than the limit.
    """
    device = jax.local_devices()[0]
    setup = Setup(
        platform=device.platform,
        devices=prepared.topology.ranks,
        zero1=prepared.config.runtime.zero1,
        one_program=prepared.spmd_packs is not None,
        one_record_rows=prepared.one_record_rows,
    )
    shapes = prepared.lay_out.layout.shapes
    budget_gib = prepared.config.runtime.memory_gib
    if budget_gib is None and prepared.pretrained is not None:
        budget_gib = device_gib(device)
    if budget_gib is not None:
        check_memory(prepared.model, shapes, budget_gib=budget_gib, setup=setup, records=prepared.train)
    return max(peak_bytes(prepared.model, rows, length, setup) for rows, length in shapes) / GIB


def warm_up(prepared: Prepared, say: Say = print) -> Programs:
    """Compiles everything that the run will need, and makes sure that it fits the device.

    Raises:
        ValueError: If it does not, or nothing can be compiled for these settings.
    """
    check_fit(prepared)
    programs = compile_programs(
        prepared.model,
        prepared.optimizer,
        prepared.lay_out.layout.shapes,
        expected_tokens=prepared.expected_tokens,
        one_record_rows=prepared.one_record_rows,
        attention=prepared.config.runtime.attention,
        zero1=prepared.config.runtime.zero1,
        spmd_packs=prepared.spmd_packs,
    )
    compiled, cache_hits, seconds = programs.warm_up
    say(
        f"warm-up: {compiled} programs for the chunk shapes {programs.shapes} in {seconds:.1f} s, {cache_hits} of them "
        "from the compile cache"
    )
    needs = check_program_memory(programs)
    if needs:
        name = max(needs, key=lambda name: needs[name])
        say(f"memory: {needs[name] / GIB:.2f} GiB on a device at most, for {name}, by the compiler's account")
    return programs
