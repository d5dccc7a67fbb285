"""Cost models: what a record costs, and what a chunk of a fixed shape costs.

A cost is the estimated time of a record, positive and finite. Its unit is the model's own (FLOPs, tokens,
seconds); the planner uses ratios only.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bcl_grain.checks import checked_integer, checked_number

CostFn = Callable[[Any], float]
"""Maps a record to its cost. Must be deterministic: a restored pipeline evaluates it again."""

FloatArray = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class TransformerCost:
    """Cost of a record of n tokens: `per_token * n + per_token_squared * n**2`.

    The linear part is the matrix multiplications over tokens, the quadratic part is attention. A chunk of
    shape [rows, length] costs `per_chunk` more than its rows, each counted as if it were full.

    Attributes:
        per_token: Cost of one token, at least 0.
        per_token_squared: Cost of one squared token, at least 0.
        per_chunk: Fixed cost of launching one chunk, at least 0. Not part of a record's cost.
        feature: The record's feature whose first axis is the record's length in tokens.

    Raises:
        ValueError: If a coefficient is negative or not finite, or both per-token ones are 0.

    >>> cost = TransformerCost(per_token=1.0, per_token_squared=0.5)
    >>> cost({"tokens": [7, 8, 9, 10]})
    12.0
    >>> cost.of_chunk(rows=2, length=4)
    24.0
    """

    per_token: float
    per_token_squared: float = 0.0
    per_chunk: float = 0.0
    feature: str = "tokens"

    def __post_init__(self) -> None:
        for name in ("per_token", "per_token_squared", "per_chunk"):
            object.__setattr__(self, name, checked_number(name, getattr(self, name), least=0))
        if not isinstance(self.feature, str):
            raise ValueError(f"feature must be the name of a feature, got {self.feature!r}")
        if self.per_token == 0 and self.per_token_squared == 0:
            raise ValueError("per_token and per_token_squared are both 0: every record would cost nothing")

    @classmethod
    def from_dims(
        cls,
        *,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        hidden: int,
        vocab_size: int,
        gated: bool = True,
        causal: bool = True,
        remat: bool = False,
        feature: str = "tokens",
    ) -> TransformerCost:
        """Counts the FLOPs of one training step (forward and backward) of a decoder-only transformer.

        A multiplication with a matrix of P entries is 2 P FLOPs a token forward and 4 P backward. Attention
        multiplies twice, `2 * heads * head_dim` FLOPs each for every pair of a query and a key that it computes:
        n**2 pairs, or about n**2 / 2 with a causal kernel that skips the upper half. The embedding look-up, norms
        and softmax are left out.

        Args:
            layers: Decoder layers.
            width: Model width.
            heads: Query heads.
            kv_heads: Key and value heads; default `heads` (no grouped-query attention).
            head_dim: Width of a head; default `width // heads`.
            hidden: Width of the feed-forward layer.
            vocab_size: Entries of the vocabulary (the output projection).
            gated: Whether the feed-forward layer has three matrices (SwiGLU) or two.
            causal: Whether the attention kernel skips the upper half. False for a dense mask.
            remat: Whether the backward pass computes the layers' forward again.
            feature: See `TransformerCost`.

        Returns:
            A cost in FLOPs.

        Raises:
            ValueError: If a dimension is not positive, or `width` is no multiple of `heads` where `head_dim` is
                left out.

        >>> cost = TransformerCost.from_dims(
        ...     layers=30, width=576, heads=9, kv_heads=3, head_dim=64, hidden=1536, vocab_size=49152)
        >>> print(f"{cost.per_token:.4g} {cost.per_token_squared:.4g}")
        8.069e+08 1.037e+05
        """
        for name, flag in {"gated": gated, "causal": causal, "remat": remat}.items():
            if not isinstance(flag, bool):
                raise ValueError(f"{name} must be True or False, got {flag!r}")
        kv_heads = heads if kv_heads is None else kv_heads
        dims = {
            "layers": layers,
            "width": width,
            "heads": heads,
            "kv_heads": kv_heads,
            "hidden": hidden,
            "vocab_size": vocab_size,
        }
        for name, value in dims.items():
            checked_integer(name, value, 1)
        if head_dim is None:
            if width % heads:
                raise ValueError(f"width {width} is not a multiple of heads {heads}: pass head_dim")
            head_dim = width // heads
        checked_integer("head_dim", head_dim, 1)
        attention_weights = width * head_dim * (2 * heads + 2 * kv_heads)
        layer_weights = attention_weights + (3 if gated else 2) * width * hidden
        layer_passes = 4 if remat else 3  # forward, twice as much backward, and forward again with remat
        pairs_per_squared_token = 0.5 if causal else 1.0
        return cls(
            per_token=2.0 * (layer_passes * layers * layer_weights + 3 * width * vocab_size),
            per_token_squared=layer_passes * layers * 4.0 * heads * head_dim * pairs_per_squared_token,
            feature=feature,
        )

    def __call__(self, record: Mapping[str, Any]) -> float:
        """Returns the cost of a record, from the length of its `feature`.

        Raises:
            ValueError: If the record has no such feature.
        """
        try:
            n = len(record[self.feature])
        except (KeyError, TypeError, IndexError):
            raise ValueError(
                f"record has no feature {self.feature!r} with a length: pass feature=..., or a cost_fn of your own"
            ) from None
        return self.per_token * n + self.per_token_squared * n * n

    def of_length(self, length: npt.ArrayLike) -> FloatArray:
        """Returns the cost of records of `length` tokens, elementwise.

        >>> TransformerCost(1.0, 0.5).of_length([2, 4])
        array([ 4., 12.])
        """
        n = np.asarray(length, np.float64)
        return self.per_token * n + self.per_token_squared * n * n

    def of_chunk(self, rows: int, length: int) -> float:
        """Returns the executed cost of one chunk [rows, length], padding and all."""
        return self.per_chunk + rows * (self.per_token * length + self.per_token_squared * length * length)


def token_cost(feature: str = "tokens") -> TransformerCost:
    """Returns the cost model that counts tokens.

    >>> token_cost()({"tokens": [1, 2, 3]})
    3.0
    """
    return TransformerCost(per_token=1.0, feature=feature)


@dataclasses.dataclass(frozen=True)
class CostFit:
    """A cost model fitted to timings.

    Attributes:
        cost: The model, in seconds.
        relative_residuals: predicted / measured - 1, in the order of the timings.
    """

    cost: TransformerCost
    relative_residuals: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The largest absolute relative residual."""
        return max(abs(r) for r in self.relative_residuals)


def fit_cost(timings: Sequence[tuple[tuple[int, int], float]], feature: str = "tokens") -> CostFit:
    """Fits a cost model to measured chunk times by non-negative least squares of the relative error.

    With three coefficients the best non-negative solution is found by trying every subset of active ones
    (Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23, gives the optimality conditions).
    The error is relative, so that a chunk of a millisecond counts as much as one of a second. Rows of a single length
    can't tell the squared part from the linear one: all is counted as linear then, which is what a record takes of rows
    that it shares with others.

    Args:
        timings: ((rows, length), seconds) of at least two different shapes.
        feature: See `TransformerCost`.

    Raises:
        ValueError: If there are fewer than two different shapes, or a value is not positive and finite.

    >>> shapes = [(1, 128), (4, 128), (1, 512), (4, 512)]
    >>> fit = fit_cost([((r, n), 1e-3 + r * (1e-5 * n + 1e-8 * n * n)) for r, n in shapes])
    >>> print(f"{fit.cost.per_token:.1e} {fit.cost.per_token_squared:.1e} {fit.cost.per_chunk:.1e}")
    1.0e-05 1.0e-08 1.0e-03
    """
    try:
        if isinstance(timings, str | bytes):
            raise TypeError
        timings = [_checked_timing(timing) for timing in timings]
    except TypeError:
        raise ValueError(f"timings must be a list of ((rows, length), seconds), got {timings!r}") from None
    if len({shape for shape, _ in timings}) < 2:
        raise ValueError(f"fitting needs timings of at least two different shapes, got {list(timings)!r}")
    columns = np.array([(rows * length, rows * length**2, 1) for (rows, length), _ in timings], np.float64)
    one_length = len({length for (_, length), _ in timings}) == 1
    measured = np.array([seconds for _, seconds in timings], np.float64)
    coefficients, residuals = _fit_relative(columns, measured, linear=one_length)
    return CostFit(TransformerCost(*coefficients, feature), residuals)


def _checked_timing(timing: Any) -> tuple[tuple[int, int], float]:
    try:
        (rows, length), seconds = timing
        return (checked_integer("rows", rows, 1), checked_integer("length", length, 1)), checked_number(
            "seconds", seconds, above=0
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a timing must be positive and finite, ((rows, length), seconds), got {timing!r}: {error}"
        ) from None


def fit_record_cost(
    packs: Sequence[npt.ArrayLike], pack_costs: Sequence[float], feature: str = "tokens"
) -> TransformerCost:
    """Fits what a record costs to what whole packs cost, padding and all, as `fit_cost` does it for chunks.

    Layouts round: what a pack costs is no sum over its records, but this is the sum that comes nearest. What all packs
    have in common, whatever they hold, is no record's.

    Args:
        packs: Lengths of each pack's records, in tokens.
        pack_costs: What each pack costs, positive and finite.
        feature: See `TransformerCost`.

    Raises:
        ValueError: If there are fewer than two packs, or not a cost for each.

    >>> packs = [[2, 9], [5, 5], [1, 3], [8, 8]]
    >>> cost = fit_record_cost(packs, [7.0 + sum(2.0 * n + 0.5 * n * n for n in pack) for pack in packs])
    >>> print(f"{cost.per_token:.3f} {cost.per_token_squared:.3f} {cost.per_chunk}")
    2.000 0.500 0.0
    """
    if len(packs) < 2 or len(packs) != len(pack_costs):
        raise ValueError(
            f"fitting needs at least two packs and a cost for each, got {len(packs)} and {len(pack_costs)}"
        )
    sums = [(float(n.sum()), float((n**2).sum()), 1.0) for n in (np.asarray(pack, np.float64) for pack in packs)]
    (per_token, per_token_squared, _), _ = _fit_relative(np.array(sums), np.asarray(pack_costs, np.float64))
    return TransformerCost(per_token, per_token_squared, feature=feature)


def _fit_relative(
    columns: FloatArray, measured: FloatArray, *, linear: bool = False
) -> tuple[tuple[float, float, float], tuple[float, ...]]:
    """Returns the non-negative coefficients of [n, 3] columns (tokens, squares, 1) and predicted / measured - 1."""
    relative = columns / measured[:, None]
    scale = relative.max(axis=0)  # columns differ by orders of magnitude
    best: tuple[float, FloatArray] | None = None
    for active in itertools.chain.from_iterable(itertools.combinations(range(3), k) for k in (1, 2, 3)):
        if active == (2,):
            continue  # a fixed cost alone gives records no cost
        if linear and 1 in active:
            continue
        x = np.zeros(3)
        x[list(active)] = np.linalg.lstsq(relative[:, active] / scale[list(active)], np.ones(len(columns)))[0]
        error = float(np.sum((relative / scale @ x - 1) ** 2))
        # As good a fit with fewer coefficients, or without a fixed cost, came before: chunks of equal tokens can't tell
        # a cost of tokens from one of chunks, and rounding must not decide.
        if (x >= 0).all() and x[:2].any() and (best is None or error < best[0] - 1e-22):
            best = error, x / scale
    assert best is not None  # a single positive column always gives a positive coefficient
    per_token, per_token_squared, fixed = (float(x) for x in best[1])
    residuals = tuple(float(r) for r in columns @ best[1] / measured - 1)
    return (per_token, per_token_squared, fixed), residuals


def checked_cost(cost_fn: CostFn, record: object, position: int) -> float:
    """Returns `cost_fn(record)`, or raises an error that says which record is at fault.

    Args:
        cost_fn: The cost model.
        record: One record.
        position: The record's place in its stream, from 0, for the message.

    Raises:
        ValueError: If `cost_fn` raises, or its value is not a positive finite number.

    >>> checked_cost(len, [], 17)
    Traceback (most recent call last):
    ...
    ValueError: cost of record 17 of the stream is 0, but a cost must be positive and finite: ...
    """
    try:
        value = cost_fn(record)
    except Exception as error:
        raise ValueError(f"cost_fn raised on record {position} of the stream: {error!r}") from error
    try:
        cost = float(value)
    except OverflowError:
        cost = math.inf
    except (TypeError, ValueError):
        raise ValueError(
            f"cost of record {position} of the stream is {value!r}, but a cost must be one number: mend what cost_fn "
            "returns"
        ) from None
    if not (math.isfinite(cost) and cost > 0):
        raise ValueError(
            f"cost of record {position} of the stream is {value!r}, but a cost must be positive and finite: "
            "filter such records upstream or mend cost_fn"
        )
    return cost
