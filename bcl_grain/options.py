"""The little languages of the command line's options: costs, layouts, caps, policies, ranges of steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from bcl_grain.caps import fit_cap
from bcl_grain.cost_table import read_cost_table
from bcl_grain.costs import TransformerCost, token_cost
from bcl_grain.layouts import BucketedLayout, Layout, PaddedLayout, RowPackedLayout, RowPackedOneShapeLayout
from bcl_grain.models import load_model
from bcl_grain.shapes import fit_rows, fit_shape

IntArray = npt.NDArray[np.int64]

LENGTH_MULTIPLE = 128
"""Row lengths that are proposed are multiples of it."""


def round_up(value: int, multiple: int = LENGTH_MULTIPLE) -> int:
    """Returns the smallest multiple that is at least `value`.

    >>> round_up(130), round_up(128)
    (256, 128)
    """
    return -(-value // multiple) * multiple


def parse_cost(text: str, *, remat: bool = False) -> TransformerCost:
    """Returns the cost model that --cost names.

    Args:
        text: `tokens`; `transformer:MODEL` with a known model or a config.json; or `linear=A,quadratic=B` with the cost
            of a token and of a squared token, and optionally `,chunk=C` with that of a chunk; or `table:FILE` with
            costs measured by `train.calibrate`.
        remat: Whether a transformer's backward pass computes the layers again.

    Raises:
        ValueError: If it is none of these.

    >>> parse_cost("linear=1,quadratic=0.5")({"tokens": [7, 8, 9, 10]})
    12.0
    """
    if text == "tokens":
        return token_cost()
    kind, _, rest = text.partition(":")
    if kind == "transformer" and rest:
        return load_model(rest).cost(remat=remat)
    if kind == "table" and rest:
        return read_cost_table(rest).cost
    if "=" in text:
        values = _key_values(text, float, "--cost", ("linear", "quadratic", "chunk"))
        return TransformerCost(values.get("linear", 0.0), values.get("quadratic", 0.0), values.get("chunk", 0.0))
    raise ValueError(f"unknown cost {text!r}: pass tokens, transformer:MODEL, linear=A,quadratic=B or table:FILE")


def parse_layout(
    text: str, lengths: IntArray, *, pack_size: int, cost: TransformerCost, seed: int = 0
) -> Layout | None:
    """Returns the layout that --layout names; what is left out is fitted to the lengths.

    Args:
        text: `none`; or `row-packed`, `one-shape`, `bucketed` or `padded`, then optionally `:key=value,...` with the
            layout's own arguments; several values are joined by `+`, as in `row-packed:length=2048,heights=1+2`.
            `row-packed` alone is what `fit_rows` proposes.
        lengths: [n] lengths of the corpus, the cap applied.
        pack_size: Records in a pack.
        cost: What a chunk costs.
        seed: See `fit_shape`.

    Raises:
        ValueError: If it is none of these.

    >>> parse_layout("row-packed:rows_per_chunk=2", np.array([100, 300]), pack_size=8, cost=TransformerCost(1.0)).shapes
    ((2, 384),)
    """
    name, _, rest = text.partition(":")
    if name == "none" and not rest:
        return None
    longest = round_up(int(lengths.max()))
    if name == "row-packed":
        values = _key_values(rest, _integers, "--layout", ("length", "rows_per_chunk", "heights", "lengths"))
        if not values:
            return fit_rows(lengths, pack_size=pack_size, cost=cost, seed=seed)
        return RowPackedLayout(
            length=_one(values, "length", longest),
            rows_per_chunk=_one(values, "rows_per_chunk", 1),
            heights=tuple(values.get("heights", ())),
            lengths=tuple(values.get("lengths", ())),
        )
    if name == "one-shape":
        values = _key_values(rest, _integers, "--layout", ("rows", "length"))
        if values.keys() != {"rows", "length"}:
            rows, length = fit_shape(lengths, max_length=int(lengths.max()), pack_size=pack_size, seed=seed)
            values = {"rows": [rows], "length": [length], **values}
        return RowPackedOneShapeLayout(rows=_one(values, "rows", 1), length=_one(values, "length", longest))
    if name == "bucketed":
        values = _key_values(rest, _integers, "--layout", ("lengths", "tokens_per_chunk"))
        doubled = tuple(LENGTH_MULTIPLE << i for i in range(32) if LENGTH_MULTIPLE << i < 2 * longest)
        buckets = tuple(values.get("lengths", doubled))
        return BucketedLayout(lengths=buckets, tokens_per_chunk=_one(values, "tokens_per_chunk", max(buckets)))
    if name == "padded":
        values = _key_values(rest, _integers, "--layout", ("length",))
        return PaddedLayout(pack_size=pack_size, length=_one(values, "length", longest))
    raise ValueError(
        f"unknown layout {text!r}: pass none, row-packed, one-shape, bucketed or padded, as NAME[:key=value]"
    )


def parse_cap(text: str, lengths: IntArray) -> int | None:
    """Returns the cap that --cap names: `none`, a length, or a percentile of the lengths such as `p99`.

    Raises:
        ValueError: If it is none of these.

    >>> parse_cap("p50", np.arange(1, 101))
    50
    """
    if text == "none":
        return None
    try:
        cap = fit_cap(lengths, float(text[1:])) if text.startswith("p") else int(text)
    except ValueError:
        raise ValueError(f"unknown cap {text!r}: pass none, a length of at least 1, or a percentile like p99") from None
    if not 1 <= cap < 2**31:
        raise ValueError(f"a cap must be from 1 to {2**31 - 1:,}, got {cap}")
    return cap


def parse_names(text: str, known: Collection[str], what: str) -> list[str]:
    """Returns the names in a list with commas, each once.

    Raises:
        ValueError: If one is unknown, or there is none.

    >>> parse_names("arrival,windowed", ("arrival", "windowed", "kk"), "policy")
    ['arrival', 'windowed']
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(f"unknown {what} {', '.join(unknown)!r}: choose among {', '.join(known)}")
    return names


def parse_sizes(text: str, option: str) -> list[int]:
    """Returns the positive integers in a list with commas, ascending, each once.

    Raises:
        ValueError: If one is none, or there is none.

    >>> parse_sizes("8,1,8", "--pack-sizes")
    [1, 8]
    """
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1 or sizes[-1] >= 2**31:
        raise ValueError(f"{option} {text!r} is no list of positive integers: pass, for example, 8,16,32")
    return sizes


def parse_steps(text: str | None, steps: int) -> tuple[int, int]:
    """Returns the range of steps that --report names: `A:B` are steps A to B - 1, an end left out is the job's.

    Raises:
        ValueError: If it is no range within the job.

    >>> parse_steps("100:", 300)
    (100, 300)
    """
    if text is None:
        return 0, steps
    first, colon, last = text.partition(":")
    try:
        bounds = (int(first or 0), int(last or steps))
    except ValueError:
        bounds = (-1, -1)
    if not colon or not 0 <= bounds[0] < bounds[1] <= steps:
        raise ValueError(f"--report {text!r} is no range A:B within 0:{steps}, the job's steps: pass one")
    return bounds


def _key_values(text: str, parse: Callable[[str], Any], option: str, known: Collection[str]) -> dict[str, Any]:
    values = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in known:
            raise ValueError(f"{option} doesn't know {part!r}: pass key=value with keys among {', '.join(known)}")
        try:
            values[key] = parse(value)
        except ValueError:
            raise ValueError(f"{option}: {value!r} is no value for {key!r}: pass a number") from None
    return values


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split("+")]


def _one(values: dict[str, list[int]], key: str, default: int) -> int:
    chosen = values.get(key, [default])
    if len(chosen) != 1:
        raise ValueError(f"--layout takes one {key}, got {chosen}")
    return chosen[0]
