"""A token-bigram model: the baseline that a trained decoder has to beat.

It predicts a token from the one before it alone, as well as that can be done: pair counts smoothed towards a
single-token distribution, the kind and amount of smoothing chosen on held-out training text. It is fitted and judged
on exactly the tokens that the trainer's loss counts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.int64]
Records = Sequence[Mapping[str, npt.NDArray[Any]]]


@dataclasses.dataclass(frozen=True)
class Smoothing:
    """How much of its counts a token gives up to the base distribution.

    Attributes:
        discount: What every pair that occurs gives up of its count, in [0, 1).
        strength: How many observations the base distribution is worth, above 0.
        by_types: Whether the base counts different tokens before a token (Kneser and Ney) or its occurrences.
        alpha: Added to every token's count in the base, above 0.
    """

    discount: float
    strength: float
    by_types: bool
    alpha: float


GRID = tuple(
    itertools.starmap(
        Smoothing,
        itertools.product(
            (0.0, 0.25, 0.5, 0.75, 0.9), (4.0**power for power in range(-2, 7)), (False, True), (0.1, 1.0, 10.0)
        ),
    )
)
"""What `fit_bigram` chooses from."""


@dataclasses.dataclass(frozen=True)
class Bigram:
    """P(b | a) = (count(a, b) - given(a, b) + (strength + given(a)) * base(b)) / (count(a) + strength).

    Here given(a, b) = min(discount, count(a, b)), and given(a) is its sum over b, so that the sum over b is 1. With
    discount 0 it is MacKay and Peto's hierarchical Dirichlet model (1995), with a small strength interpolated
    Kneser-Ney, between them Teh's Pitman-Yor model (2006). Memory is proportional to the pairs that occur, not to the
    vocabulary squared.

    Attributes:
        pair_keys: [p] a * vocab_size + b of every pair that occurs, ascending.
        pair_counts: [p] how often, above 0.
        vocab_size: Number of tokens.
        smoothing: The constants.
    """

    pair_keys: IdArray
    pair_counts: FloatArray
    vocab_size: int
    smoothing: Smoothing

    def log_prob(self, previous: npt.ArrayLike, target: npt.ArrayLike) -> FloatArray:
        """Returns log P(target | previous) in nats, for ids that broadcast together. O(log pairs) each."""
        before, after = np.asarray(previous, np.int64), np.asarray(target, np.int64)
        keys = before * self.vocab_size + after
        index = np.minimum(np.searchsorted(self.pair_keys, keys), len(self.pair_keys) - 1)
        counts = np.where(self.pair_keys[index] == keys, self.pair_counts[index], 0.0)
        kept = np.maximum(counts - self.smoothing.discount, 0)
        strength = self.smoothing.strength
        mass = kept + (strength + self._given[before]) * self._base[after]
        return np.asarray(np.log(mass / (self._previous_counts[before] + strength)), np.float64)

    def nats_per_token(self, records: Records) -> float:
        """Returns the mean loss over the tokens of `records` that their loss mask counts, weighted by it.

        Raises:
            ValueError: If no token counts, or an id is not in the vocabulary.
        """
        return self._mean_nats(*_count_pairs(records, self.vocab_size))

    def _mean_nats(self, keys: IdArray, counts: FloatArray) -> float:
        log_prob = self.log_prob(keys // self.vocab_size, keys % self.vocab_size)
        return float(-(log_prob * counts).sum() / counts.sum())

    @functools.cached_property
    def _previous_counts(self) -> FloatArray:
        return _sums(self.pair_keys // self.vocab_size, self.pair_counts, self.vocab_size)

    @functools.cached_property
    def _given(self) -> FloatArray:
        given = np.minimum(self.pair_counts, self.smoothing.discount)
        return _sums(self.pair_keys // self.vocab_size, given, self.vocab_size)

    @functools.cached_property
    def _base(self) -> FloatArray:
        weights = np.ones_like(self.pair_counts) if self.smoothing.by_types else self.pair_counts
        counts = _sums(self.pair_keys % self.vocab_size, weights, self.vocab_size) + self.smoothing.alpha
        return counts / counts.sum()


def fit_bigram(records: Records, vocab_size: int) -> Bigram:
    """Fits the model to the tokens that the loss masks count, each with the token before it.

    The smoothing is the best of `GRID`: fitted to the first nine tenths of the records, judged on the last tenth. Then
    all records are counted. O(n log n) for n counted tokens; two million bytes take about a second.

    Args:
        records: Each with "tokens" and "loss_mask" [n], at least two.
        vocab_size: Number of tokens; all ids are below it.

    Raises:
        ValueError: If there are fewer than two records, a part of them has no token that counts, or an id is not in
            the vocabulary.

    >>> record = {"tokens": np.array([0, 1, 0, 1, 0, 1]), "loss_mask": np.ones(6)}
    >>> bigram = fit_bigram([record, record], vocab_size=2)
    >>> bool(bigram.log_prob(0, 1) > np.log(0.98))
    True
    """
    if len(records) < 2:
        raise ValueError(f"a bigram needs at least 2 records, one of them to choose its smoothing; got {len(records)}")
    cut = len(records) - max(1, len(records) // 10)
    fitted, judged = _count_pairs(records[:cut], vocab_size), _count_pairs(records[cut:], vocab_size)
    best = min(GRID, key=lambda smoothing: Bigram(*fitted, vocab_size, smoothing)._mean_nats(*judged))
    return Bigram(*_count_pairs(records, vocab_size), vocab_size, best)


def _count_pairs(records: Records, vocab_size: int) -> tuple[IdArray, FloatArray]:
    """Returns keys and summed weights of (token before, token) for every token that counts; a first one has none."""
    keys, weights = [np.empty(0, np.int64)], [np.empty(0)]
    for record in records:
        tokens = np.asarray(record["tokens"], np.int64)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            found_ids = f"ids from {tokens.min()} to {tokens.max()}"
            raise ValueError(f"{found_ids} are not in [0, {vocab_size}): give the tokenizer's vocab_size")
        weight = np.asarray(record["loss_mask"], np.float64)[1:]
        counted = weight > 0
        keys.append((tokens[:-1] * vocab_size + tokens[1:])[counted])
        weights.append(weight[counted])
    found, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    if not len(found):
        raise ValueError(f"none of {len(records)} records has a token that its loss mask counts: there is no loss")
    return found, _sums(inverse, np.concatenate(weights), len(found))


def _sums(index: npt.NDArray[np.integer[Any]], weight: FloatArray, size: int) -> FloatArray:
    """Returns [size] sums of the weights that fall on each index."""
    return np.bincount(index, weights=weight, minlength=size).astype(np.float64)
