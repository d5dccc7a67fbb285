"""The model and its loss: against plain NumPy, across layouts, and at the seams between segments."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from flax import nnx

from bcl_grain.layouts import BucketedLayout, Layout, PaddedLayout, RowPackedLayout, RowPackedOneShapeLayout
from tests.attentions import ATTENTIONS, relative_difference
from train.attention import Attention, blockwise_attention, masked_attention
from train.loss import Sums, loss_sums, targets
from train.model import ModelConfig, Params, graphdef, init_params

CONFIG = ModelConfig(vocab_size=23, layers=2, width=16, heads=4, kv_heads=2, head_dim=6, hidden=20)
Array = npt.NDArray[Any]


def make_params(config: ModelConfig = CONFIG) -> Params:
    """Random everywhere, norms too, so that one left out shows. Drawn by NumPy: nothing to compile."""
    rng = np.random.default_rng(5)

    def draw(path: Any, x: jax.ShapeDtypeStruct) -> Array:
        noise = rng.normal(size=x.shape)
        return (1 + noise / 4 if path[-1].key == "scale" else noise * x.shape[-2] ** -0.5).astype(np.float32)

    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(draw, shapes)


def make_records(lengths: list[int], *, vocab_size: int = CONFIG.vocab_size, seed: int = 0) -> list[dict[str, Array]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "tokens": rng.integers(0, vocab_size, n).astype(np.int32),
            "loss_mask": (rng.random(n) < 0.7).astype(np.float32),
        }
        for n in lengths
    ]


def make_chunk(rows: list[list[dict[str, Array]]], length: int) -> dict[str, Array]:
    """Lays records out by hand: the tests of segments do not lean on the layouts."""
    chunk: dict[str, Array] = {
        name: np.zeros((len(rows), length), np.float32 if name == "loss_mask" else np.int32)
        for name in ("tokens", "tokens_segment_ids", "tokens_positions", "loss_mask")
    }
    for r, row in enumerate(rows):
        start = 0
        for segment, record in enumerate(row, start=1):
            stop = start + len(record["tokens"])
            chunk["tokens"][r, start:stop] = record["tokens"]
            chunk["loss_mask"][r, start:stop] = record["loss_mask"]
            chunk["tokens_segment_ids"][r, start:stop] = segment
            chunk["tokens_positions"][r, start:stop] = np.arange(stop - start)
            start = stop
    return chunk


@functools.cache
def forward_program(attention: Attention, config: ModelConfig) -> Any:
    def forward(params: Params, chunk: dict[str, Any]) -> jax.Array:
        model = nnx.merge(graphdef(config), params)
        places = chunk["tokens_positions"], chunk["tokens_segment_ids"]
        return model.logits(model(chunk["tokens"], *places, attention=attention, dtype=jnp.float32))

    return jax.jit(forward)


def logits(params: Params, chunk: dict[str, Array], attention: Attention, config: ModelConfig = CONFIG) -> Array:
    return np.asarray(forward_program(attention, config)(params, chunk))


@functools.cache
def gradient_program(
    config: ModelConfig, attention: Attention, dtype: Any = jnp.float32, logits_at_once: int = 2**24
) -> Any:
    def loss(params: Params, chunk: dict[str, Any]) -> tuple[Any, Sums]:
        model = nnx.merge(graphdef(config), params)
        sums = loss_sums(model, chunk, attention=attention, dtype=dtype, logits_at_once=logits_at_once)
        return sums.loss, sums

    return jax.jit(jax.grad(loss, has_aux=True))


def loss_and_grads(
    params: Params,
    chunks: list[dict[str, Array]],
    config: ModelConfig = CONFIG,
    attention: Attention = blockwise_attention,
    **options: Any,
) -> tuple[Sums, Params]:
    """Sums over chunks, and the gradient of their loss, added up in float64."""
    program = gradient_program(config, attention, **options)
    parts = [jax.tree.map(lambda x: np.asarray(x, np.float64), program(params, chunk)) for chunk in chunks]
    grads, sums = jax.tree.map(lambda *x: np.sum(x, axis=0), *parts)
    return sums, grads


def reference_logits(params: Params, tokens: Array, config: ModelConfig) -> Array:
    """The model of one record in float64, token by token and head by head, after the papers' formulas."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(x: Array, scale: Array) -> Array:
        return x / np.sqrt(np.mean(x**2) + config.norm_eps) * scale

    def turn(head: Array, position: int) -> Array:
        half = config.head_dim // 2
        pairs = head[:half] + 1j * head[half:]
        turned = pairs * np.exp(1j * position * config.rope_base ** (-np.arange(half) / half))
        return np.concatenate([turned.real, turned.imag])

    stream = [p["embedding"][t] for t in tokens]
    for i in range(config.layers):
        layer = jax.tree.map(operator.itemgetter(i), p["layers"])
        heads: dict[str, list[Array]] = {"query": [], "key": [], "value": []}
        for position, x in enumerate(stream):
            y = norm(x, layer["attention_norm"]["scale"])
            for name, kept in heads.items():
                split = (y @ layer[name]["kernel"]).reshape(-1, config.head_dim)
                kept.append(split if name == "value" else np.stack([turn(h, position) for h in split]))
        for t in range(len(stream)):
            mixed = []
            for h in range(config.heads):
                shared = h // (config.heads // config.kv_heads)
                scores = [heads["query"][t][h] @ heads["key"][s][shared] for s in range(t + 1)]
                weights = np.exp(np.array(scores) / np.sqrt(config.head_dim))
                mixed.append(sum(w * heads["value"][s][shared] for s, w in enumerate(weights / weights.sum())))
            x = stream[t] + np.concatenate(mixed) @ layer["output"]["kernel"]
            y = norm(x, layer["feed_forward_norm"]["scale"])
            gate = y @ layer["gate"]["kernel"]
            stream[t] = x + (gate / (1 + np.exp(-gate)) * (y @ layer["up"]["kernel"])) @ layer["down"]["kernel"]
    head = p["embedding"].T if config.tied_embeddings else p["head"]["kernel"]
    return np.stack([norm(x, p["norm"]["scale"]) @ head for x in stream])


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
@pytest.mark.parametrize("tied", [True, False])
def test_agrees_with_a_plain_numpy_model(attention: Attention, tied: bool) -> None:
    config = ModelConfig(
        vocab_size=11,
        layers=2,
        width=8,
        heads=4,
        kv_heads=2,
        head_dim=4,
        hidden=12,
        rope_base=100,
        tied_embeddings=tied,
    )
    params = make_params(config)
    first, second = make_records([7, 12], vocab_size=11)
    chunk = make_chunk([[first, second]], 24)
    got = logits(params, chunk, attention, config)[0]
    np.testing.assert_allclose(got[:7], reference_logits(params, first["tokens"], config), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got[7:19], reference_logits(params, second["tokens"], config), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_a_segment_changes_no_logit_of_another(attention: Attention) -> None:
    # Longer than a block of queries, so that a segment is seen from blocks other than its own.
    first, second, third = make_records([100, 130, 60])
    params = make_params()
    before = logits(params, make_chunk([[first, second, third]], 300), attention)[0]
    for changed, part in enumerate([slice(0, 100), slice(100, 230), slice(230, 290)]):
        row = [first, second, third]
        row[changed] = {**row[changed], "tokens": (row[changed]["tokens"] + 1) % CONFIG.vocab_size}
        after = logits(params, make_chunk([row], 300), attention)[0]
        own = np.zeros(300, bool)
        own[part] = True
        np.testing.assert_array_equal(after[~own], before[~own])
        assert (np.abs(after[own] - before[own]).max(axis=-1) > 0).all()


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_no_token_sees_a_later_one_and_all_see_the_first(attention: Attention) -> None:
    (record,) = make_records([290])
    params = make_params()
    before = logits(params, make_chunk([[record]], 300), attention)[0, :290]
    tokens = record["tokens"].copy()
    tokens[150] = (tokens[150] + 1) % CONFIG.vocab_size
    after = logits(params, make_chunk([[{**record, "tokens": tokens}]], 300), attention)[0, :290]
    np.testing.assert_array_equal(after[:150], before[:150])
    assert (np.abs(after[150:] - before[150:]).max(axis=-1) > 0).all()


RECORDS = make_records([1, 2, 48, 13, 8, 33, 13, 2, 48])


@pytest.fixture(scope="module")
def alone() -> tuple[Sums, Params]:
    """Every record in a chunk of its own, without any layout."""
    return loss_and_grads(make_params(), [make_chunk([[record]], 48) for record in RECORDS])


LAYOUTS: dict[str, Layout] = {
    "one shape": RowPackedOneShapeLayout(rows=5, length=48),
    "row-packed": RowPackedLayout(length=48, rows_per_chunk=2, heights=(1,)),
    "bucketed": BucketedLayout(lengths=(16, 48), tokens_per_chunk=48),
    "padded": PaddedLayout(pack_size=9, length=48),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_loss_and_gradient_do_not_depend_on_the_layout(layout: Layout, alone: tuple[Sums, Params]) -> None:
    want, want_grads = alone
    got, grads = loss_and_grads(make_params(), layout(RECORDS))
    assert got.tokens == want.tokens == sum(record["loss_mask"][1:].sum() for record in RECORDS)
    assert got.correct == want.correct
    assert got.loss == pytest.approx(want.loss, rel=1e-5)
    assert relative_difference(grads, want_grads) < 1e-5


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_a_chunk_of_padding_gives_exactly_zero(attention: Attention) -> None:
    sums, grads = loss_and_grads(make_params(), [make_chunk([[]], 48)], attention=attention)
    assert sums == Sums(loss=0, tokens=0, correct=0)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(grads))  # NaN is not 0


def test_targets_are_the_next_tokens_inside_a_segment() -> None:
    first = {"tokens": np.array([3, 4, 5]), "loss_mask": np.array([1, 0, 1])}
    second = {"tokens": np.array([6, 7]), "loss_mask": np.array([1, 0.5])}
    chunk = make_chunk([[first, second], [second]], 6)
    chunk["loss_mask"][chunk["tokens_segment_ids"] == 0] = 1  # padding predicts nothing, whatever the mask says
    target, weight = targets({name: jnp.asarray(values) for name, values in chunk.items()})
    counted = np.asarray(weight) > 0
    # The second record's first token has nothing before it, whatever its mask says.
    np.testing.assert_array_equal(np.asarray(weight), [[0, 1, 0, 0.5, 0, 0], [0.5, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(np.asarray(target)[counted], [5, 7, 7])


def test_loss_is_the_weighted_cross_entropy() -> None:
    records = make_records([9, 14])
    params = make_params()
    sums, _ = loss_and_grads(params, [make_chunk([records], 48)])
    loss = correct = 0.0
    for record in records:
        scores = reference_logits(params, record["tokens"], CONFIG)[:-1]
        log_p = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
        target, weight = record["tokens"][1:], record["loss_mask"][1:]
        loss -= float(np.sum(weight * log_p[np.arange(len(target)), target]))
        correct += float(np.sum(weight * (scores.argmax(axis=-1) == target)))
    assert sums.loss == pytest.approx(loss, rel=1e-5)
    assert sums.correct == correct


@pytest.mark.parametrize("logits_at_once", [1, 7 * 23])
def test_vocabulary_slices_change_nothing(logits_at_once: int) -> None:
    chunk = make_chunk([make_records([20, 17])], 48)  # 48 tokens: no multiple of 7
    params = make_params()
    want, want_grads = loss_and_grads(params, [chunk])
    got, grads = loss_and_grads(params, [chunk], logits_at_once=logits_at_once)
    assert got.tokens == want.tokens
    assert got.correct == want.correct
    assert got.loss == pytest.approx(want.loss, rel=1e-5)
    assert relative_difference(grads, want_grads) < 1e-5


def test_logits_never_exist_for_all_tokens() -> None:
    config = ModelConfig(vocab_size=5000, layers=1, width=8, heads=1, kv_heads=1, head_dim=8, hidden=8)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    program = gradient_program(config, masked_attention, logits_at_once=2**18)
    memory = program.lower(shapes, make_chunk([make_records([256])] * 4, 256)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 1024 * config.vocab_size / 2  # half of the float32 logits of 1,024 tokens


def test_remat_changes_no_value() -> None:
    chunk = make_chunk([make_records([20, 17])], 48)
    params = make_params()
    want, want_grads = loss_and_grads(params, [chunk])
    got, grads = loss_and_grads(params, [chunk], dataclasses.replace(CONFIG, remat=True))
    assert got.loss == pytest.approx(want.loss, rel=1e-6)
    assert relative_difference(grads, want_grads) < 1e-6


def test_bfloat16_activations_stay_near_float32_and_sums_are_float32() -> None:
    chunk = make_chunk([make_records([20, 17])], 48)
    params = make_params()
    want, want_grads = loss_and_grads(params, [chunk], attention=masked_attention)
    got, grads = loss_and_grads(params, [chunk], attention=masked_attention, dtype=jnp.bfloat16)
    assert got.tokens == want.tokens
    assert got.loss == pytest.approx(want.loss, rel=0.02)
    assert 1e-4 < relative_difference(grads, want_grads) < 0.1  # not the float32 path under another name


@pytest.mark.parametrize("tied", [True, False])
def test_number_of_parameters(tied: bool) -> None:
    config = ModelConfig(vocab_size=23, layers=3, width=16, heads=4, kv_heads=2, hidden=20, tied_embeddings=tied)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert config.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(
    "bad", [{"layers": 0}, {"heads": 3, "kv_heads": 2}, {"head_dim": 5}, {"rope_base": 0.0}, {"norm_eps": -1.0}]
)
def test_bad_dimensions(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(bad.values())))):
        ModelConfig(vocab_size=10, **bad)
