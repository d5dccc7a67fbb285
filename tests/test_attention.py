"""The attention kernels against the dense mask, and which one is taken where."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attentions import ATTENTIONS, PALLAS, relative_difference
from train.attention import (
    Attention,
    attention_for,
    blockwise_attention,
    cudnn_attention,
    cudnn_masked_attention,
    masked_attention,
    packed_gpu_attention,
    pallas_attention,
)


@pytest.mark.parametrize("length", [1, 129, 1100])
def test_blockwise_attention_is_masked_attention(length: int) -> None:
    rng = np.random.default_rng(length)
    query, key, value = (jnp.asarray(rng.normal(size=(2, length, h, 8)), jnp.float32) for h in (4, 2, 2))
    segment_ids = jnp.asarray(np.sort(rng.integers(0, 4, (2, length)), axis=1)[:, ::-1].copy())

    def values_and_grads(attention: Attention) -> Any:
        def weighted(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(attention(query, key, value, segment_ids)))

        return jax.jit(jax.value_and_grad(weighted, argnums=(0, 1, 2)))(query, key, value)

    got, want = values_and_grads(blockwise_attention), values_and_grads(masked_attention)
    assert relative_difference(got, want) < 1e-5


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
def test_pallas_attention_is_masked_attention(heads: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.normal(size=(2, 256, h, 24)), jnp.float32) for h in (heads[0], heads[1], heads[1])
    )
    # A row of padding alone, and one that ends in padding, its seams inside and between the kernel's blocks.
    segment_ids = np.zeros((2, 256), np.int32)
    segment_ids[1, :128], segment_ids[1, 128:131], segment_ids[1, 131:200] = 1, 2, 3

    def values_and_grads(attention: Attention) -> Any:
        def weighted(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(attention(query, key, value, jnp.asarray(segment_ids))))

        return jax.jit(jax.value_and_grad(weighted, argnums=(0, 1, 2)))(query, key, value)

    assert relative_difference(values_and_grads(PALLAS), values_and_grads(masked_attention)) < 1e-5


def test_pallas_attention_keeps_segments_apart() -> None:
    rng = np.random.default_rng(1)
    query, key, value = (jnp.asarray(rng.normal(size=(1, 256, h, 16)), jnp.float32) for h in (2, 1, 1))
    segment_ids = jnp.asarray(np.repeat([[1, 2, 3, 0]], [70, 130, 30, 26], axis=1))
    run = jax.jit(lambda key, value: PALLAS(query, key, value, segment_ids))
    before = np.asarray(run(key, value))
    assert np.isfinite(before).all()
    for segment in (0, 1, 2, 3):
        own = np.asarray(segment_ids)[0] == segment
        noise = jnp.where(own[None, :, None, None], 1.0, 0.0)
        after = np.asarray(run(key + noise, value - noise))
        np.testing.assert_array_equal(after[0, ~own], before[0, ~own])
        assert (np.abs(after[0, own] - before[0, own]).max(axis=(-1, -2)) > 0).all()


def test_pallas_attention_says_what_it_takes() -> None:
    query = jnp.zeros((1, 200, 2, 16))
    with pytest.raises(ValueError, match=r"multiple of 128 tokens.*got rows of 200 and heads of 16"):
        PALLAS(query, query, query, jnp.ones((1, 200), jnp.int32))
    # Where the kernel can't, rows on a GPU take the dense mask.
    np.testing.assert_array_equal(packed_gpu_attention(query, query, query, jnp.ones((1, 200), jnp.int32)), query)


def test_pallas_attention_lowers_for_a_gpu() -> None:
    """Without one, this is as near as it gets: forward and backward kernels pass through Triton's dialect."""
    query, key, segment_ids = (
        jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
        for shape, dtype in (((2, 256, 4, 64), "bfloat16"), ((2, 256, 2, 64), "bfloat16"), ((2, 256), "int32"))
    )

    def total(query: Any, key: Any, value: Any, segment_ids: Any) -> jax.Array:
        return jnp.sum(packed_gpu_attention(query, key, value, segment_ids).astype(jnp.float32))

    traced = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(query, key, key, segment_ids)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mha_backward") > 0


def test_attention_is_chosen_by_platform() -> None:
    assert attention_for("cpu", one_record_rows=True) is blockwise_attention
    assert attention_for("gpu", one_record_rows=True) is cudnn_attention
    assert attention_for("gpu") is packed_gpu_attention
    assert attention_for("tpu") is masked_attention


def test_attention_is_chosen_by_name() -> None:
    for name, attention in {**ATTENTIONS, "cudnn-masked": cudnn_masked_attention}.items():
        assert attention_for("gpu", name=name) is attention  # type: ignore[arg-type]
    chosen: Any = attention_for("gpu", name="pallas")
    assert (chosen.func, chosen.keywords) == (pallas_attention, {"interpret": False})
    with pytest.raises(ValueError, match="several records would see each other"):
        attention_for("gpu", name="cudnn")
    with pytest.raises(ValueError, match="needs a GPU, and the platform is 'cpu'"):
        attention_for("cpu", name="cudnn-masked")
    with pytest.raises(ValueError, match="unknown attention 'flash'"):
        attention_for("gpu", name="flash")  # type: ignore[arg-type]
