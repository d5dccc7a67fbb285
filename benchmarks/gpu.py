"""What one accelerator does with the trainer's programs: `python -m benchmarks.gpu`, at most 8 minutes on one H200.

Sections, each with a time limit, an error of its own in the results, and results written as soon as they are there:

  attention   every path against a float32 reference: forward, backward, grouped queries, padding, segments, time
  ladder      a decoder of 1 B parameters: compile times (cold), seconds of each chunk shape, tokens/s, model FLOP
              utilisation, and how well their sum predicts whole steps
  cached      the same programs once more: compile times with a warm cache
  tables      jobs of 8 to 32 ranks, simulated with these measured seconds
  lowering    without a GPU: the GPU's programs are lowered for it, so that its first run holds no surprises

`--toy` runs all of it in small, also on a CPU, as the tests do. Needs jax, flax, optax, orbax and numpy; Grain need
not be installed. The results go to benchmarks/results/gpu.json (`--output`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import benchmarks.without_grain  # noqa: F401

# isort: split
import jax
import numpy as np
from flax import nnx

from bcl_grain.cost_table import TableCost
from bcl_grain.layouts import RowPackedLayout, Shape
from bcl_grain.workloads import load_workload
from benchmarks.attention_paths import Case, candidates, compare, lower_for_gpu, reference
from benchmarks.result import RESULTS, write_result
from benchmarks.straggler_arms import ARMS, chunk_counts, make_plan
from train.attention import AttentionName, attention_for, packed_gpu_attention
from train.calibration import calibrate
from train.compiling import CompileCounter, enable_compile_cache
from train.loss import logits_at_once_on, loss_sums
from train.model import ModelConfig, compute_dtype, graphdef, init_params
from train.programs import CHUNK_DTYPES, Programs, compile_programs
from train.state import make_optimizer
from train.step import Chunk

PEAK_FLOPS = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12}
"""Dense bfloat16 FLOP/s by a part of the device's name, as NVIDIA's data sheets state them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What is run.

    Attributes:
        model: Dimensions, those of a Llama of 1.2 B parameters.
        layout: The ladder: rows and lengths of the chunks.
        cases: Comparisons of attention paths.
        corpora: Length tables of the simulated jobs.
        ranks: Their ranks.
        steps: Their steps.
        pack_size: Records of a rank in a step.
        lookahead: Pool in steps.
        repeats: Measurements of each time.
        packs: Whole steps that are measured.
        limits: Seconds of each section.
    """

    model: ModelConfig = dataclasses.field(
        default_factory=lambda: ModelConfig(
            vocab_size=128_256, layers=16, width=2048, heads=32, kv_heads=8, head_dim=64, hidden=8192
        )
    )
    layout: RowPackedLayout = dataclasses.field(
        default_factory=lambda: RowPackedLayout(length=2048, rows_per_chunk=4, heights=(1,), lengths=(1024,))
    )
    cases: tuple[Case, ...] = (
        Case(rows=4, length=2048, heads=32, kv_heads=8, head_dim=64, one_record_rows=False),
        Case(rows=4, length=2048, heads=32, kv_heads=8, head_dim=64, one_record_rows=True),
        Case(rows=4, length=2048, heads=32, kv_heads=8, head_dim=128, one_record_rows=False),
        Case(rows=2, length=4096, heads=32, kv_heads=32, head_dim=64, one_record_rows=False),
    )
    corpora: tuple[str, ...] = ("medquad", "taskmaster4", "alpaca_eval_outputs", "p3_t0_mix")
    ranks: tuple[int, ...] = (8, 16, 32)
    steps: int = 100
    pack_size: int = 64
    lookahead: int = 8
    repeats: int = 7
    packs: int = 8
    limits: dict[str, float] = dataclasses.field(
        default_factory=lambda: {"attention": 100, "ladder": 250, "cached": 60, "tables": 70, "lowering": 60}
    )


TOY = Setup(
    model=ModelConfig(vocab_size=32, layers=1, width=16, heads=2, kv_heads=1, head_dim=16, hidden=16),
    layout=RowPackedLayout(length=128, rows_per_chunk=2, heights=(1,)),
    cases=tuple(
        Case(rows=3, length=128, heads=2, kv_heads=1, head_dim=16, one_record_rows=one) for one in (False, True)
    ),
    corpora=("gsm8k_train",),
    ranks=(2,),
    steps=6,
    pack_size=4,
    lookahead=3,
    repeats=2,
    packs=3,
)


class Benchmark:
    """Runs the sections; keeps what later ones need of earlier ones."""

    def __init__(self, setup: Setup, cache: pathlib.Path) -> None:
        self.setup = setup
        self.device = jax.local_devices()[0]
        self.attention_name: AttentionName = "auto"
        self.programs: Programs | None = None
        self.cost: TableCost | None = None
        enable_compile_cache(cache)

    def attention(self, figures: dict[str, Any]) -> None:
        """See the module."""
        dtype = compute_dtype(self.device.platform)
        for case in self.setup.cases:
            by_path, want = figures.setdefault(case.name, {}), reference(case, dtype)
            for name, make in candidates(self.device.platform, one_record_rows=case.one_record_rows):
                with _recorded(by_path, name) as path:
                    path |= compare(case, make(), want, dtype=dtype, repeats=self.setup.repeats)
            good = [name for name, path in by_path.items() if "error" not in path and path["finite"]]
            for name in good:
                path = by_path[name]
                print(
                    f"  {case.name:45} {name:16} forward {1e3 * path['forward_seconds']:8.3f} ms, with backward "
                    f"{1e3 * path['forward_backward_seconds']:8.3f} ms, errors {path['forward_error']:.1e} "
                    f"{max(path['gradient_errors']):.1e}, leak {path.get('segment_leak', 0)}, "
                    f"{path['temporary_mib']} MiB",
                    flush=True,
                )
            by_path["fastest"] = min(good, key=lambda name: by_path[name]["forward_backward_seconds"], default=None)

    def ladder(self, figures: dict[str, Any]) -> None:
        """See the module."""
        self.programs = self._choose_attention(figures)
        result = calibrate(
            self.programs,
            self._packs(),
            vocab_size=self.setup.model.vocab_size,
            repeats=self.setup.repeats,
        )
        self.cost = result.cost
        flops, peak = self.setup.model.cost(), peak_flops(self.device.device_kind)
        figures |= {
            "parameters": self.setup.model.num_parameters,
            "peak_flops": peak,
            "attention": self.attention_name,
            "segments_ratio": result.segments_ratio,
            "update_seconds": result.update.seconds,
            "prediction": result.prediction.figures(),
            "memory_gib": {
                name: value / 2**30 for name, value in (self.device.memory_stats() or {}).items() if "bytes" in name
            },
        }
        figures["chunks"] = {}
        for (rows, length), timing in result.chunks.items():
            utilisation = flops.of_chunk(rows, length) / timing.seconds / peak if peak else None
            figures["chunks"][f"{rows}x{length}"] = {
                **dataclasses.asdict(timing),
                "tokens_per_second": rows * length / timing.seconds,
                "model_flop_utilisation": utilisation,
            }
            print(
                f"  {rows} x {length}: {1e3 * timing.seconds:.2f} ms, {rows * length / timing.seconds:,.0f} tokens/s, "
                f"utilisation {'unknown' if utilisation is None else f'{utilisation:.1%}'}",
                flush=True,
            )
        print(f"  update {1e3 * result.update.seconds:.2f} ms; whole steps: {figures['prediction']}", flush=True)

    def cached(self, figures: dict[str, Any]) -> None:
        """See the module."""
        if self.programs is None:
            raise RuntimeError("section ladder did not get so far as to compile")
        self.programs = None
        jax.clear_caches()  # type: ignore[no-untyped-call]
        _, figures["compile_cached"] = self._compile()

    def tables(self, figures: dict[str, Any]) -> None:
        """See the module."""
        if self.cost is None:
            raise RuntimeError("section ladder measured no costs")
        s, cost = self.setup, self.cost
        row_seconds = cost.of_chunk(1, s.layout.length)
        layout = dataclasses.replace(s.layout, chunk_overhead_rows=cost.per_chunk / (row_seconds - cost.per_chunk))
        for corpus in s.corpora:
            for ranks in s.ranks:
                lengths = load_workload(corpus).sample(ranks * s.steps * s.pack_size, np.random.default_rng(0))
                plan = make_plan(
                    np.minimum(lengths, s.layout.length).reshape(ranks, -1),
                    layout,
                    pack_size=s.pack_size,
                    lookahead=s.lookahead,
                )
                # One shape may have more rows than any chunk that was timed: the fit speaks for it.
                of_shapes = np.array([self._chunk_seconds(shape) for shape in plan.shapes])
                seconds = {
                    arm: float((chunk_counts(plan.arms[arm], plan.shapes) @ of_shapes).max(axis=0).mean())
                    + cost.update_seconds
                    for arm in ARMS
                }
                rows = {
                    arm: {"step_seconds": value, "speedup": seconds["arrival"] / value}
                    for arm, value in seconds.items()
                }
                figures[f"{corpus}, {ranks} ranks"] = {**rows, "spmd_shape": plan.spmd_shape}
                speedups = ", ".join(f"{arm} {row['speedup']:.3f}" for arm, row in rows.items())
                print(f"  {corpus}, {ranks} ranks: {1e3 * seconds['arrival']:.1f} ms in order of arrival; {speedups}")

    def lowering(self, figures: dict[str, Any]) -> None:
        """See the module."""
        for case in self.setup.cases:
            with _recorded(figures, case.name) as found:
                found["text_bytes"] = lower_for_gpu(case, packed_gpu_attention)
        with _recorded(figures, "accumulate") as found:
            found["text_bytes"] = self._lower_gradient()

    def _chunk_seconds(self, shape: Shape) -> float:
        """Returns the measured seconds; of the one shape of SPMD, rows as dear as those of the largest chunk."""
        assert self.cost is not None
        if shape in self.setup.layout.shapes:
            return self.cost.of_chunk(*shape)
        largest = self.setup.layout.rows_per_chunk
        return self.cost.of_chunk(largest, shape[1]) * shape[0] / largest

    def _choose_attention(self, figures: dict[str, Any]) -> Programs:
        """Compiles with the trainer's choice, or with the dense mask if that fails."""
        names: tuple[AttentionName, ...] = ("auto", "masked")
        for name in names:
            self.attention_name = name
            with _recorded(figures, "compile_cold" if name == "auto" else f"compile_cold_{name}") as found:
                programs, seconds = self._compile()
                found |= seconds
                return programs
        raise RuntimeError("the programs compile with no attention path")

    def _compile(self) -> tuple[Programs, dict[str, Any]]:
        counter, begin = CompileCounter(), time.monotonic()
        programs = compile_programs(
            self.setup.model,
            make_optimizer(total_steps=1000),
            self.setup.layout.shapes,
            devices=[self.device],
            attention=self.attention_name,
        )
        return programs, {
            "seconds": time.monotonic() - begin,
            "programs": counter.programs,
            "compiler_seconds": counter.seconds,
            "cache_hits": counter.cache_hits,
        }

    def _packs(self) -> list[list[Chunk]]:
        """Returns packs of made-up tokens with the lengths of a real corpus."""
        s, rng = self.setup, np.random.default_rng(1)
        packs: list[list[Chunk]] = []
        for _ in range(s.packs):
            lengths = np.clip(load_workload(s.corpora[0]).sample(s.pack_size, rng), 2, s.layout.length)
            records = [
                {
                    "tokens": rng.integers(0, s.model.vocab_size, n).astype(np.int32),
                    "loss_mask": np.ones(n, np.float32),
                }
                for n in lengths
            ]
            packs.append(list(s.layout(records)))
        return packs

    def _lower_gradient(self) -> int:
        """Lowers the gradient of a chunk's loss, as the accumulate program has it, for CUDA."""
        model, graph = self.setup.model, graphdef(self.setup.model)
        shape = self.setup.layout.rows_per_chunk, self.setup.layout.length
        attention, dtype, logits = attention_for("gpu"), compute_dtype("gpu"), logits_at_once_on("gpu")

        def loss(params: Any, chunk: Any) -> jax.Array:
            merged = nnx.merge(graph, params)
            sums = loss_sums(merged, chunk, attention=attention, dtype=dtype, logits_at_once=logits)
            total: jax.Array = sums.loss
            return total

        params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
        chunk = {
            name: jax.ShapeDtypeStruct(shape, kind)  # type: ignore[no-untyped-call]
            for name, kind in CHUNK_DTYPES.items()
        }
        return len(jax.jit(jax.grad(loss)).trace(params, chunk).lower(lowering_platforms=("cuda",)).as_text())


def peak_flops(device_kind: str) -> float | None:
    """Returns a device's dense bfloat16 FLOP/s, None if it is not in the list.

    >>> peak_flops("NVIDIA H200")
    989400000000000.0
    """
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_kind), None)


@contextlib.contextmanager
def _recorded(figures: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Puts a dict into the figures; an error inside goes there too, and no further, unless the time is over."""
    part = figures.setdefault(name, {})
    try:
        yield part
    except TimeoutError:
        part["error"] = "the section's time was over"
        raise
    except Exception as error:
        part["error"] = f"{type(error).__name__}: {error}"[:2000]
        part["traceback"] = traceback.format_exc()[-2000:]
        print(f"  {name}: {part['error'][:300]}", flush=True)


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside when the time is over, once Python gets a turn: a compilation is not cut short."""

    def over(signum: int, frame: Any) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def environment() -> dict[str, Any]:
    """Returns what the figures were taken on."""
    device = jax.local_devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "platform_version": str(getattr(device.client, "platform_version", "")),
        "devices": jax.local_device_count(),
        "memory_limit_gib": (device.memory_stats() or {}).get("bytes_limit", 0) / 2**30,
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs the sections and writes the results after each; returns them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--toy", action="store_true", help="small sizes, for a CPU: shows that it runs")
    parser.add_argument("--sections", default="attention,ladder,cached,tables,lowering", help="which, with commas")
    parser.add_argument("--budget", type=float, default=470.0, help="seconds of all sections")
    parser.add_argument("--name", default="gpu", help="name of the results' file")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="directory of the results")
    args = parser.parse_args(argv)
    setup = TOY if args.toy else Setup()
    start = time.monotonic()
    figures: dict[str, Any] = {"environment": environment(), "setup": _plain(setup), "sections": {}}
    with tempfile.TemporaryDirectory() as cache:
        benchmark = Benchmark(setup, pathlib.Path(cache))
        for name in args.sections.split(","):
            run: Callable[[dict[str, Any]], None] = getattr(benchmark, name)
            if name == "lowering" and benchmark.device.platform == "gpu":
                continue  # a GPU says more by running them
            print(f"{name} ({time.monotonic() - start:.0f} s)", flush=True)
            section, begin = figures["sections"].setdefault(name, {}), time.monotonic()
            limit = min(setup.limits[name], max(1.0, args.budget - (begin - start)))
            with contextlib.suppress(TimeoutError), _recorded(figures["sections"], name), _limited(limit):
                run(section)
            section["section_seconds"] = time.monotonic() - begin
            figures["seconds"] = time.monotonic() - start
            write_result(args.name, figures, args.output)
    return figures


def _plain(setup: Setup) -> dict[str, Any]:
    return {**dataclasses.asdict(setup), "cases": [case.name for case in setup.cases]}


if __name__ == "__main__":
    main()
