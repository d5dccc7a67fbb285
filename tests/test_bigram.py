"""The bigram model against counting by hand, its own sums and the entropy of a known chain."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.bigram import GRID, Bigram, Smoothing, fit_bigram

Record = dict[str, npt.NDArray[np.float64]]


def record(tokens: list[int], mask: list[float] | None = None) -> Record:
    return {"tokens": np.asarray(tokens, np.float64), "loss_mask": np.asarray(mask or [1] * len(tokens), np.float64)}


def steps(records: list[Record]) -> list[tuple[int, int, float]]:
    """(token before, token, weight) of every token that counts."""
    return [
        (int(item["tokens"][index - 1]), int(item["tokens"][index]), float(item["loss_mask"][index]))
        for item in records
        for index in range(1, len(item["tokens"]))
        if item["loss_mask"][index]
    ]


def by_counting(records: list[Record], vocab_size: int, smoothing: Smoothing) -> Callable[[int, int], float]:
    """P(b | a) of the formula, by dictionaries."""
    pairs: defaultdict[tuple[int, int], float] = defaultdict(float)
    for a, b, weight in steps(records):
        pairs[a, b] += weight
    before: defaultdict[int, float] = defaultdict(float)
    given_up: defaultdict[int, float] = defaultdict(float)
    base = dict.fromkeys(range(vocab_size), smoothing.alpha)
    for (a, b), count in pairs.items():
        before[a] += count
        given_up[a] += min(count, smoothing.discount)
        base[b] += 1 if smoothing.by_types else count
    total = sum(base.values())
    return lambda a, b: (
        (max(pairs[a, b] - smoothing.discount, 0) + (smoothing.strength + given_up[a]) * base[b] / total)
        / (before[a] + smoothing.strength)
    )


def loss(records: list[Record], probability: Callable[[int, int], float]) -> float:
    counted = steps(records)
    return -sum(weight * math.log(probability(a, b)) for a, b, weight in counted) / sum(item[2] for item in counted)


def test_worked_example() -> None:
    # Counted: 0->1 twice, 1->0 once. Each pair gives up 0.5; base = (1 + 0.5, 2 + 0.5) / 4.
    smoothing = Smoothing(discount=0.5, strength=2.0, by_types=False, alpha=0.5)
    bigram = Bigram(np.array([1, 2]), np.array([2.0, 1.0]), 2, smoothing)
    zero, one = 1.5 / 4, 2.5 / 4
    expected = [
        [(0 + 2.5 * zero) / 4, (1.5 + 2.5 * one) / 4],
        [(0.5 + 2.5 * zero) / 3, (0 + 2.5 * one) / 3],
    ]
    np.testing.assert_allclose(np.exp(bigram.log_prob([[0], [1]], [[0, 1]])), expected, rtol=1e-15)
    # 0 -> 1 -> 1, of which the second step counts half.
    nats = bigram.nats_per_token([record([0, 1, 1], [1, 1, 0.5])])
    assert nats == pytest.approx(-(math.log(expected[0][1]) + 0.5 * math.log(expected[1][1])) / 1.5, rel=1e-14)
    # By types both tokens have one predecessor, so the base is even.
    by_types = Bigram(np.array([1, 2]), np.array([2.0, 1.0]), 2, Smoothing(0.5, 2.0, True, 0.5))
    assert np.exp(by_types.log_prob(0, 0)) == pytest.approx(2.5 * 0.5 / 4, rel=1e-15)


VOCAB = 6
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=12)
RECORDS = st.lists(TOKENS, min_size=2, max_size=25).flatmap(
    lambda rows: st.tuples(
        *(
            st.builds(
                lambda tail, row=row: record(row, [1, 1, *tail]),
                st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(row) - 2, max_size=len(row) - 2),
            )
            for row in rows
        )
    ).map(list)
)


@settings(deadline=None, max_examples=40)
@given(RECORDS, st.sampled_from(GRID))
def test_model_is_the_formula_and_sums_to_one(records: list[Record], smoothing: Smoothing) -> None:
    fitted = fit_bigram(records, VOCAB)
    for bigram in (fitted, Bigram(fitted.pair_keys, fitted.pair_counts, VOCAB, smoothing)):
        every = np.exp(bigram.log_prob(np.arange(VOCAB)[:, None], np.arange(VOCAB)))
        np.testing.assert_allclose(every.sum(axis=1), 1, rtol=1e-12)
        reference = by_counting(records, VOCAB, bigram.smoothing)
        np.testing.assert_allclose(every, [[reference(a, b) for b in range(VOCAB)] for a in range(VOCAB)], rtol=1e-12)
        assert bigram.nats_per_token(records) == pytest.approx(loss(records, reference), rel=1e-12)


@settings(deadline=None, max_examples=15)
@given(RECORDS)
def test_smoothing_is_the_best_on_the_last_tenth(records: list[Record]) -> None:
    chosen = fit_bigram(records, VOCAB).smoothing
    cut = len(records) - max(1, len(records) // 10)

    def held_out(smoothing: Smoothing) -> float:
        return loss(records[cut:], by_counting(records[:cut], VOCAB, smoothing))

    assert held_out(chosen) <= min(map(held_out, GRID[::7])) + 1e-12


def test_tokens_that_do_not_count_have_no_influence() -> None:
    mask = [1.0, 0.0, 0.0, 1.0, 1.0]  # the first is never predicted
    one = fit_bigram([record([3, 3, 2, 0, 1], mask)] * 2, vocab_size=4)
    other = fit_bigram([record([2, 0, 2, 0, 1], mask)] * 2, vocab_size=4)
    np.testing.assert_array_equal(one.pair_keys, [0 * 4 + 1, 2 * 4 + 0])
    np.testing.assert_array_equal(one.pair_keys, other.pair_keys)
    np.testing.assert_array_equal(one.pair_counts, other.pair_counts)
    assert one.smoothing == other.smoothing


def test_loss_of_a_markov_chain_is_its_entropy_rate() -> None:
    chain = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.3, 0.6, 0.1]])
    values, vectors = np.linalg.eig(chain.T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    stationary /= stationary.sum()
    entropy = -(stationary[:, None] * chain * np.log(chain)).sum()
    rng = np.random.default_rng(0)
    tokens = [0]
    for draw in rng.random(60_000):
        tokens.append(int(np.searchsorted(chain[tokens[-1]].cumsum()[:-1], draw)))
    records = [record(tokens[start : start + 1000]) for start in range(0, 60_000, 1000)]
    nats = fit_bigram(records[:40], vocab_size=3).nats_per_token(records[40:])
    # Sampling error of 20,000 losses with a standard deviation below 1; parameters add 3 / 40,000.
    assert nats == pytest.approx(entropy, abs=0.02)


def test_large_vocabularies_stay_sparse() -> None:
    vocab_size = 100_000  # squared, as float64: 80 GB
    records = [record([index, vocab_size - 1 - index, index]) for index in range(50)]
    bigram = fit_bigram(records, vocab_size)
    assert len(bigram.pair_keys) == 100
    assert bigram.log_prob(0, vocab_size - 1) > bigram.log_prob(0, 1) > -np.inf


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "at least 2 records, one of them to choose its smoothing; got 0"),
        ([record([0, 1])], "got 1"),
        ([record([0, 1], [1, 0])] * 3, "none of 2 records has a token that its loss mask counts"),
        ([record([0, 4])] * 2, r"ids from 0 to 4 are not in \[0, 4\)"),
        ([record([-1, 2])] * 2, r"ids from -1 to 2 are not in \[0, 4\)"),
    ],
)
def test_bad_records_are_refused(records: list[Record], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_bigram(records, vocab_size=4)


def test_nothing_to_evaluate_is_refused() -> None:
    bigram = fit_bigram([record([0, 1])] * 2, vocab_size=2)
    for records in ([], [record([0])]):
        with pytest.raises(ValueError, match="there is no loss"):
            bigram.nats_per_token(records)
