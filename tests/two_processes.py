"""One of two processes whose shapes differ at every step: writes what it gets.

    python tests/two_processes.py ADDRESS PROCESS decoupled|naive|agreeing|waiting|leaving|starting FILE

"decoupled" trains as the trainer does, "naive" calls one global jit, "agreeing" asks for agreement before that. In
"waiting" they have no shapes at all, but process 0 is late, twice; in "leaving" process 1 dies in an exchange; in
"starting" it can't read the model.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests.tiny_chunks import CONFIG, SHAPES, make_pack
from train import processes, starting
from train.compiling import CompileCounter
from train.processes import DisagreementError, agree, exchange, join, leave
from train.programs import compile_programs
from train.state import make_optimizer
from train.step import init_state, train_step

STEPS = 20


def pack_of(process: int, step: int) -> list[Any]:
    """Chunks of the one shape on process 0, of the other on process 1, and never as many."""
    return make_pack(num_chunks=1 + (step + process) % 3, seed=2 * step + process, shapes=[SHAPES[process]])


def both_ways(process: int) -> dict[str, Any]:
    """Trains with the other process, and once more alone on the packs of both."""
    return {"together": train([process], jax.devices()), "alone": train([0, 1], jax.local_devices())}


def train(processes: Sequence[int], devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Trains on the packs of these processes, with one local device."""
    optimizer = make_optimizer(total_steps=STEPS, warmup_steps=3, learning_rate=1e-2)
    programs = compile_programs(CONFIG, optimizer, SHAPES, devices=devices)
    state, counter, losses = init_state(programs, seed=0), CompileCounter(), []
    for step in range(STEPS):
        state, metrics = train_step(programs, state, [[chunk for p in processes for chunk in pack_of(p, step)]])
        losses.append(float(metrics["loss"]))
    compiled = counter.programs
    params = [np.asarray(leaf.addressable_data(0), float).ravel() for leaf in jax.tree.leaves(state.params)]
    return {"losses": losses, "params": np.concatenate(params).tolist(), "compiled": compiled}


def naive_losses(rows: int) -> list[float]:
    """Trains a linear model on `rows` rows of this process, joined with the other's as if they were as many."""
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    everywhere, by_rows = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("data")))  # type: ignore[no-untyped-call]
    rng = np.random.default_rng(jax.process_index())
    x, y = rng.normal(size=(rows, 4)).astype(np.float32), rng.normal(size=rows).astype(np.float32)

    @jax.jit
    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean((x @ w - y) ** 2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    w = jax.device_put(np.ones(4, np.float32), everywhere)
    losses = []
    for _ in range(3):
        # Nobody checks that the other process has as many rows.
        parts = [jax.make_array_from_process_local_data(by_rows, a) for a in (x, y)]  # type: ignore[no-untyped-call]
        w, loss = step(w, *parts)
        losses.append(float(loss))
    return losses


def patience(process: int) -> list[Any]:
    """Exchanges a value with a process that is late, and tries it once more where that is too late."""
    results: list[Any] = []
    for seconds, limit in ((0.5, 60.0), (2.0, 0.5)):
        processes.PATIENCE_SECONDS = limit
        if process == 0:
            time.sleep(seconds)
        try:
            results.append(exchange(process))
        except RuntimeError as error:
            results.append(str(error))
    return results


def deserted(process: int) -> str:
    """Returns what an exchange says if the other process dies in it."""
    exchange(process)
    if process == 1:
        processes._meet("exchange")  # its first half
        leave(9)
    try:
        exchange(process)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def unreadable(process: int) -> str:
    """Returns what a start says if the other process can read the model, or this one."""

    def first_state(prepared: Any, programs: Any) -> Any:
        if process == 1:
            raise OSError("a disk of one process alone")

    nothing: Any = None
    for name in ("frozen_params", "compile_sampler"):
        setattr(starting, name, lambda prepared, programs: nothing)
    starting.first_state = first_state
    try:
        starting.start(nothing, nothing)
    except starting.StartError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    address, process, how, output = sys.argv[1:]
    join(coordinator_address=address, num_processes=2, process_id=int(process))
    rows = 8 if process == "0" else 16
    try:
        if how == "agreeing":
            agree({"chunk shapes": [[rows, 4]]})
        if how == "waiting":
            result: Any = patience(int(process))
        elif how == "starting":
            result = unreadable(int(process))
        elif how == "leaving":
            result = deserted(int(process))
        else:
            result = both_ways(int(process)) if how == "decoupled" else naive_losses(rows)
    except DisagreementError as error:
        result = str(error)
    Path(output).write_text(json.dumps(result))
    if how == "leaving":
        leave(0)  # an orderly end would wait for the other
