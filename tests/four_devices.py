"""Trains on the same packs with one and with four forced local devices, and prints what came of it as JSON.

A process of its own: XLA reads the number of devices once, when it starts.
"""

from __future__ import annotations

import json
import os
from typing import Any

# Only as a program: collecting doctests imports this file too, and must not change the devices of the other tests.
# Unoptimised code: every device has programs of its own to compile.
if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"

import jax
import numpy as np

from tests.tiny_chunks import CONFIG, SHAPES, make_pack
from train.compiling import CompileCounter
from train.memory import device_gib
from train.program_memory import check_program_memory
from train.programs import compile_programs
from train.state import make_optimizer
from train.step import evaluate, init_state, train_step

STEPS = 20


def flat(params: Any) -> Any:
    """Returns all parameters as one float64 vector."""
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(params)])


def run(num_devices: int, *, even: bool = False, **options: Any) -> dict[str, Any]:
    """Trains; the four packs of a step go to as many devices, or one after the other to one.

    With `even` every pack has two chunks, else their numbers are unequal and now and then a device has none.
    """
    optimizer = make_optimizer(total_steps=STEPS, warmup_steps=3, learning_rate=1e-2)
    programs = compile_programs(CONFIG, optimizer, SHAPES[:1], devices=jax.devices()[:num_devices], **options)
    state = init_state(programs, seed=0)
    start, counter, losses = flat(state.params), CompileCounter(), []
    for step in range(STEPS):
        packs = [
            make_pack(num_chunks=2 if even else (step + 2 * rank) % 6, seed=4 * step + rank, shapes=SHAPES[:1])
            for rank in range(4)
        ]
        if num_devices == 1:
            packs = [[chunk for pack in packs for chunk in pack]]
        state, metrics = train_step(programs, state, packs)
        losses.append(float(metrics["loss"]))
    totals = {name: float(value) for name, value in evaluate(programs, state.params, packs).items()}
    compiled = counter.programs
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(state.opt_state) for shard in leaf.addressable_shards[:1])
    return {
        "start": start,
        "end": flat(state.params),
        "losses": losses,
        "eval": totals,
        "compiled": compiled,
        "opt_state_bytes": held,  # on the first device
        "needs": check_program_memory(programs),
    }


def compare(one: dict[str, Any], four: dict[str, Any]) -> dict[str, Any]:
    """Returns what differs between a run on one device and the same on four."""
    assert (one["start"] == four["start"]).all()
    norm = np.linalg.norm(one["end"])
    return {
        "difference": np.linalg.norm(four["end"] - one["end"]) / norm,
        "moved": np.linalg.norm(one["end"] - one["start"]) / norm,
        "compiled": one["compiled"] + four["compiled"],
        "losses": [one["losses"], four["losses"]],
        "eval": [one["eval"], four["eval"]],
        "opt_state_bytes": [one["opt_state_bytes"], four["opt_state_bytes"]],
        "needs": [one["needs"], four["needs"]],
    }


if __name__ == "__main__":
    uneven, even = run(1), run(1, even=True)
    result = {
        "decoupled": compare(uneven, run(4)),
        "zero1": compare(uneven, run(4, zero1=True)),
        "spmd": compare(even, run(4, even=True, spmd_packs=2)),
        "spmd-zero1": compare(even, run(4, even=True, spmd_packs=2, zero1=True)),
    }
    print(json.dumps(result | {"device_gib": device_gib(jax.devices()[0])}))
