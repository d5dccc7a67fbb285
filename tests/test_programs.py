"""The decoupled step: what it computes, that it compiles nothing, and how it refuses what it cannot run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.tiny_chunks import CONFIG, SHAPES, make_pack
from train.attention import masked_attention
from train.compiling import CompileCounter
from train.loss import Sums, loss_sums
from train.memory import CPU_PROCESS_BYTES, Setup, peak_bytes, update_bytes
from train.model import Params, graphdef
from train.notes import Note, decode
from train.programs import Programs, compile_programs
from train.state import Optimizer, TrainState, make_optimizer
from train.step import Chunk, evaluate, init_state, train_step

ROOT = Path(__file__).parents[1]

# A step of size 1 along the gradient: what a step changes in the parameters is the gradient itself.
PLAIN = Optimizer(transform=optax.sgd(1.0), schedule=lambda step: 1.0)


@pytest.fixture(scope="module")
def programs() -> Programs:
    return compile_programs(CONFIG, PLAIN, SHAPES, devices=jax.devices()[:1])


def to_host(params: Params) -> Params:
    return jax.tree.map(lambda x: np.array(x), params)


def gradient(before: Params, state: TrainState) -> Params:
    return jax.tree.map(lambda x, y: x - np.asarray(y), before, state.params)


def assert_close(got: Params, want: Params) -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6, err_msg=jax.tree_util.keystr(path))


def joined(pack: list[Any]) -> dict[str, jax.Array]:
    return {name: jnp.concatenate([chunk[name] for chunk in pack]) for name in pack[0]}


def sums_and_grads(params: Params, pack: list[Any]) -> tuple[Sums, Params]:
    """All rows of a pack at once, in one function that knows nothing of chunks."""

    @jax.jit
    def program(params: Params, chunk: dict[str, jax.Array]) -> Any:
        def loss(params: Params) -> tuple[Any, Sums]:
            sums = loss_sums(nnx.merge(graphdef(CONFIG), params), chunk, attention=masked_attention, dtype=jnp.float32)
            return sums.loss, sums

        grads, sums = jax.grad(loss, has_aux=True)(params)
        return sums, grads

    sums, grads = program(params, joined(pack))
    return Sums(*map(float, sums)), to_host(grads)


def test_a_step_follows_the_gradient_of_all_its_chunks_together(programs: Programs) -> None:
    pack = make_pack(num_chunks=5, seed=0)
    assert {chunk["tokens"].shape for chunk in pack} == set(SHAPES)
    state = init_state(programs, seed=0)
    before = to_host(state.params)
    sums, grads = sums_and_grads(before, pack)
    new, metrics = train_step(programs, state, [pack])
    assert int(new.step) == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))  # its memory holds the new state
    assert float(metrics["tokens"]) == sums.tokens > 0
    assert float(metrics["loss"]) == pytest.approx(sums.loss / sums.tokens, rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx(sums.correct / sums.tokens, rel=1e-6)
    mean = jax.tree.map(lambda g: g / sums.tokens, grads)
    assert_close(gradient(before, new), mean)
    norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(mean)))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-4)


def test_a_constant_denominator_weighs_every_token_alike() -> None:
    programs = compile_programs(CONFIG, PLAIN, SHAPES[:1], devices=jax.devices()[:1], expected_tokens=50.0)
    pack = make_pack(num_chunks=2, seed=1, shapes=SHAPES[:1])
    state = init_state(programs, seed=0)
    before = to_host(state.params)
    sums, grads = sums_and_grads(before, pack)
    new, metrics = train_step(programs, state, [pack])
    assert sums.tokens != 50
    assert_close(gradient(before, new), jax.tree.map(lambda g: g / 50, grads))
    assert float(metrics["loss"]) == pytest.approx(sums.loss / sums.tokens, rel=1e-5)  # still the mean


@pytest.mark.parametrize("num_chunks", [0, 2])
def test_a_step_without_tokens_changes_nothing(programs: Programs, num_chunks: int) -> None:
    pack = [{name: np.zeros_like(x) for name, x in chunk.items()} for chunk in make_pack(num_chunks=num_chunks, seed=0)]
    state = init_state(programs, seed=0)
    before = to_host(state.params)
    new, metrics = train_step(programs, state, [pack])
    assert [float(metrics[name]) for name in ("loss", "tokens", "accuracy", "grad_norm")] == [0, 0, 0, 0]
    jax.tree.map(np.testing.assert_array_equal, before, to_host(new.params))


def test_evaluate_adds_up_all_chunks(programs: Programs) -> None:
    pack = make_pack(num_chunks=5, seed=2)
    state = init_state(programs, seed=0)
    sums, _ = sums_and_grads(to_host(state.params), pack)
    totals = evaluate(programs, state.params, [pack])
    assert float(totals["tokens"]) == sums.tokens
    assert float(totals["loss"]) == pytest.approx(sums.loss / sums.tokens, rel=1e-5)
    assert float(totals["accuracy"]) == pytest.approx(sums.correct / sums.tokens, rel=1e-6)


def test_nothing_compiles_after_the_programs(programs: Programs) -> None:
    counter = CompileCounter()
    state = init_state(programs, seed=3)
    for step in range(6):
        state, metrics = train_step(programs, state, [make_pack(num_chunks=step, seed=step)])
        evaluate(programs, state.params, [make_pack(num_chunks=step, seed=step)])
        {name: float(value) for name, value in metrics.items()}
    assert counter.programs == 0
    jax.jit(lambda x: x + 2.5).lower(np.zeros(7)).compile()
    assert counter.programs == 1  # it does count


def test_the_same_seed_and_chunks_give_the_same_bits(programs: Programs) -> None:
    def run(seed: int) -> Params:
        state = init_state(programs, seed=seed)
        for step in range(3):
            state, _ = train_step(programs, state, [make_pack(num_chunks=3, seed=step)])
        return to_host(state.params)

    first = run(7)
    jax.tree.map(np.testing.assert_array_equal, first, run(7))
    assert not np.array_equal(first["embedding"], run(8)["embedding"])


def test_extra_features_and_other_dtypes_of_a_chunk_do_no_harm(programs: Programs) -> None:
    pack = make_pack(num_chunks=2, seed=4)
    wide = [{**{k: x.astype(np.float64) for k, x in chunk.items()}, "source": np.zeros(3)} for chunk in pack]
    losses = [float(train_step(programs, init_state(programs, seed=0), [p])[1]["loss"]) for p in (pack, wide)]
    assert losses[0] == losses[1]


def bad_packs() -> dict[str, tuple[list[list[Chunk]], str]]:
    good = make_pack(num_chunks=1, seed=0)[0]
    long = {name: np.zeros((2, 24), x.dtype) for name, x in good.items()}
    uneven = {**good, "loss_mask": np.zeros((5, 16), np.float32)}
    headless = {name: x for name, x in good.items() if name != "loss_mask"}
    return {
        "shape": ([[good, long]], r"\(2, 24\) is not in the ladder \(\(1, 16\), \(2, 16\)\)"),
        "uneven": ([[uneven]], r"\(5, 16\)"),
        "feature": ([[headless]], "no feature 'loss_mask'"),
        "packs": ([[good], [good]], "2 packs for 1 local devices"),
    }


@pytest.mark.parametrize("fault", bad_packs())
def test_what_no_program_fits_is_an_error_and_leaves_the_state_good(programs: Programs, fault: str) -> None:
    packs, message = bad_packs()[fault]
    state = init_state(programs, seed=0)
    counter = CompileCounter()
    with pytest.raises(ValueError, match=message):
        train_step(programs, state, packs)
    with pytest.raises(ValueError, match=message):
        evaluate(programs, state.params, packs)
    assert counter.programs == 0
    train_step(programs, state, [make_pack(num_chunks=1, seed=0)])


def test_one_program_takes_what_it_was_compiled_for_and_nothing_else() -> None:
    programs = compile_programs(CONFIG, PLAIN, SHAPES[1:], devices=jax.devices()[:1], spmd_packs=2)
    assert not programs.accumulate
    packs = [make_pack(num_chunks=2, seed=0, shapes=SHAPES[1:])]
    state = init_state(programs, seed=0)
    before = to_host(state.params)
    sums, grads = sums_and_grads(before, packs[0])
    few: list[list[Any]] = [[]]
    for wrong in ([packs[0][:1]], [packs[0] * 2], few):
        with pytest.raises(ValueError, match=rf"got \[{len(wrong[0])}\] chunks .* the one program takes 2 on each"):
            train_step(programs, state, wrong)
    new, metrics = train_step(programs, state, packs)
    assert float(metrics["loss"]) == pytest.approx(sums.loss / sums.tokens, rel=1e-5)
    assert_close(gradient(before, new), jax.tree.map(lambda g: g / sums.tokens, grads))
    with pytest.raises(ValueError, match=r"needs one shape and at least one pack, got \(\(1, 16\), \(2, 16\)\), 2"):
        compile_programs(CONFIG, PLAIN, SHAPES, spmd_packs=2)


def test_notes_reach_everybody_and_touch_nothing(programs: Programs) -> None:
    packs = [make_pack(num_chunks=2, seed=1)]
    plain, metrics = train_step(programs, init_state(programs, seed=0), packs)
    assert "notes" not in metrics
    seen: list[Any] = []
    note = Note(stop=True, cost=3e12, timed_step=70_001)
    told, metrics = train_step(programs, init_state(programs, seed=0), packs, None, [note], seen.extend)
    jax.tree.map(np.testing.assert_array_equal, to_host(plain.params), to_host(told.params))
    notes = decode(metrics["notes"])
    assert (notes["stop"].tolist(), notes["timed_step"].tolist()) == ([1], [70_001])
    assert notes["cost"] == pytest.approx([3e12], rel=1e-7)
    assert len(seen) == 1
    assert float(seen[0][0]) == pytest.approx(float(metrics["loss"]) * float(metrics["tokens"]), rel=1e-6)


def test_bad_settings_are_errors() -> None:
    with pytest.raises(ValueError, match="shapes is empty"):
        compile_programs(CONFIG, PLAIN, ())
    with pytest.raises(ValueError, match=r"expected_tokens must be positive, got 0\.0"):
        compile_programs(CONFIG, PLAIN, SHAPES, expected_tokens=0.0)
    with pytest.raises(
        ValueError, match="warmup_steps must be at least 0 and below the run's 5 steps, got 5: set it lower"
    ):
        make_optimizer(total_steps=5, warmup_steps=5)
    with pytest.raises(ValueError, match="must be positive, got -1"):
        make_optimizer(total_steps=5, learning_rate=-1.0)


def run_python(arguments: list[str], timeout_seconds: float = 300) -> Any:
    """Runs a process from the checkout and returns the JSON that it prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def four_devices() -> Any:
    return run_python([str(ROOT / "tests/four_devices.py")])


@pytest.mark.parametrize("how", ["decoupled", "zero1", "spmd", "spmd-zero1"])
def test_four_devices_train_like_one(how: str, four_devices: Any) -> None:
    result = four_devices[how]
    assert result["difference"] <= 1e-6
    assert result["moved"] > 0.1  # the parameters did move
    assert result["compiled"] == 0
    one, four = result["losses"]
    np.testing.assert_allclose(four, one, rtol=1e-5)
    assert one[-1] < one[0]
    assert result["eval"][1] == pytest.approx(result["eval"][0], rel=1e-5)
    whole, part = result["opt_state_bytes"]
    assert part == (whole if "zero1" not in how else pytest.approx(whole / 4, rel=0.01))


@pytest.mark.parametrize("how", ["decoupled", "zero1", "spmd", "spmd-zero1"])
def test_four_devices_hold_what_the_arithmetic_says(how: str, four_devices: Any) -> None:
    whole, part = four_devices[how]["needs"]
    setup = Setup(platform="cpu", devices=4, zero1="zero1" in how, one_program="spmd" in how)
    chunk = peak_bytes(CONFIG, *SHAPES[0], setup) - CPU_PROCESS_BYTES
    (step,) = (need for name, need in part.items() if name.startswith(("training", "the step")))
    assert step == pytest.approx(chunk, rel=0.03)
    if "spmd" not in how:
        assert part["the update"] == pytest.approx(update_bytes(CONFIG, setup) - CPU_PROCESS_BYTES, rel=0.07)
        alone = update_bytes(CONFIG, Setup(platform="cpu")) - CPU_PROCESS_BYTES
        assert whole["the update"] == pytest.approx(alone, rel=0.03)


def test_devices_of_one_machine_share_its_memory(four_devices: Any) -> None:
    machine = re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    assert machine is not None
    assert four_devices["device_gib"] == pytest.approx(int(machine.group(1)) / 2**20 / 4, rel=0.01)


def test_a_second_process_takes_its_programs_from_the_cache(tmp_path: Path) -> None:
    script = f"""
import json, jax
from train.compiling import CompileCounter, enable_compile_cache
enable_compile_cache({str(tmp_path)!r})
counter = CompileCounter()
jax.jit(lambda x: x * 2.5).lower(jax.ShapeDtypeStruct((3,), "float32")).compile()
print(json.dumps([counter.programs, counter.cache_hits, counter.seconds > 0]))
"""
    assert run_python(["-c", script]) == [1, 0, True]
    assert run_python(["-c", script]) == [1, 1, True]


def test_norm_scales_do_not_decay_and_gradients_are_clipped() -> None:
    params = {"norm": {"scale": jnp.full((2, 3), 4.0)}, "kernel": jnp.full((2, 3), 4.0)}
    optimizer = make_optimizer(total_steps=10, learning_rate=0.5, weight_decay=0.1, max_grad_norm=2.0)
    state = optimizer.transform.init(params)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.transform.update(zero, state, params)
    assert (updates["norm"]["scale"] == 0).all()
    np.testing.assert_allclose(updates["kernel"], -0.5 * 0.1 * 4.0, rtol=1e-6)
    # Adam's first moment after one step is (1 - b1) times the clipped gradient.
    huge = jax.tree.map(lambda x: jnp.full_like(x, 100.0), params)
    _, state = optimizer.transform.update(huge, state, params)
    moments = [x for x in jax.tree.leaves(state) if x.shape == (2, 3)]
    assert np.sqrt(sum(float(np.sum(np.square(x))) for x in moments[:2])) == pytest.approx(0.1 * 2.0, rel=1e-5)


def test_the_learning_rate_warms_up_from_above_zero_and_decays() -> None:
    optimizer = make_optimizer(total_steps=4, warmup_steps=2, learning_rate=1.0, final_share=0.0)
    rates = [float(optimizer.schedule(step)) for step in range(5)]
    np.testing.assert_allclose(rates, [0.5, 0.75, 1.0, 0.5, 0.0], atol=1e-7)
