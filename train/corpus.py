"""Instruction pairs: what they are, how they are read from a JSONL file, and how some are held out for evaluation."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from train.jsonl import index_lines

EVAL_SHARE = 0.1
"""Share of modules held out by default: 24 of the 287 modules of Python 3.11 that have pairs, with 192 pairs."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """One instruction and its answer.

    Attributes:
        prompt: What the model is given.
        response: What it learns to write.
        module: Where the pair comes from: a dotted module name, or file name and line. The unit of `split_by_module`.
    """

    prompt: str
    response: str
    module: str

    @property
    def size_bytes(self) -> int:
        """Length of prompt and response in UTF-8, in bytes."""
        return len(self.prompt.encode()) + len(self.response.encode())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Pairs to train on, pairs to evaluate on.

    Attributes:
        train: In the given order.
        evaluation: In the given order, of other modules than `train`.
        num_leaked: Held-out pairs left out of `evaluation` because their response also stands in `train`.
    """

    train: tuple[Pair, ...]
    evaluation: tuple[Pair, ...]
    num_leaked: int


def load_pairs(
    path: str | os.PathLike[str], *, prompt_key: str = "prompt", response_key: str = "response"
) -> tuple[Pair, ...]:
    """Returns the pairs of a JSONL file: one JSON object a line, UTF-8, two string values; other keys are ignored.

    Blank lines hold no record and are skipped, as is a byte order mark. An empty prompt is allowed, a response that is
    empty or blank is not. A pair's `module` is "file name:line".

    Raises:
        ValueError: At the first line that is not such an object, naming the file, the line and what is wrong; or if
            the file can't be read or holds no record.
    """
    rows, name = index_lines(path), pathlib.Path(path).name
    pairs = []
    for i in range(len(rows)):
        try:
            prompt, response = _fields(rows[i], prompt_key, response_key)
        except ValueError as error:
            raise ValueError(f"{rows.place(i)}: {error}") from error
        pairs.append(Pair(prompt, response, f"{name}:{rows.line(i)}"))
    return tuple(pairs)


def split_by_module(pairs: Iterable[Pair], *, eval_share: float = EVAL_SHARE) -> Split:
    """Holds whole modules out, so that no module is on both sides.

    A module is held out if the hash of its name falls into the first `eval_share` of all hash values: the choice
    depends on nothing but the name, and a module stays on its side when others come or go.

    Raises:
        ValueError: If `eval_share` is not between 0 and 1, or one of the sides remains empty.

    >>> pairs = [Pair("p", f"response {i}", f"module_{i}") for i in range(1000)]
    >>> split = split_by_module(pairs, eval_share=0.1)
    >>> len(split.train), len(split.evaluation)
    (904, 96)
    """
    if not 0 < eval_share < 1:
        raise ValueError(f"eval_share must be between 0 and 1, got {eval_share!r}")
    train: list[Pair] = []
    held_out: list[Pair] = []
    for pair in pairs:
        (held_out if in_held_out_share(pair.module, eval_share) else train).append(pair)
    trained = {pair.response.strip() for pair in train}
    evaluation = tuple(pair for pair in held_out if pair.response.strip() not in trained)
    if not train or not evaluation:
        raise ValueError(
            f"eval_share={eval_share!r} leaves {len(train)} training and {len(evaluation)} evaluation pairs; "
            "both sides need some: give another eval_share, or more pairs"
        )
    return Split(train=tuple(train), evaluation=evaluation, num_leaked=len(held_out) - len(evaluation))


def describe_pairs(pairs: Sequence[Pair]) -> str:
    """Returns one line about pairs: how many, from how many modules, and their lengths in bytes.

    >>> describe_pairs([Pair("1 + 1 =", "2", "sums"), Pair("2 + 2 =", "4", "sums")])
    '1 modules; bytes: 2 records, 16 in all, mean 8, CV 0.00, p10 8, p50 8, p90 8, p99 8, longest 8'
    """
    return f"{len({pair.module for pair in pairs})} modules; bytes: " + describe_sizes(
        [pair.size_bytes for pair in pairs]
    )


def describe_sizes(sizes: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
    """Returns one line about record lengths, in the unit they are given in.

    >>> describe_sizes([100, 200, 300, 1000])
    '4 records, 1,600 in all, mean 400, CV 0.88, p10 130, p50 250, p90 790, p99 979, longest 1,000'
    """
    values = np.asarray(sizes, np.float64)
    quantiles = zip((10, 50, 90, 99), np.percentile(values, (10, 50, 90, 99)), strict=True)
    return (
        f"{len(values):,} records, {values.sum():,.0f} in all, mean {values.mean():,.0f}, "
        f"CV {values.std() / values.mean():.2f}, "
        + ", ".join(f"p{percent} {value:,.0f}" for percent, value in quantiles)
        + f", longest {values.max():,.0f}"
    )


def in_held_out_share(name: str, eval_share: float) -> bool:
    """Whether something of this name is held out: a function of the two alone, as in `split_by_module`."""
    return hash_fraction(name) < eval_share


def hash_fraction(name: str) -> float:
    """Returns a number from 0 to 1 that is evenly spread over names, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") / 2**64


def _fields(record: dict[str, Any], prompt_key: str, response_key: str) -> tuple[str, str]:
    prompt, response = (_text(record, key) for key in (prompt_key, response_key))
    if not response.strip():
        raise ValueError(f"{response_key!r} is empty: there is nothing to learn; fill or remove the record")
    return prompt, response


def _text(record: dict[str, Any], key: str) -> str:
    if key not in record:
        raise ValueError(f"no key {key!r} among {sorted(record)}; rename it, or say which keys to read")
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be a string, got a {type(value).__name__}: {value!r:.60}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{key!r} has half of a surrogate pair at character {error.start}; repair the text") from error
    return value
