"""The compiled programs of a training step. `train.step` runs them, and says why there are two kinds.

Everything is compiled ahead of time, for the shapes that the layout can make; nothing is compiled later. Local programs
are compiled for each local device: one that is committed to a device cannot serve another.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from train.attention import Attention, AttentionName, attention_for
from train.compiling import CompileCounter
from train.global_programs import cut_up, spmd_function, total, update_function
from train.lora import FROZEN_DTYPE, join_params, split_params
from train.loss import Sums, logits_at_once_on, loss_sums
from train.model import ModelConfig, Params, compute_dtype, graphdef, init_params
from train.notes import FIELDS as NOTE_NAMES
from train.processes import main_first
from train.state import Optimizer, TrainState, new_state

Shape = tuple[int, int]
Key = tuple[Shape, jax.Device]

CHUNK_DTYPES = {
    "tokens": np.dtype(np.int32),
    "tokens_segment_ids": np.dtype(np.int32),
    "tokens_positions": np.dtype(np.int32),
    "loss_mask": np.dtype(np.float32),
}
"""The features of a chunk that a program takes; others stay on the host."""


class Accumulator(NamedTuple):
    """Sums over the chunks of one device since the last update. Every array has a leading axis for the devices.

    Attributes:
        grads: Gradient of the loss sum, a pytree like the parameters that are trained.
        sums: Loss, tokens and correct predictions.
    """

    grads: Params
    sums: Sums


class WarmUp(NamedTuple):
    """What compiling took on this process.

    Attributes:
        programs: Programs compiled or taken from the persistent cache.
        cache_hits: Those taken from there.
        seconds: Time, waiting for process 0 included.
    """

    programs: int
    cache_hits: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Programs:
    """Everything compiled for a run, and where it runs.

    Attributes:
        mesh: All devices of all processes, one axis "data".
        local_devices: Those of this process, in the mesh's order: whose packs `train_step` takes.
        shapes: The ladder: (rows, length) of every chunk that can come.
        spmd_packs: Packs of each device in a step that is one program; None if the step is decoupled.
        abstract_state: A `TrainState` of shapes, dtypes and shardings: what a checkpoint is restored into.
        abstract_frozen: The same of the parameters that are not trained; None if all are.
        init: seed -> fresh parameters, those that are trained.
        begin: such parameters -> the state before the first update; they are donated.
        zeros: () -> (accumulator, sums), by device.
        accumulate: (accumulator, params, frozen, chunk) -> accumulator; the first is donated.
        evaluate: (sums, params, frozen, chunk) -> sums; the first is donated.
        update: (state, accumulators of all devices, their notes) -> (state, metrics); the first is donated. In one
            program: (state, frozen, chunks of all devices, their notes) -> the same.
        total: sums of all devices -> metrics.
        warm_up: What compiling took.
    """

    mesh: Mesh
    local_devices: tuple[jax.Device, ...]
    shapes: tuple[Shape, ...]
    spmd_packs: int | None
    abstract_state: TrainState
    abstract_frozen: Params | None
    init: jax.stages.Compiled
    begin: jax.stages.Compiled
    zeros: Mapping[jax.Device, jax.stages.Compiled]
    accumulate: Mapping[Key, jax.stages.Compiled]
    evaluate: Mapping[Key, jax.stages.Compiled]
    update: jax.stages.Compiled
    total: jax.stages.Compiled
    warm_up: WarmUp


def compile_programs(
    config: ModelConfig,
    optimizer: Optimizer,
    shapes: Sequence[Shape],
    *,
    devices: Sequence[jax.Device] | None = None,
    expected_tokens: float | None = None,
    one_record_rows: bool = False,
    attention: AttentionName = "auto",
    zero1: bool = False,
    spmd_packs: int | None = None,
) -> Programs:
    """Compiles two programs for each shape and local device, one more for each device, and four for all.

    All processes call it together; process 0 goes first, so that the others may find its programs in the cache.

    Args:
        config: The model. If it has adapters they alone are trained.
        optimizer: See `make_optimizer`.
        shapes: A layout's `shapes`.
        devices: All that take part, those of other processes included; default `jax.devices()`.
        expected_tokens: Constant that gradients are divided by instead of a step's own global token count: then a
            token weighs the same in whatever step it comes. The mean number of tokens that count in a step.
        one_record_rows: Whether the layout puts one record in a row; see `attention_for`.
        attention: See `attention_for`.
        zero1: Whether each device keeps a part of the optimizer's state only (ZeRO-1), and updates that part.
        spmd_packs: Make the whole step one program, for so many packs of the one shape on each device. Default: the
            decoupled step.

    Raises:
        ValueError: If there is no shape, no local device, `expected_tokens` is not positive, or the attention does not
            serve the platform or the rows.
    """
    shapes = tuple(sorted(set(shapes)))
    if not shapes:
        raise ValueError("shapes is empty: pass the layout's shapes")
    if expected_tokens is not None and not expected_tokens > 0:
        raise ValueError(f"expected_tokens must be positive, got {expected_tokens!r}")
    if spmd_packs is not None and (len(shapes) > 1 or spmd_packs < 1):
        raise ValueError(
            f"one program for all devices needs one shape and at least one pack, got {shapes}, {spmd_packs}"
        )
    start, counter = time.monotonic(), CompileCounter()
    mesh = Mesh(np.array(jax.devices() if devices is None else devices), ("data",), axis_types=(AxisType.Auto,))
    local_devices = tuple(d for d in mesh.devices.flat if d.process_index == jax.process_index())
    if not local_devices:
        raise ValueError(f"none of the devices {list(mesh.devices.flat)} belongs to this process")
    everywhere, by_device = shardings(mesh)

    def init(seed: jax.Array) -> Params:
        trained: Params = split_params(init_params(config, jax.random.key(seed)))[0]
        return trained

    def begin(params: Params) -> TrainState:
        return new_state(params, optimizer)

    seed = _abstract(np.int32(0), everywhere)
    abstract_state = _abstract_state(jax.eval_shape(begin, jax.eval_shape(init, seed)), mesh, zero1)
    abstract_frozen = _abstract(_frozen(config), everywhere)
    platform = local_devices[0].platform
    mixing = attention_for(platform, one_record_rows=one_record_rows, name=attention)
    functions = _local_functions(config, abstract_state.params, platform, mixing)
    update = update_function(optimizer, expected_tokens, cut_up(abstract_state.params, mesh) if zero1 else None)
    blank = jax.eval_shape(functions.zeros)

    zeros, accumulate, evaluate = {}, {}, {}
    # Process 0 alone writes the persistent cache; the others find there what it wrote.
    with main_first("local programs"):
        for device in local_devices:
            here = SingleDeviceSharding(device)
            given = _abstract(abstract_state.params, here), _abstract(abstract_frozen, here)
            accumulator, sums = _abstract(blank, here)
            zeros[device] = jax.jit(functions.zeros, out_shardings=here).lower().compile()
            for shape in shapes:
                chunk = _abstract_chunk(shape, here)
                if spmd_packs is None:
                    into = jax.jit(functions.accumulate, donate_argnums=0).lower(accumulator, *given, chunk)
                    accumulate[shape, device] = into.compile()
                into = jax.jit(functions.evaluate, donate_argnums=0).lower(sums, *given, chunk)
                evaluate[shape, device] = into.compile()
    # Those of all devices are compiled by all processes at once: compilers of some backends talk to each other then.
    accumulators, sums = _abstract(blank, by_device, num_devices=mesh.size)
    notes = _abstract(np.empty((mesh.size, len(NOTE_NAMES)), np.float32), by_device)
    # Pinned, or the compiler could return a state that its own next call does not take.
    begun = jax.tree.map(lambda x: x.sharding, abstract_state)
    if spmd_packs is None:
        step = jax.jit(update, donate_argnums=0, out_shardings=(begun, everywhere))
        lowered = step.lower(abstract_state, accumulators, notes)
    else:
        rows, length = shapes[0]
        chunks = _abstract_chunk((spmd_packs, mesh.size * rows, length), chunk_sharding(mesh))
        whole = spmd_function(mesh, functions.zeros, functions.accumulate, update)
        step = jax.jit(whole, donate_argnums=0, out_shardings=(begun, everywhere))
        lowered = step.lower(abstract_state, abstract_frozen, chunks, notes)
    return Programs(
        mesh=mesh,
        local_devices=local_devices,
        shapes=shapes,
        spmd_packs=spmd_packs,
        abstract_state=abstract_state,
        abstract_frozen=abstract_frozen,
        init=jax.jit(init, out_shardings=everywhere).lower(seed).compile(),
        begin=jax.jit(begin, donate_argnums=0, out_shardings=begun).lower(abstract_state.params).compile(),
        zeros=zeros,
        accumulate=accumulate,
        evaluate=evaluate,
        update=lowered.compile(),
        total=jax.jit(total, out_shardings=everywhere).lower(sums).compile(),
        warm_up=WarmUp(counter.programs, counter.cache_hits, time.monotonic() - start),
    )


def shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Returns how arrays lie on the mesh: a copy on every device, or cut along the leading axis."""
    specs = PartitionSpec(), PartitionSpec("data")  # type: ignore[no-untyped-call]
    return NamedSharding(mesh, specs[0]), NamedSharding(mesh, specs[1])


def chunk_sharding(mesh: Mesh) -> NamedSharding:
    """Returns how the chunks of all devices lie on the mesh, [packs of a device, devices * rows, length]."""
    return NamedSharding(mesh, PartitionSpec(None, "data"))  # type: ignore[no-untyped-call]


class _LocalFunctions(NamedTuple):
    zeros: Any
    accumulate: Any
    evaluate: Any


def _local_functions(
    config: ModelConfig, abstract_params: Params, platform: str, attention: Attention
) -> _LocalFunctions:
    graph = graphdef(config)
    dtype, logits = compute_dtype(platform), logits_at_once_on(platform)

    def sums_of(params: Params, frozen: Params | None, chunk: Mapping[str, jax.Array]) -> Sums:
        model = nnx.merge(graph, join_params(params, frozen))
        return loss_sums(model, chunk, attention=attention, dtype=dtype, logits_at_once=logits)

    def zeros() -> tuple[Accumulator, Sums]:
        def no_sums() -> Sums:
            return Sums(*(jnp.zeros(1) for _ in Sums._fields))

        grads = jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), abstract_params)
        return Accumulator(grads, no_sums()), no_sums()

    def accumulate(
        accumulator: Accumulator, params: Params, frozen: Params | None, chunk: Mapping[str, jax.Array]
    ) -> Accumulator:
        def loss(params: Params) -> tuple[Any, Sums]:
            sums = sums_of(params, frozen, chunk)
            return sums.loss, sums

        grads, sums = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda a, x: a + x[None], accumulator, Accumulator(grads, sums))

    def evaluate(sums: Sums, params: Params, frozen: Params | None, chunk: Mapping[str, jax.Array]) -> Sums:
        return jax.tree.map(lambda a, x: a + x[None], sums, sums_of(params, frozen, chunk))

    return _LocalFunctions(zeros, accumulate, evaluate)


def _frozen(config: ModelConfig) -> Any:
    """Returns shapes and types of the parameters that are not trained, None if all are."""
    frozen = split_params(jax.eval_shape(lambda: init_params(config, jax.random.key(0))))[1]
    return jax.tree.map(lambda x: x.update(dtype=FROZEN_DTYPE), frozen)


def _abstract_state(state: TrainState, mesh: Mesh, zero1: bool) -> TrainState:
    everywhere, _ = shardings(mesh)
    abstract: TrainState = _abstract(state, everywhere)
    if not zero1:
        return abstract
    opt_state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),  # type: ignore[no-untyped-call]
        abstract.opt_state,
        cut_up(abstract.opt_state, mesh),
    )
    return dataclasses.replace(abstract, opt_state=opt_state)


def _abstract_chunk(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> Any:
    return _abstract({name: np.empty(shape, dtype) for name, dtype in CHUNK_DTYPES.items()}, sharding)


def _abstract(tree: Any, sharding: jax.sharding.Sharding, *, num_devices: int | None = None) -> Any:
    """Returns shapes with a sharding; with `num_devices`, as the leading axis instead of the one of length 1."""

    def of(x: Any) -> jax.ShapeDtypeStruct:
        shape = x.shape if num_devices is None else (num_devices, *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)  # type: ignore[no-untyped-call]

    return jax.tree.map(of, tree)
