"""A training step as it runs on the host: decoupled, or one program for all devices.

Decoupled, so that ranks may have different numbers and shapes of chunks:

1. `accumulate`, one program for each chunk shape and local device, with no collective inside, adds a chunk's gradient
   *sum*, loss sum and token count to the device's accumulator, whose memory it reuses.
2. `update`, one program for all devices of all processes, adds the accumulators up, divides by the global token
   count and lets the optimizer step.

One program with local shapes inside would not do: with several processes nothing would notice that they differ, and the
result would be silently wrong. Where every pack has the same shape the whole step can be one program (`spmd_packs`).
The host runs ahead of the devices. A loop reads:

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from train.global_programs import Metrics
from train.model import Params
from train.notes import Note, encode
from train.programs import CHUNK_DTYPES, Key, Programs, Shape, chunk_sharding, shardings
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
    programs: Programs,
    state: TrainState,
    packs: Sequence[Sequence[Chunk]],
    frozen: Params | None = None,
    notes: Sequence[Note] | None = None,
    observe: Callable[[Sequence[jax.Array]], None] | None = None,
) -> tuple[TrainState, Metrics]:
    """Makes one update. Returns before the devices are done; compiles nothing.

    Args:
        programs: From `compile_programs`.
        state: Its arrays are given up: use the returned one from now on.
        packs: For each of `programs.local_devices` its packs as chunks, of any number, none included.
        frozen: The parameters that are not trained, as in `programs.abstract_frozen`.
        notes: For each of `programs.local_devices` what it tells the others; all processes pass them, or none does.
        observe: Called between the local part and the update with an array of each local device that is ready when its
            local part is. Not called if the step is one program.

    Returns:
        The new state, and scalars on the devices: "loss" (nats a token that counts, the step's mean; 0 without any),
        "tokens" (that count, globally), "accuracy", "grad_norm" (before clipping), "learning_rate"; with `notes` also
        "notes", those of all devices (see `train.notes.decode`).

    Raises:
        ValueError: If there is not one list for each local device, a chunk is not one of the ladder, or a step that is
            one program does not get the chunks it was compiled for. The state is still good then.
    """
    told = _send(programs, [encode(note) for note in notes or [Note()] * len(programs.local_devices)])
    if programs.spmd_packs is not None:
        _check(programs, packs, frozen)
        new_state, metrics = programs.update(state, frozen, _global_chunks(programs, packs), told)
    else:
        blank = [programs.zeros[device]()[0] for device in programs.local_devices]
        accumulators = _run(programs, programs.accumulate, blank, (state.params, frozen), packs)
        if observe is not None:
            observe([accumulator.sums.loss for accumulator in accumulators])
        new_state, metrics = programs.update(state, _stack(programs, accumulators), told)
    if notes is None:
        del metrics["notes"]
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
    shapes = _check(programs, packs, given[1])
    keys = [[(shape, device) for shape in of_device] for device, of_device in zip(devices, shapes, strict=True)]
    views = [_on_device(given, device) for device in devices]
    # Chunk by chunk over all devices, so that none waits until the host has served another's whole pack.
    for turn in itertools.zip_longest(*(zip(k, p, strict=True) for k, p in zip(keys, packs, strict=True))):
        for i, entry in enumerate(turn):
            if entry is not None:
                key, chunk = entry
                carries[i] = ladder[key](carries[i], *views[i], jax.device_put(_arrays(chunk), devices[i]))
    return carries


def _check(programs: Programs, packs: Sequence[Sequence[Chunk]], frozen: Params | None) -> list[list[Shape]]:
    """Makes sure that the programs can run the chunks; returns their shapes."""
    devices = programs.local_devices
    if len(packs) != len(devices):
        raise ValueError(f"got {len(packs)} packs for {len(devices)} local devices: give each device one")
    if (frozen is None) != (programs.abstract_frozen is None):
        raise ValueError("frozen must hold the parameters that are not trained if, and only if, the model has adapters")
    return [[_shape(programs, chunk) for chunk in pack] for pack in packs]


def _global_chunks(programs: Programs, packs: Sequence[Sequence[Chunk]]) -> dict[str, jax.Array]:
    """Joins the chunks of all devices into arrays [packs of a device, devices * rows, length]."""
    counts = [len(pack) for pack in packs]
    packs_of_device = programs.spmd_packs
    if packs_of_device is None or set(counts) != {packs_of_device}:
        raise ValueError(
            f"got {counts} chunks for the local devices, the one program takes {programs.spmd_packs} on each: every "
            "pack must be one chunk, and each device have as many"
        )
    (rows, length), devices = programs.shapes[0], programs.mesh.size
    stacked = [{name: np.stack(parts) for name, parts in _columns(pack).items()} for pack in packs]
    placed = [jax.device_put(arrays, device) for arrays, device in zip(stacked, programs.local_devices, strict=True)]
    sharding = chunk_sharding(programs.mesh)
    shape = (packs_of_device, devices * rows, length)
    return {
        name: jax.make_array_from_single_device_arrays(shape, sharding, [arrays[name] for arrays in placed])
        for name in CHUNK_DTYPES
    }


def _columns(pack: Sequence[Chunk]) -> dict[str, list[npt.NDArray[Any]]]:
    arrays = [_arrays(chunk) for chunk in pack]
    return {name: [chunk[name] for chunk in arrays] for name in CHUNK_DTYPES}


def _arrays(chunk: Chunk) -> dict[str, npt.NDArray[Any]]:
    return {name: np.asarray(chunk[name], dtype) for name, dtype in CHUNK_DTYPES.items()}


def _send(programs: Programs, rows: Sequence[npt.NDArray[np.float32]]) -> jax.Array:
    """Puts a row on each local device, as its part of a global array."""
    placed = [jax.device_put(row, device) for row, device in zip(rows, programs.local_devices, strict=True)]
    array: jax.Array = _stack(programs, placed)
    return array


def _shape(programs: Programs, chunk: Chunk) -> Shape:
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
