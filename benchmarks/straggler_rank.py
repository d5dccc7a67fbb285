"""One rank of `benchmarks.straggler`: runs the arms that a file describes, on one core, and writes when it did what.

`python -m benchmarks.straggler_rank JOB RANK`, started by the driver.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from bcl_grain.chunks import Block, fill_chunks, pack_columns
from benchmarks.straggler_arms import SPMD, Work
from train.attention import attention_for
from train.calibration import full_chunk
from train.compiling import CompileCounter
from train.loss import loss_sums
from train.model import ModelConfig, compute_dtype, graphdef
from train.programs import CHUNK_DTYPES, Programs, compile_programs
from train.state import Optimizer, TrainState, make_optimizer
from train.step import Chunk, init_state, train_step


class Rank:
    """Programs and state of this process."""

    def __init__(self, job: Mapping[str, Any], optimizer: Optimizer) -> None:
        self.config = ModelConfig(**job["model"])
        self.optimizer = optimizer
        shapes = [(rows, length) for rows, length in job["shapes"]]
        self.programs: Programs = compile_programs(self.config, optimizer, shapes)
        self.device = self.programs.local_devices[0]
        self.spmd = {
            rows: self._compile_spmd((rows, length)) for rows, length in {tuple(shape) for shape in job["spmd_shapes"]}
        }
        self.state = init_state(self.programs, seed=0)
        self.full = [full_chunk(shape, vocab_size=self.config.vocab_size) for shape in self.programs.shapes]

    def _compile_spmd(self, shape: tuple[int, int]) -> Any:
        """Compiles one global step for a chunk of one shape on every rank: gradients are summed inside."""
        graph = graphdef(self.config)
        attention, dtype = attention_for(self.device.platform), compute_dtype(self.device.platform)
        mesh = self.programs.mesh
        ranks = PartitionSpec("data")  # type: ignore[no-untyped-call]
        everywhere = PartitionSpec()  # type: ignore[no-untyped-call]

        def local_sums(params: Any, chunk: Any) -> Any:
            # Without this, differentiating by replicated parameters would add up over ranks once more.
            params = jax.lax.pcast(params, "data", to="varying")

            def loss(params: Any) -> Any:
                sums = loss_sums(nnx.merge(graph, params), chunk, attention=attention, dtype=dtype)
                return sums.loss, sums

            return jax.lax.psum(jax.grad(loss, has_aux=True)(params), "data")  # type: ignore[no-untyped-call]

        def step(state: TrainState, chunk: Any) -> tuple[TrainState, dict[str, Any]]:
            grads, sums = jax.shard_map(local_sums, mesh=mesh, in_specs=(everywhere, ranks), out_specs=everywhere)(
                state.params, chunk
            )
            grads = jax.tree.map(lambda x: x / sums.tokens, grads)
            updates, opt_state = self.optimizer.transform.update(grads, state.opt_state, state.params)
            metrics = {"loss": sums.loss / sums.tokens, "tokens": sums.tokens}
            params = optax.apply_updates(state.params, updates)
            return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

        sharding = NamedSharding(mesh, ranks)
        global_shape = (shape[0] * mesh.size, shape[1])
        chunk = {
            name: jax.ShapeDtypeStruct(global_shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]
            for name, dtype in CHUNK_DTYPES.items()
        }
        abstract = self.programs.abstract_state
        pinned = jax.tree.map(lambda x: x.sharding, abstract), NamedSharding(mesh, everywhere)
        return jax.jit(step, donate_argnums=0, out_shardings=pinned).lower(abstract, chunk).compile()

    def spmd_step(self, chunk: Chunk) -> dict[str, Any]:
        """Runs the global step on this rank's chunk; returns before it is done."""
        rows, length = chunk["tokens"].shape
        mesh = self.programs.mesh
        sharding = NamedSharding(mesh, PartitionSpec("data"))  # type: ignore[no-untyped-call]
        arrays = {
            name: jax.make_array_from_single_device_arrays(
                (rows * mesh.size, length), sharding, [jax.device_put(chunk[name], self.device)]
            )
            for name in CHUNK_DTYPES
        }
        self.state, metrics = self.spmd[rows](self.state, arrays)
        return metrics

    def step(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Runs the decoupled step; returns before it is done."""
        self.state, metrics = train_step(self.programs, self.state, [chunks])
        return metrics

    def accumulate(self, chunks: Sequence[Chunk]) -> Any:
        """Runs the local part of a step and waits for it."""
        params = jax.tree.map(lambda x: x.addressable_data(0), self.state.params)
        accumulator = self.programs.zeros[self.device]()[0]
        for chunk in chunks:
            program = self.programs.accumulate[chunk["tokens"].shape, self.device]
            accumulator = program(accumulator, params, None, jax.device_put(dict(chunk), self.device))
        return wait(accumulator)

    def update(self, accumulator: Any) -> dict[str, Any]:
        """Runs the global part of a step and waits for it."""
        mesh = self.programs.mesh
        sharding = NamedSharding(mesh, PartitionSpec("data"))  # type: ignore[no-untyped-call]
        stacked = jax.tree.map(
            lambda x: jax.make_array_from_single_device_arrays((mesh.size, *x.shape[1:]), sharding, [x]), accumulator
        )
        self.state, metrics = self.programs.update(self.state, stacked)
        wait((self.state, metrics))
        return metrics

    def barrier(self) -> None:
        """Returns when all ranks have come here: an update without a chunk needs them all."""
        wait(self.step([]))


def wait(tree: Any) -> Any:
    """Returns the arrays when they are there."""
    return jax.block_until_ready(tree)  # type: ignore[no-untyped-call]


def make_chunks(work: Work, length: int, vocab_size: int, seed: int) -> list[Chunk]:
    """Makes records of random tokens and lays them out as the work says."""
    rng = np.random.default_rng(seed)
    records = [
        {"tokens": rng.integers(0, vocab_size, n).astype(np.int32), "loss_mask": np.ones(n, np.float32)}
        for n in work.sizes
    ]
    columns = pack_columns(records, "tokens")
    return list(fill_chunks(Block(length, tuple(work.heights), work.rows), columns, "tokens", 0))


def calibrate(rank: Rank, repeats: int) -> dict[str, Any]:
    """Times every chunk shape, all ranks at once as in a step, and the update."""
    seconds: list[list[float]] = [[] for _ in rank.full]
    busy: list[list[float]] = [[] for _ in rank.full]
    update = []
    for _ in range(repeats):
        for chunk, taken, worked in zip(rank.full, seconds, busy, strict=True):
            rank.barrier()
            begin, busy_begin = time.monotonic(), time.process_time()
            rank.accumulate([chunk, chunk])
            taken.append((time.monotonic() - begin) / 2)
            worked.append((time.process_time() - busy_begin) / 2)
        rank.barrier()
        begin = time.monotonic()
        rank.barrier()
        update.append(time.monotonic() - begin)
    return {
        "shapes": [list(shape) for shape in rank.programs.shapes],
        "seconds": seconds,
        "busy": busy,
        "update": update,
    }


def run_blocked(rank: Rank, arm: str, steps: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
    """Runs an arm, waiting after the local part and after the update; logs the moments of each step."""
    begins, busy, locals_, ends, metrics = [], [], [], [], []
    rank.barrier()
    for chunks in steps:
        begins.append(time.monotonic())
        busy_begin = time.process_time()
        if arm == SPMD:
            metrics.append(rank.spmd_step(chunks[0]))
            wait((rank.state, metrics[-1]))
            locals_.append(time.monotonic())  # one program: the local part can't be told apart
        else:
            accumulator = rank.accumulate(chunks)
            locals_.append(time.monotonic())
            busy.append(time.process_time() - busy_begin)
            metrics.append(rank.update(accumulator))
        ends.append(time.monotonic())
    tokens = sum(float(m["tokens"]) for m in metrics)
    times = {"begin": begins, "busy": busy, "local": locals_, "end": ends}
    return {**times, "tokens": tokens, "loss": float(metrics[-1]["loss"])}


def run_free(rank: Rank, arm: str, steps: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
    """Runs an arm as a trainer does: the metrics of a step are read when the next one is under way."""
    rank.barrier()
    begin = time.monotonic()
    tokens, before = 0.0, None
    for chunks in steps:
        metrics = rank.spmd_step(chunks[0]) if arm == SPMD else rank.step(chunks)
        if before is not None:
            tokens += float(before["tokens"])
        before = metrics
    assert before is not None
    tokens += float(before["tokens"])
    wait(rank.state)
    return {"seconds": time.monotonic() - begin, "tokens": tokens}


def warm_up(rank: Rank) -> None:
    """Runs every program once, in the same order on all ranks."""
    for chunk in rank.full:
        rank.accumulate([chunk])
    rank.barrier()
    for rows in sorted(rank.spmd):
        rank.spmd_step(next(chunk for chunk in rank.full if len(chunk["tokens"]) == rows))
        wait(rank.state)


def main() -> None:
    """Runs the job's turns in order and writes what happened."""
    job_path, index = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads(job_path.read_text())
    if job["cores"]:
        os.sched_setaffinity(0, {job["cores"][index]})
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # type: ignore[no-untyped-call]
    jax.distributed.initialize(job["coordinator"], num_processes=job["ranks"], process_id=index)
    begin = time.monotonic()
    rank = Rank(job, make_optimizer(total_steps=10_000, learning_rate=1e-4))
    warm_up(rank)
    compile_seconds = time.monotonic() - begin
    counter = CompileCounter()
    calibrations, runs = [], []
    for turn in job["turns"]:
        if turn["kind"] == "calibrate":
            calibrations.append(calibrate(rank, turn["repeats"]))
            continue
        works = job["plans"][turn["corpus"]][turn["arm"]][index]
        steps = [
            make_chunks(Work(*work), job["length"], rank.config.vocab_size, seed=1000 * index + s)
            for s, work in enumerate(works)
        ]
        run = run_blocked if turn["kind"] == "blocked" else run_free
        runs.append({**turn, **run(rank, turn["arm"], steps)})
    result = {
        "runs": runs,
        "calibrations": calibrations,
        "compile_seconds": compile_seconds,
        "late_programs": counter.programs,
        "core": sorted(os.sched_getaffinity(0)),
    }
    job_path.with_name(f"rank-{index}.json").write_text(json.dumps(result))
    jax.distributed.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
