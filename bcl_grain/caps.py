"""Caps: what happens to a record that is too large, before anything is balanced.

One record can break memory, or outweigh a whole pack, whatever the plan. `cap_oversize` bounds the size of what a
Grain dataset yields; the user says how, and every record it touches is counted.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import grain
import numpy as np
import numpy.typing as npt

from bcl_grain.checks import check_choice, check_function, checked_integer, checked_number

SizeFn = Callable[[Any], float]
SplitFn = Callable[[Any], Sequence[Any]]
TruncateFn = Callable[[Any, int], Any]
DatasetT = TypeVar("DatasetT", grain.MapDataset, grain.IterDataset)


class CapReport:
    """Counts what caps have touched, in this process; readable while the dataset is iterated, from any thread.

    It is no part of a checkpoint: after a restore it counts on, and a record that is read again counts again.
    A pickled report arrives empty: workers of `mp_prefetch` count into reports of their own, which nobody reads;
    to see the counts, cap after `mp_prefetch`.

    >>> report = CapReport()
    >>> report.add(size_removed=20)
    >>> report
    CapReport(records=1, size_removed=20)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records = 0
        self._size_removed = 0.0

    @property
    def records(self) -> int:
        """Oversize records so far."""
        return self._records

    @property
    def size_removed(self) -> float:
        """Their size, less what is left of them."""
        return self._size_removed

    def add(self, size_removed: float) -> None:
        """Counts one oversize record."""
        with self._lock:
            self._records += 1
            self._size_removed += size_removed

    def __repr__(self) -> str:
        return f"CapReport(records={self._records}, size_removed={self._size_removed:g})"

    def __reduce__(self) -> tuple[type[CapReport], tuple[()]]:
        return CapReport, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> CapReport:
        return self  # threads that prefetch work on copies of the dataset and count into the same report


def token_size(record: Mapping[str, Any]) -> int:
    """Returns the length of the record's "tokens".

    Raises:
        ValueError: If it has none.
    """
    try:
        return len(record["tokens"])
    except (KeyError, TypeError, IndexError):
        raise ValueError('record has no "tokens" with a length: pass a size_fn of your own') from None


def truncate_features(record: Mapping[str, Any], max_size: int) -> dict[str, Any]:
    """Cuts the record's "tokens" and every other 1-D feature of the same length after `max_size` values.

    >>> truncate_features({"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "id": 7}, 2)
    {'tokens': [1, 2], 'loss_mask': [0, 1], 'id': 7}
    """
    size = token_size(record)
    return {
        name: values[:max_size] if np.ndim(values) == 1 and len(values) == size else values
        for name, values in record.items()
    }


def cap_oversize(
    ds: DatasetT,
    *,
    max_size: int,
    on_oversize: Literal["error", "truncate", "drop", "split"] = "error",
    size_fn: SizeFn = token_size,
    truncate_fn: TruncateFn = truncate_features,
    split_fn: SplitFn | None = None,
    max_pieces: int | None = None,
    report: CapReport | None = None,
) -> DatasetT:
    """Bounds the size of a dataset's records: `ds.pipe(cap_oversize, max_size=...)`, before packs are made.

    It is made of Grain's own transformations, so that checkpoints are exact. What each choice does to a record
    larger than `max_size`:

    *   "error" raises, naming the record's position in the dataset (or in the iterator's stream).
    *   "truncate" replaces it by `truncate_fn(record, max_size)`. Note that cutting off the end may take away all
        tokens that a loss counts.
    *   "drop" leaves it out. Shards then differ in length: agree on a number of steps (`num_packs`), or ranks wait
        for each other in vain. A MapDataset keeps its length, with None in the place of a dropped record, which
        `to_iter_dataset` skips, but `MapDataset.batch` does not.
    *   "split" replaces it by `split_fn(record)`. Shards differ in length here too. A MapDataset becomes `max_pieces`
        times as long, mostly None, and reads and splits each record `max_pieces` times: better split the
        IterDataset, where each record is read once.

    Args:
        ds: A MapDataset or an IterDataset of records.
        max_size: Largest size that passes, at least 1; `fit_cap` proposes one.
        on_oversize: What happens to a larger record.
        size_fn: Maps a record to its size; by default the length of its "tokens".
        truncate_fn: Maps an oversize record and `max_size` to one that is small enough.
        split_fn: Maps an oversize record to one or more that are small enough. Must be deterministic.
        max_pieces: Largest number of pieces of a record; only to split a MapDataset.
        report: Counts the records that are touched; required unless `on_oversize` is "error", so that nothing
            disappears unseen.

    Returns:
        A dataset of the same kind.

    Raises:
        ValueError: If an option is out of range, or missing, or given in vain. While iterating: if a record is larger
            than allowed, or what `truncate_fn` or `split_fn` return is.

    Complexity: one call of `size_fn` for each record.

    >>> ds = grain.MapDataset.source([{"tokens": list(range(n))} for n in (3, 9, 4)])
    >>> report = CapReport()
    >>> [len(r["tokens"]) for r in ds.pipe(cap_oversize, max_size=5, on_oversize="truncate", report=report)]
    [3, 5, 4]
    >>> report
    CapReport(records=1, size_removed=4)
    >>> list(ds.pipe(cap_oversize, max_size=5))
    Traceback (most recent call last):
    ...
    ValueError: record 1 has size 9, above max_size 5: raise max_size, or pass on_oversize="truncate", ...
    """
    max_size = checked_integer("max_size", max_size, 1)
    check_function("size_fn", size_fn)
    check_function("truncate_fn", truncate_fn)
    check_choice("on_oversize", on_oversize, ("error", "truncate", "drop", "split"))
    if split_fn is not None:
        check_function("split_fn", split_fn)
    if (split_fn is not None) != (on_oversize == "split"):
        raise ValueError(f"split_fn and on_oversize='split' need each other, got on_oversize={on_oversize!r}")
    if not (report is None or isinstance(report, CapReport)):
        raise ValueError(f"report must be a CapReport, to be filled, or None, got {report!r}")
    needs_max_pieces = on_oversize == "split" and isinstance(ds, grain.MapDataset)
    if (max_pieces is not None) != needs_max_pieces:
        raise ValueError(f"max_pieces is needed to split a MapDataset, and only there, got {max_pieces!r}")
    if max_pieces is not None:
        checked_integer("max_pieces", max_pieces, 1)
    if on_oversize == "error":
        return ds.map_with_index(_Check(max_size, size_fn))
    if report is None:
        raise ValueError(f"on_oversize={on_oversize!r} changes the data: pass report=CapReport() and read it")
    if on_oversize == "truncate":
        return ds.map(_Truncate(max_size, size_fn, truncate_fn, report))
    if on_oversize == "drop":
        return ds.filter(_Keep(max_size, size_fn, report))
    assert split_fn is not None
    flat_map = _Split(max_size, size_fn, split_fn, max_pieces or 0)
    if isinstance(ds, grain.MapDataset):
        pieces = grain.experimental.FlatMapMapDataset(ds, flat_map)
    else:
        pieces = grain.experimental.FlatMapIterDataset(ds, flat_map)
    return pieces.map(_Count(report))


def fit_cap(sample_sizes: npt.ArrayLike, percentile: float = 99.0) -> int:
    """Returns the smallest size of the sample that at least `percentile` percent of it do not exceed.

    Args:
        sample_sizes: [n] sizes, n at least 1.
        percentile: Above 0, at most 100 (the largest size).

    Raises:
        ValueError: If the sample is empty or holds a size below 1, or `percentile` is out of range.

    >>> fit_cap(range(1, 201), percentile=99.0)
    198
    """
    sizes = np.asarray(sample_sizes)
    if sizes.ndim != 1 or sizes.dtype.kind not in "iuf" or not sizes.size or not sizes.min() >= 1:
        raise ValueError(f"sample_sizes must be a non-empty list of sizes of at least 1, got {sample_sizes!r}")
    if not 0 < checked_number("percentile", percentile) <= 100:
        raise ValueError(f"percentile must be above 0 and at most 100, got {percentile!r}")
    return int(np.ceil(np.percentile(sizes, percentile, method="inverted_cdf")))


@dataclasses.dataclass(frozen=True)
class _Check:
    max_size: int
    size_fn: SizeFn

    def __call__(self, index: int, record: Any) -> Any:
        size = self.size_fn(record)
        if not size <= self.max_size:
            raise ValueError(
                f"record {index} has size {size}, above max_size {self.max_size}: raise max_size, or pass "
                'on_oversize="truncate", "drop" or "split"'
            )
        return record


@dataclasses.dataclass(frozen=True)
class _Truncate:
    max_size: int
    size_fn: SizeFn
    truncate_fn: TruncateFn
    report: CapReport

    def __call__(self, record: Any) -> Any:
        size = self.size_fn(record)
        if size <= self.max_size:
            return record
        truncated = self.truncate_fn(record, self.max_size)
        left = self.size_fn(truncated)
        if not left <= self.max_size:
            raise ValueError(
                f"record of size {size} still has size {left} after truncate_fn, above max_size {self.max_size}: "
                "pass a truncate_fn that cuts what size_fn measures"
            )
        self.report.add(size - left)
        return truncated


@dataclasses.dataclass(frozen=True)
class _Keep:
    max_size: int
    size_fn: SizeFn
    report: CapReport

    def __call__(self, record: Any) -> bool:
        size = self.size_fn(record)
        if size <= self.max_size:
            return True
        self.report.add(size)
        return False


class _Piece(NamedTuple):
    """A record on its way from `_Split` to `_Count`.

    They are two steps because a flat map runs again for each piece of a MapDataset, and again on restore, but a
    piece comes out once.
    """

    record: Any
    is_first: bool
    size_removed: float


@dataclasses.dataclass(frozen=True)
class _Split(grain.experimental.FlatMapTransform):
    max_size: int
    size_fn: SizeFn
    split_fn: SplitFn
    max_fan_out: int

    def flat_map(self, element: Any) -> list[_Piece]:
        size = self.size_fn(element)
        if size <= self.max_size:
            return [_Piece(element, False, 0)]
        records = self.split_fn(element)
        sizes = [self.size_fn(record) for record in records]
        if not sizes or not all(piece <= self.max_size for piece in sizes):
            raise ValueError(
                f"record of size {size} was split by split_fn into sizes {sizes}, but there must be at least one piece "
                f"and none above max_size {self.max_size}"
            )
        removed = size - sum(sizes)
        return [_Piece(record, i == 0, removed) for i, record in enumerate(records)]


@dataclasses.dataclass(frozen=True)
class _Count:
    report: CapReport

    def __call__(self, piece: _Piece) -> Any:
        if piece.is_first:
            self.report.add(piece.size_removed)
        return piece.record
