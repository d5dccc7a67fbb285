"""LoRA: what is trained, what stays, what it computes, and that other programs read the adapters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from flax import nnx

from tests.hf_families import FAMILIES, random_tensors, reference_logits, write_model
from tests.test_hf_weights import TOKENS, our_logits
from train.attention import masked_attention
from train.hf_weights import open_hf_model
from train.lora import LoraConfig, join_params, merge_adapters, split_params
from train.loss import loss_sums
from train.model import ModelConfig, Params, graphdef, init_params
from train.peft_adapters import export_adapters, load_adapters, read_lora_config
from train.pretrained import export_model, load_params
from train.programs import Programs, compile_programs
from train.state import make_optimizer
from train.step import evaluate, init_state, train_step

LORA = LoraConfig(rank=3, alpha=6.0, targets=("query", "value", "output", "down"))
CONFIG = ModelConfig(
    vocab_size=67, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, hidden=24, qkv_bias=True, lora=LORA
)
SHAPE = (2, 16)
THEIR_NAMES = {
    "query": "self_attn.q_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "down": "mlp.down_proj",
}


def random_adapters(params: Params, lora: LoraConfig, *, seed: int = 0) -> Params:
    """Returns parameters with adapters whose B is not zero."""
    rng = np.random.default_rng(seed)
    layers = dict(params["layers"])
    for name in lora.targets:
        depth, inputs, outputs = layers[name]["kernel"].shape
        layers[name] = {
            **layers[name],
            "lora_a": rng.standard_normal((depth, inputs, lora.rank)).astype(np.float32),
            "lora_b": (0.05 * rng.standard_normal((depth, lora.rank, outputs))).astype(np.float32),
        }
    return {**params, "layers": layers}


def random_params(config: ModelConfig, dtype: npt.DTypeLike) -> Params:
    """Returns parameters without adapters."""
    rng = np.random.default_rng(1)
    plain = dataclasses.replace(config, lora=None)
    abstract = jax.eval_shape(lambda: init_params(plain, jax.random.key(0)))

    def value(path: Any, leaf: Any) -> npt.NDArray[Any]:
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return (mean + 0.3 * rng.standard_normal(leaf.shape)).astype(dtype)

    params: Params = jax.tree_util.tree_map_with_path(value, abstract)
    return params


def chunk(*, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    return {
        "tokens": np.random.default_rng(seed).integers(0, 67, SHAPE).astype(np.int32),
        "tokens_segment_ids": np.ones(SHAPE, np.int32),
        "tokens_positions": np.broadcast_to(np.arange(SHAPE[1], dtype=np.int32), SHAPE),
        "loss_mask": np.ones(SHAPE, np.float32),
    }


def loss_of(config: ModelConfig) -> Callable[[Params, Any], jax.Array]:
    """Returns (params, chunk) -> loss sum."""

    def loss(params: Params, chunk: Any) -> jax.Array:
        model = nnx.merge(graphdef(config), params)
        total: jax.Array = loss_sums(model, chunk, attention=masked_attention, dtype=np.float32).loss
        return total

    return loss


def test_gradients_follow_from_those_of_the_merged_matrices() -> None:
    params = random_adapters(random_params(CONFIG, np.float32), LORA)
    trained, frozen = split_params(params)

    def of_adapters(trained: Params) -> jax.Array:
        return loss_of(CONFIG)(join_params(trained, frozen), chunk())

    plain = dataclasses.replace(CONFIG, lora=None)
    got = jax.jit(jax.grad(of_adapters))(trained)
    merged = jax.jit(jax.grad(loss_of(plain)))(merge_adapters(params, LORA.scale), chunk())
    assert {*got["layers"]} == {*LORA.targets}
    for name in LORA.targets:
        a, b, matrix = trained["layers"][name]["lora_a"], trained["layers"][name]["lora_b"], merged["layers"][name]
        # W + s A B: by the chain rule dA = s dW B^T and dB = s A^T dW.
        wanted_a = LORA.scale * np.einsum("lio,lro->lir", matrix["kernel"], b)
        wanted_b = LORA.scale * np.einsum("lio,lir->lro", matrix["kernel"], a)
        np.testing.assert_allclose(got["layers"][name]["lora_a"], wanted_a, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(got["layers"][name]["lora_b"], wanted_b, rtol=1e-3, atol=1e-3)
        assert np.abs(wanted_a).max() > 0.1
        assert np.abs(wanted_b).max() > 0.1


def products(jaxpr: Any) -> set[tuple[int, ...]]:
    """Returns the shapes of all matrix products in a program, inner ones included."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found |= {tuple(sorted(value.aval.shape)) for value in equation.outvars}
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            found |= products(inner) if hasattr(inner, "eqns") else set()
    return found


def test_no_gradient_of_a_frozen_matrix_is_computed() -> None:
    params = random_adapters(random_params(CONFIG, np.float32), LORA)
    trained, frozen = split_params(params)
    full = jax.make_jaxpr(jax.grad(loss_of(CONFIG)))(params, chunk())
    lora = jax.make_jaxpr(jax.grad(lambda x: loss_of(CONFIG)(join_params(x, frozen), chunk())))(trained)
    matrices = {(16, 24), (16, 16), (8, 16), (16, 67)}
    assert matrices <= products(full.jaxpr)
    assert not matrices & products(lora.jaxpr)


@pytest.fixture(scope="module")
def programs() -> Programs:
    return compile_programs(CONFIG, make_optimizer(total_steps=20, learning_rate=0.05), [SHAPE])


def test_training_moves_the_adapters_alone(programs: Programs) -> None:
    frozen = jax.device_put(random_params(CONFIG, jnp.bfloat16))
    before = jax.tree.map(np.array, frozen)
    state = init_state(programs, seed=0)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    assert all(not np.any(factors["lora_b"]) for factors in state.params["layers"].values())

    plain = dataclasses.replace(CONFIG, lora=None)
    at_start = float(jax.jit(loss_of(plain))(frozen, chunk())) / (SHAPE[0] * (SHAPE[1] - 1))
    losses = []
    for _ in range(15):
        state, metrics = train_step(programs, state, [[chunk()]], frozen)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(at_start, rel=1e-5)
    assert losses[-1] < 0.8 * losses[0]
    assert jax.tree.all(jax.tree.map(np.array_equal, frozen, before))
    assert all(np.any(factors["lora_b"]) for factors in state.params["layers"].values())
    after = float(evaluate(programs, state.params, [[chunk()]], frozen)["loss"])
    merged = merge_adapters(join_params(state.params, frozen), LORA.scale)
    wanted = float(jax.jit(loss_of(plain))(merged, chunk())) / (SHAPE[0] * (SHAPE[1] - 1))
    assert after == pytest.approx(wanted, rel=1e-4)


def test_memory_of_training_is_the_adapters(programs: Programs) -> None:
    adapters = sum(
        CONFIG.layers * LORA.rank * (inputs + outputs) for inputs, outputs in [(16, 16), (16, 8), (16, 16), (24, 16)]
    )
    state = programs.abstract_state
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == adapters
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) == pytest.approx(2 * adapters, abs=4)
    accumulator, _ = programs.zeros[programs.local_devices[0]]()
    assert sum(leaf.size for leaf in jax.tree.leaves(accumulator.grads)) == adapters
    frozen = jax.tree.leaves(programs.abstract_frozen)
    assert {leaf.dtype for leaf in frozen} == {jnp.dtype(jnp.bfloat16)}
    assert sum(leaf.size for leaf in frozen) == CONFIG.num_parameters


def test_forgetting_the_frozen_parameters_is_said(programs: Programs) -> None:
    with pytest.raises(ValueError, match="frozen must hold the parameters"):
        train_step(programs, init_state(programs, seed=0), [[chunk()]])


def test_a_record_costs_less_where_adapters_alone_are_trained() -> None:
    full = dataclasses.replace(CONFIG, lora=None).cost()
    lora = CONFIG.cost()
    assert lora.per_token == pytest.approx(full.per_token * 2 / 3, rel=0.05)
    assert lora.per_token_squared == full.per_token_squared


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_adapters_come_back_and_join_the_exported_model(family: str, tmp_path: Path) -> None:
    source = open_hf_model(write_model(tmp_path / "base", FAMILIES[family], random_tensors(FAMILIES[family])))
    config = dataclasses.replace(source.config, lora=LORA)
    params = random_adapters(load_params(source), LORA)
    export_adapters(tmp_path / "adapters", config, split_params(params)[0], base_model="base")

    assert read_lora_config(tmp_path / "adapters") == LORA
    again = load_adapters(tmp_path / "adapters", config)
    assert jax.tree.all(jax.tree.map(np.array_equal, again, split_params(params)[0]))
    wanted = our_logits(config, params, TOKENS)
    assert np.abs(wanted - our_logits(source.config, split_params(params)[1], TOKENS)).max() > 0.1
    tensors = random_tensors(FAMILIES[family])
    for name in LORA.targets:
        a, b = params["layers"][name]["lora_a"], params["layers"][name]["lora_b"]
        for layer in range(config.layers):
            tensors[f"model.layers.{layer}.{THEIR_NAMES[name]}.weight"] += 2 * (a[layer] @ b[layer]).T  # alpha / rank
    np.testing.assert_allclose(wanted, reference_logits(FAMILIES[family], tensors, TOKENS), atol=1e-4)
    export_model(tmp_path / "merged", merge_adapters(params, LORA.scale), like=source)
    merged = load_params(open_hf_model(tmp_path / "merged"))
    np.testing.assert_allclose(our_logits(source.config, merged, TOKENS), wanted, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_agrees_with_peft(family: str, tmp_path: Path) -> None:
    torch, transformers, peft = (pytest.importorskip(name) for name in ("torch", "transformers", "peft"))
    source = open_hf_model(write_model(tmp_path / "base", FAMILIES[family], random_tensors(FAMILIES[family])))
    config = dataclasses.replace(source.config, lora=LORA)
    params = random_adapters(load_params(source), LORA)
    export_adapters(tmp_path / "adapters", config, split_params(params)[0], base_model=str(tmp_path / "base"))

    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    with torch.no_grad():
        wanted = theirs(torch.tensor(TOKENS[None])).logits[0].numpy()
    np.testing.assert_allclose(our_logits(config, params, TOKENS), wanted, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    assert read_lora_config(tmp_path / "theirs") == LORA
    again = load_adapters(tmp_path / "theirs", config)
    assert jax.tree.all(jax.tree.map(np.array_equal, again, split_params(params)[0]))


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    params = random_adapters(random_params(CONFIG, np.float32), LORA)
    export_adapters(tmp_path / "a", CONFIG, split_params(params)[0], base_model="base")
    with pytest.raises(ValueError, match="is not empty"):
        export_adapters(tmp_path / "a", CONFIG, split_params(params)[0], base_model="base")
    with pytest.raises(ValueError, match="no adapters"):
        export_adapters(tmp_path / "b", dataclasses.replace(CONFIG, lora=None), params, base_model="base")
    with pytest.raises(ValueError, match=r"missing or unknown, .*layers\.2\."):
        load_adapters(tmp_path / "a", dataclasses.replace(CONFIG, layers=3))
    with pytest.raises(ValueError, match=r"'mlp.down_proj'.*\(24, 3\).*\(26, 3\)"):
        load_adapters(tmp_path / "a", dataclasses.replace(CONFIG, hidden=26))
    description = json.loads((tmp_path / "a/adapter_config.json").read_text())
    for name, value in (("use_dora", True), ("peft_type", "IA3"), ("bias", "all"), ("r", 0), ("target_modules", ["x"])):
        (tmp_path / "a/adapter_config.json").write_text(json.dumps({**description, name: value}))
        with pytest.raises(ValueError, match=r"adapter_config\.json"):
            read_lora_config(tmp_path / "a")
    with pytest.raises(ValueError, match="can't read"):
        read_lora_config(tmp_path)


@pytest.mark.parametrize(
    "setting", [{"rank": 0}, {"alpha": 0.0}, {"alpha": float("nan")}, {"targets": ()}, {"targets": ("query", "query")}]
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="LoRA"):
        LoraConfig(**setting)
