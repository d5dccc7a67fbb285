from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcl_grain.memory import GIB, MemoryModel
from bcl_grain.models import KNOWN_MODELS, ModelDims

# 2 layers, width 4, 2 query heads and 1 key head of 2, hidden 8, vocabulary 10, tied.
TINY = ModelDims(layers=2, width=4, heads=2, kv_heads=1, head_dim=2, hidden=8, vocab_size=10, tied_embeddings=True)
# A layer: q and o 2 * 4 * 4, k and v 2 * 4 * 2, three matrices 3 * 4 * 8, two norms 2 * 4.
TINY_PARAMETERS = 2 * (32 + 16 + 96 + 8) + 10 * 4 + 4
# Of one layer and token: 7 * 4 + 2 * (2 * 2) + 4 * (1 * 2) + 6 * 8 elements.
TINY_ELEMENTS = 28 + 8 + 8 + 48

SMALL = MemoryModel(dims=KNOWN_MODELS["smollm2-135m"])


def test_state_is_counted_by_hand() -> None:
    assert TINY.num_parameters == TINY_PARAMETERS == 348
    # float32 parameters, a chunk's gradient, the accumulator, Adam's two moments
    assert MemoryModel(dims=TINY).state_bytes == 348 * (4 + 4 + 4 + 8)
    bf16 = MemoryModel(dims=TINY, param_bytes=2, grad_bytes=2, optimizer_bytes=12, optimizer_shards=8)
    assert bf16.state_bytes == 348 * (2 + 2 + 4) + 348 * 12 // 8


def test_activations_without_remat_are_counted_by_hand() -> None:
    model = MemoryModel(dims=TINY, remat=False)
    layer = 6 * (TINY_ELEMENTS * 2 + 2 * 4)  # 6 tokens in bfloat16; a float32 normaliser for each of 2 heads
    assert model.layer_bytes(2, 3) == layer
    # two layers, the final norm's input and output, logits and their gradient in float32
    assert model.chunk_bytes(2, 3) == 2 * layer + 2 * (6 * 4 * 2) + 2 * 4 * 6 * 10


def test_activations_with_remat_are_counted_by_hand() -> None:
    model = MemoryModel(dims=TINY, activation_bytes=4)
    layer = 6 * (TINY_ELEMENTS * 4 + 2 * 4)
    # each layer's input, one layer computed again, the final norm, logits
    assert model.chunk_bytes(2, 3) == 2 * (6 * 4 * 4) + layer + 2 * (6 * 4 * 4) + 2 * 4 * 6 * 10


def test_dense_attention_keeps_scores_and_their_gradient() -> None:
    fused = MemoryModel(dims=TINY)
    dense = dataclasses.replace(fused, attention="dense")
    scores = 6 * 2 * 3 * (4 + 2)  # tokens * heads * length, in float32 and in bfloat16
    assert dense.chunk_bytes(2, 3) - fused.chunk_bytes(2, 3) == 2 * scores - 6 * 2 * 4


def test_logits_exist_in_slices_only() -> None:
    whole = MemoryModel(dims=TINY)
    sliced = dataclasses.replace(whole, logits_at_once=25)  # 2 tokens of a vocabulary of 10
    assert whole.chunk_bytes(2, 3) - sliced.chunk_bytes(2, 3) == 2 * 4 * (6 - 2) * 10
    a_token = dataclasses.replace(whole, logits_at_once=1)  # a slice has at least one
    assert sliced.chunk_bytes(2, 3) - a_token.chunk_bytes(2, 3) == 2 * 4 * (2 - 1) * 10


def test_a_plain_feed_forward_layer_keeps_less() -> None:
    plain = MemoryModel(dims=dataclasses.replace(TINY, gated=False))
    assert MemoryModel(dims=TINY).layer_bytes(1, 1) - plain.layer_bytes(1, 1) == 2 * 8 * 2


@settings(deadline=None, max_examples=50)
@given(rows=st.integers(1, 64), length=st.integers(1, 4096), budget_gib=st.floats(3.0, 60.0))
def test_what_fits_is_exactly_what_the_arithmetic_says(rows: int, length: int, budget_gib: float) -> None:
    assert SMALL.fits(rows, length, budget_gib) == (SMALL.peak_bytes(rows, length) <= 0.9 * budget_gib * GIB)
    most = SMALL.most_rows(length, budget_gib)
    assert SMALL.fits(most + 1, length, budget_gib) is False
    assert most == 0 or SMALL.fits(most, length, budget_gib)


@settings(deadline=None, max_examples=30)
@given(budget_gib=st.floats(2.9, 60.0))
def test_the_longest_row_fits_and_the_next_one_does_not(budget_gib: float) -> None:
    longest = SMALL.longest_row(budget_gib)
    assert longest % 128 == 0
    assert longest == 0 or SMALL.fits(1, longest, budget_gib)
    assert not SMALL.fits(1, longest + 128, budget_gib)


def test_a_budget_below_the_model_is_refused_with_the_remedy() -> None:
    model = MemoryModel(dims=KNOWN_MODELS["llama-3.1-8b"])
    with pytest.raises(ValueError, match=r"80 GiB is below the model's own size.* 149\.6 GiB.*raise the budget"):
        model.fits(1, 128, 80.0)
    with pytest.raises(ValueError, match="must be positive, got -1"):
        model.longest_row(-1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"param_bytes": 0}, "param_bytes must be at least 1"),
        ({"optimizer_bytes": -1}, "optimizer_bytes must be at least 0"),
        ({"attention": "sparse"}, "attention must be 'fused' or 'dense'"),
        ({"reserve": 1.0}, "reserve must be at least 0 and below 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemoryModel(dims=TINY, **settings)  # type: ignore[arg-type]
