"""A training step as it runs on the host, decoupled so that ranks may have different numbers and shapes of chunks.

1. `accumulate`, one program for each chunk shape and local device, with no collective inside, adds a chunk's gradient
   *sum*, loss sum and token count to the device's accumulator, whose memory it reuses.
2. `update`, one program for all devices of all processes, adds the accumulators up, divides by the global token
   count and lets the optimizer step.

One program with local shapes inside would not do: with several processes nothing would notice that they differ, and the
result would be silently wrong. The host runs ahead of the devices. A loop reads:

    enable_compile_cache(path)                                       # train.compiling, before anything compiles
    optimizer = make_optimizer(total_steps=...)                      # train.state
    programs = compile_programs(config, optimizer, layout.shapes)    # train.programs: the whole ladder
    state = init_state(programs, seed=0)                             # or begin_with(programs, pretrained_params),
                                                                     # or restored into programs.abstract_state
    for packs in batches:                                            # a list of chunks for each local device
        state, metrics = train_step(programs, state, packs)          # metrics: on the device, read them a step later
    totals = evaluate(programs, state.params, packs)

If the model has adapters, the parameters beside them, which don't change, are passed as `frozen` each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from train.model import Params
from train.programs import CHUNK_DTYPES, Key, Metrics, Programs, shardings
from train.state import TrainState

Chunk = Mapping[str, npt.NDArray[Any]]


def init_state(programs: Programs, *, seed: int) -> TrainState:
    """Returns the state before the first update: a function of the seed alone, on any number of devices."""
    return begin_with(programs, programs.init(np.int32(seed)))


def begin_with(programs: Programs, params: Params) -> TrainState:
    """Returns the state before the first update of given parameters, those that are trained.

    Args:
        programs: From `compile_programs`.
        params: Shapes, types and shardings as in `programs.abstract_state.params`. They are given up.
    """
    state: TrainState = programs.begin(params)
    return state


def train_step(
    programs: Programs, state: TrainState, packs: Sequence[Sequence[Chunk]], frozen: Params | None = None
) -> tuple[TrainState, Metrics]:
    """Makes one update. Returns before the devices are done; compiles nothing.

    Args:
        programs: From `compile_programs`.
        state: Its arrays are given up: use the returned one from now on.
        packs: For each of `programs.local_devices` its pack as chunks, of any number, none included.
        frozen: The parameters that are not trained, as in `programs.abstract_frozen`.

    Returns:
        The new state, and scalars on the devices: "loss" (nats a token that counts, the step's mean; 0 without any),
        "tokens" (that count, globally), "accuracy", "grad_norm" (before clipping), "learning_rate".

    Raises:
        ValueError: If there is not one pack for each local device, or a chunk is not one of the ladder. The state is
            still good then.
    """
    blank = [programs.zeros[device]()[0] for device in programs.local_devices]
    accumulators = _run(programs, programs.accumulate, blank, (state.params, frozen), packs)
    new_state, metrics = programs.update(state, _stack(programs, accumulators))
    return new_state, metrics


def evaluate(
    programs: Programs, params: Params, packs: Sequence[Sequence[Chunk]], frozen: Params | None = None
) -> Metrics:
    """Sums the loss over chunks. All processes call it together, each with its own share, and get the same result.

    Args:
        programs: From `compile_programs`.
        params: A state's.
        packs: For each of `programs.local_devices` its chunks, of any number, none included.
        frozen: The parameters that are not trained, as in `programs.abstract_frozen`.

    Returns:
        Scalars on the devices: "loss" (nats a token that counts, 0 without any), "tokens", "accuracy".

    Raises:
        ValueError: See `train_step`.
    """
    blank = [programs.zeros[device]()[1] for device in programs.local_devices]
    sums = _run(programs, programs.evaluate, blank, (params, frozen), packs)
    metrics: Metrics = programs.total(_stack(programs, sums))
    return metrics


def _run(
    programs: Programs,
    ladder: Mapping[Key, jax.stages.Compiled],
    carries: list[Any],
    given: tuple[Params, Params | None],
    packs: Sequence[Sequence[Chunk]],
) -> list[Any]:
    """Runs every device's chunks through the ladder's programs; returns what each device has carried along."""
    devices = programs.local_devices
    if len(packs) != len(devices):
        raise ValueError(f"got {len(packs)} packs for {len(devices)} local devices: give each device one")
    if (given[1] is None) != (programs.abstract_frozen is None):
        raise ValueError("frozen must hold the parameters that are not trained if, and only if, the model has adapters")
    keys = [[(_shape(programs, chunk), device) for chunk in pack] for device, pack in zip(devices, packs, strict=True)]
    views = [_on_device(given, device) for device in devices]
    # Chunk by chunk over all devices, so that none waits until the host has served another's whole pack.
    for turn in itertools.zip_longest(*(zip(k, p, strict=True) for k, p in zip(keys, packs, strict=True))):
        for i, entry in enumerate(turn):
            if entry is not None:
                key, chunk = entry
                arrays = {name: np.asarray(chunk[name], dtype) for name, dtype in CHUNK_DTYPES.items()}
                carries[i] = ladder[key](carries[i], *views[i], jax.device_put(arrays, devices[i]))
    return carries


def _shape(programs: Programs, chunk: Chunk) -> tuple[int, int]:
    for name in CHUNK_DTYPES:
        if name not in chunk:
            raise ValueError(f"chunk has no feature {name!r}, only {sorted(chunk)}: the layout makes it of records")
    shapes = {chunk[name].shape for name in CHUNK_DTYPES}
    shape = chunk["tokens"].shape
    if len(shapes) > 1 or shape not in programs.shapes:
        raise ValueError(
            f"chunk of shape {', '.join(map(str, sorted(shapes)))} is not in the ladder {programs.shapes} that was "
            "compiled: compile the programs for the shapes of the layout that made it"
        )
    return shape


def _on_device(tree: Any, device: jax.Device) -> Any:
    """Returns a device's copy of replicated arrays, without copying it."""

    def of(x: jax.Array) -> jax.Array:
        return next(shard.data for shard in x.addressable_shards if shard.device == device)

    return jax.tree.map(of, tree)


def _stack(programs: Programs, by_device: Sequence[Any]) -> Any:
    """Joins what the devices carry into global arrays, along their leading axis, without copying it."""
    _, sharding = shardings(programs.mesh)

    def of(*parts: jax.Array) -> jax.Array:
        shape = (programs.mesh.size, *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

    return jax.tree.map(of, *by_device)
