"""Layouts: how a pack of records becomes chunks, arrays of a few shapes that are known before the first record.

A layout is called with a pack (`ds.map(layout)`) and returns a list of chunks; `bcl_grain.chunks` says what they
hold. Everything but the copying is decided from the records' sizes alone, so that a simulation of sizes is a
statement about the real thing.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bcl_grain.checks import checked_integer, checked_number
from bcl_grain.chunks import Block, Chunk, Column, Record, fill_chunks, pack_columns
from bcl_grain.rows import cover_rows, first_fit_decreasing

Shape = tuple[int, int]
Sizes = Sequence[int] | npt.NDArray[np.integer[Any]]


class ChunkCost(Protocol):
    """What a cost model must offer to judge a layout."""

    def of_chunk(self, rows: int, length: int) -> float:
        """Returns the executed cost of one chunk [rows, length]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(abc.ABC):
    """What all layouts share. A subclass says which shapes there are and which record goes where.

    Attributes:
        size_feature: The feature whose length is the record's size, in tokens.
        pad_id: What fills `size_feature` where no record is. All other features are 0 there.
        empty_features: (feature, dtype) of the chunk that stands for a pack without records, which cannot show
            them; default `size_feature` as int32 and "loss_mask" as float32.
    """

    size_feature: str = "tokens"
    pad_id: int = 0
    empty_features: tuple[tuple[str, str], ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.size_feature, str):
            raise ValueError(f"size_feature must be the name of a feature, got {self.size_feature!r}")
        checked_integer("pad_id", self.pad_id, -(2**31))
        features = self.empty_features
        if features is not None and not (
            isinstance(features, tuple | list)
            and all(isinstance(item, tuple | list) and len(item) == 2 for item in features)
        ):
            raise ValueError(f"empty_features must be pairs of a feature and its dtype, got {features!r}")
        if features is not None and self.size_feature not in dict(features):
            raise ValueError(f"empty_features {features!r} must name the size_feature {self.size_feature!r}")

    @property
    @abc.abstractmethod
    def shapes(self) -> tuple[Shape, ...]:
        """All shapes (rows, length) that a chunk may have."""

    @abc.abstractmethod
    def place(self, sizes: Sequence[int]) -> list[Block]:
        """Decides from the sizes alone which record goes where. Every position of `sizes` occurs once.

        Raises:
            ValueError: If a size, or the whole, does not fit.
        """

    def chunk_shapes(self, sizes: Sizes) -> list[Shape]:
        """Returns the shapes of the chunks that a pack of records of these sizes becomes, in order.

        Args:
            sizes: [n] sizes of the pack's records, in tokens. A pack without records becomes one chunk of padding,
                the smallest, so that its rank has as many steps as the others.

        Raises:
            ValueError: If the pack does not fit; the message names the record or the sizes, and the remedy.
        """
        blocks = self.place(sizes.tolist() if isinstance(sizes, np.ndarray) else sizes)
        return [(height, block.length) for block in blocks for height in block.heights]

    def executed_cost(self, sizes: Sizes, cost_model: ChunkCost) -> float:
        """Returns what the accelerator runs for a pack of these sizes: the cost of its chunks, padding included."""
        return sum((cost_model.of_chunk(rows, length) for rows, length in self.chunk_shapes(sizes)), 0.0)

    def __call__(self, pack: Sequence[Record]) -> list[Chunk]:
        """Turns a pack into its chunks, of the shapes that `chunk_shapes` gives for its sizes.

        Args:
            pack: Records, each a dict of 1-D arrays of equal length, all with the same features and dtypes.

        Raises:
            ValueError: If the pack does not fit, or records are not as above; the message names the record's
                place in the pack and the remedy.

        Complexity: O(n log n) for n records, and one copy of the data.
        """
        if pack:
            columns = pack_columns(pack, self.size_feature)
        else:
            features = self.empty_features or ((self.size_feature, "int32"), ("loss_mask", "float32"))
            columns = {name: Column(np.dtype(dtype), []) for name, dtype in features}
        blocks = self.place([len(values) for values in columns[self.size_feature].arrays])
        return [chunk for block in blocks for chunk in fill_chunks(block, columns, self.size_feature, self.pad_id)]


def _check_positive(**values: object) -> None:
    for name, value in values.items():
        checked_integer(name, value, 1)


def _check_all_positive(name: str, values: object) -> None:
    if not isinstance(values, tuple | list):
        raise ValueError(f"{name} must be a tuple of integers, got {values!r}")
    for value in values:
        checked_integer(f"each of {name}", value, 1)


def _check_sizes(sizes: Sequence[int], longest: int, option: str) -> None:
    if sizes and (min(sizes) < 1 or max(sizes) > longest):
        i = next(i for i, size in enumerate(sizes) if not 1 <= size <= longest)
        if sizes[i] < 1:
            raise ValueError(f"record {i} of the pack has length {sizes[i]}: remove empty records upstream (ds.filter)")
        raise ValueError(
            f"record {i} of the pack has length {sizes[i]}, longer than the longest row {longest}: raise {option}, "
            f"or cap records upstream (cap_oversize with max_size={longest})"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowPackedLayout(Layout):
    """Several records in a row, rows cut into chunks, as many as the pack needs.

    Records are placed first-fit-decreasing. With further `heights` the last rows become the cheapest chunks that
    hold them: a chunk costs its rows plus `chunk_overhead_rows`. With further `lengths` a row is cut to the shortest
    that holds what is in it, and records above `length` get rows of their own that others may share: so neither
    the last row of a pack nor its longest record makes the other rows longer than they need to be. `fit_rows`
    proposes the lengths.

    Attributes:
        length: Tokens in a row.
        rows_per_chunk: Rows in a chunk.
        heights: Further numbers of rows that a chunk may have. With a height of 1 no row is ever empty.
        lengths: Further row lengths, shorter or longer ones; their rows make chunks of one row each.
        chunk_overhead_rows: What one more chunk costs, in rows: a cost model's
            `per_chunk / (of_chunk(1, length) - per_chunk)`.

    Raises:
        ValueError: If an option is out of range.

    >>> layout = RowPackedLayout(length=8, rows_per_chunk=2, heights=(1,))
    >>> layout.shapes
    ((1, 8), (2, 8))
    >>> chunks = layout([{"tokens": np.arange(1, n + 1)} for n in (2, 5, 4, 7, 1)])
    >>> [chunk["tokens"].shape for chunk in chunks]
    [(2, 8), (1, 8)]
    >>> chunks[0]["tokens_segment_ids"]
    array([[1, 1, 1, 1, 1, 1, 1, 2],
           [1, 1, 1, 1, 1, 2, 2, 0]], dtype=int32)
    >>> chunks[0]["tokens_positions"][1]
    array([0, 1, 2, 3, 4, 0, 1, 0], dtype=int32)
    """

    length: int
    rows_per_chunk: int
    heights: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    chunk_overhead_rows: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(length=self.length, rows_per_chunk=self.rows_per_chunk)
        _check_all_positive("lengths", self.lengths)
        _check_all_positive("heights", self.heights)
        checked_number("chunk_overhead_rows", self.chunk_overhead_rows, least=0)

    @functools.cached_property
    def _ladder(self) -> tuple[int, ...]:
        return tuple(sorted({self.rows_per_chunk, *self.heights}))

    @functools.cached_property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(sorted({self.length, *self.lengths}))

    @functools.cached_property
    def _longer(self) -> tuple[int, ...]:
        return tuple(length for length in self._lengths if length > self.length)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All shapes (rows, length) that a chunk may have, by ascending rows, then length."""
        further = {(1, length) for length in self._lengths if length != self.length}
        return tuple(sorted({(height, self.length) for height in self._ladder} | further))

    def place(self, sizes: Sequence[int]) -> list[Block]:
        """See `Layout.place`. O(n log n); with k records above `length`, O(k^2) for these."""
        _check_sizes(sizes, self._lengths[-1], "lengths" if self.lengths else "length")
        rows = first_fit_decreasing(sizes, self.length, self._longer)
        if len(self._lengths) == 1:
            return [Block(self.length, cover_rows(len(rows), self._ladder, self.chunk_overhead_rows), rows)]
        by_length: dict[int, list[Sequence[int]]] = {length: [] for length in reversed(self._lengths)}
        for row in rows or [[]]:
            fill = sum(sizes[i] for i in row)
            by_length[self._lengths[bisect.bisect_left(self._lengths, fill)]].append(row)
        return [Block(length, self._heights(length, len(rows)), rows) for length, rows in by_length.items() if rows]

    def _heights(self, length: int, num_rows: int) -> tuple[int, ...]:
        if length == self.length:
            return cover_rows(num_rows, self._ladder, self.chunk_overhead_rows)
        return (1,) * num_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowPackedOneShapeLayout(Layout):
    """Several records in a row, the whole pack in one chunk [rows, length]: one shape, one program.

    `fit_shape` proposes a shape. Whether a pack fits is decided by first-fit-decreasing, not by its sum alone.

    Attributes:
        rows: Rows of the chunk.
        length: Tokens in a row.

    Raises:
        ValueError: If an option is out of range.

    >>> layout = RowPackedOneShapeLayout(rows=2, length=8)
    >>> layout.fits([5, 5, 3, 3]), layout.fits([5, 5, 5])
    (True, False)
    """

    rows: int
    length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(rows=self.rows, length=self.length)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The one shape (rows, length)."""
        return ((self.rows, self.length),)

    def fits(self, sizes: Sequence[int]) -> bool:
        """Returns whether a pack of records of these sizes fits. O(n log n)."""
        if sizes and (min(sizes) < 1 or max(sizes) > self.length or sum(sizes) > self.rows * self.length):
            return False
        return len(first_fit_decreasing(sizes, self.length)) <= self.rows

    def place(self, sizes: Sequence[int]) -> list[Block]:
        """See `Layout.place`. O(n log n)."""
        _check_sizes(sizes, self.length, "length")
        rows = first_fit_decreasing(sizes, self.length)
        if len(rows) > self.rows:
            raise ValueError(
                f"pack of {len(sizes)} records with {sum(sizes)} tokens, the longest {max(sizes)}, needs {len(rows)} "
                f"rows of {self.length}, but the shape has {self.rows} ({self.rows * self.length} tokens): raise rows "
                "(fit_shape proposes a number), lower pack_size, or limit the tokens of a pack when planning"
            )
        return [Block(self.length, (self.rows,), rows)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketedLayout(Layout):
    """One record in a row; records of similar length share chunks of `tokens_per_chunk` tokens.

    A record goes to the shortest length that holds it. Chunks come by ascending length, records in the pack's
    order. Worth it where every used length fills several chunks of a pack.

    Attributes:
        lengths: The row lengths, ascending; each divides `tokens_per_chunk`.
        tokens_per_chunk: Tokens of every chunk, padding included.

    Raises:
        ValueError: If `lengths` is empty, not strictly ascending, or holds one that does not divide
            `tokens_per_chunk`.

    >>> layout = BucketedLayout(lengths=(4, 8), tokens_per_chunk=16)
    >>> layout.shapes
    ((4, 4), (2, 8))
    >>> layout.chunk_shapes([8, 3, 5, 7, 4])
    [(4, 4), (2, 8), (2, 8)]
    """

    lengths: tuple[int, ...]
    tokens_per_chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_all_positive("lengths", self.lengths)
        _check_positive(tokens_per_chunk=self.tokens_per_chunk)
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"lengths must be positive and strictly ascending, got {self.lengths!r}")
        for length in self.lengths:
            if self.tokens_per_chunk % length:
                raise ValueError(
                    f"tokens_per_chunk {self.tokens_per_chunk} is not a positive multiple of the length {length}"
                )

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All shapes (rows, length) that a chunk may have, by ascending length."""
        return tuple((self.tokens_per_chunk // length, length) for length in self.lengths)

    def place(self, sizes: Sequence[int]) -> list[Block]:
        """See `Layout.place`. O(n * number of lengths)."""
        _check_sizes(sizes, self.lengths[-1], "the last of lengths")
        blocks, shorter = [], 0
        for rows_per_chunk, length in self.shapes:
            rows = [(i,) for i, size in enumerate(sizes) if shorter < size <= length]
            if rows:
                blocks.append(Block(length, (rows_per_chunk,) * -(-len(rows) // rows_per_chunk), rows))
            shorter = length
        return blocks or [Block(self.lengths[0], (self.shapes[0][0],), [])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddedLayout(Layout):
    """One record in a row, the pack in one chunk [pack_size, length], in the pack's order.

    Attributes:
        pack_size: Rows of the chunk. A shorter pack leaves rows of padding.
        length: Tokens in a row.

    Raises:
        ValueError: If an option is out of range.

    >>> PaddedLayout(pack_size=2, length=3)([{"tokens": np.array([5, 6])}])[0]["tokens"]
    array([[5, 6, 0],
           [0, 0, 0]])
    """

    pack_size: int
    length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(pack_size=self.pack_size, length=self.length)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The one shape (pack_size, length)."""
        return ((self.pack_size, self.length),)

    def place(self, sizes: Sequence[int]) -> list[Block]:
        """See `Layout.place`. O(n)."""
        if len(sizes) > self.pack_size:
            raise ValueError(f"pack of {len(sizes)} records does not fit pack_size {self.pack_size}: raise pack_size")
        _check_sizes(sizes, self.length, "length")
        return [Block(self.length, (self.pack_size,), [(i,) for i in range(len(sizes))])]
