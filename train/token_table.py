"""Training records as arrays: many records for a few objects, in memory or mapped from files.

A record with a loss on some of its tokens is one run of int32: a token, or ~token (below zero) where it counts in the
loss. So a corpus takes 4 bytes a token and 32 a record, and what is said about all records (how long they are, how many
of their tokens count) is said without reading them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from train.tokenizers import IntArray, Record

ENTRY = np.dtype(
    [
        ("block", np.int32),
        ("start", np.int64),
        ("stored", np.int32),
        ("size", np.int32),
        ("loss_tokens", np.int32),
        ("digest", np.uint64),
    ]
)
"""Where a record is, its tokens there and after a cap, those that count in the loss, and a hash of what is stored."""

Entries = npt.NDArray[np.void]


class DamagedRecordError(OSError):
    """What was read is not what was written. Not a ValueError: no row of the user's is to blame."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TokenTable(Sequence[Record]):
    """Records, each made when it is read: {"tokens": int32 [n], "loss_mask": float32 [n]}.

    Attributes:
        blocks: int32 arrays that hold the records' tokens, perhaps mapped from files.
        entries: [records] of `ENTRY`.

    >>> record = {"tokens": np.array([5, 6, 7], np.int32), "loss_mask": np.array([0, 1, 1], np.float32)}
    >>> table = TokenTable.of([record, record])
    >>> table.sizes.tolist(), table.loss_tokens.tolist()
    ([3, 3], [2, 2])
    >>> table[1]["loss_mask"].tolist(), table.cut(2)[0]["tokens"].tolist()
    ([0.0, 1.0, 1.0], [5, 6])
    """

    blocks: tuple[IntArray, ...]
    entries: Entries

    @staticmethod
    def of(records: Iterable[Record]) -> TokenTable:
        """Returns a table in memory.

        Raises:
            ValueError: As `encoded`.
        """
        values, entries = encoded(records)
        return TokenTable((values,), entries)

    @staticmethod
    def joined(tables: Sequence[TokenTable]) -> TokenTable:
        """Returns the records of several tables, one after the other, without copying tokens."""
        blocks: list[IntArray] = []
        parts = [np.empty(0, ENTRY)]
        for table in tables:
            moved = table.entries.copy()
            moved["block"] += len(blocks)
            blocks.extend(table.blocks)
            parts.append(moved)
        return TokenTable(tuple(blocks), np.concatenate(parts))

    def __repr__(self) -> str:
        return f"TokenTable({len(self):,} records, {int(self.sizes.sum(dtype=np.int64)):,} tokens)"

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Record]:
        return map(self._record, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> TokenTable: ...
    def __getitem__(self, index: int | slice) -> Record | TokenTable:
        return self.select(index) if isinstance(index, slice) else self._record(index)

    @property
    def sizes(self) -> IntArray:
        """Tokens of each record, int32 [records]."""
        return np.asarray(self.entries["size"])

    @property
    def loss_tokens(self) -> IntArray:
        """Those that count in the loss, int32 [records]; the first never does, as nothing stands before it."""
        return np.asarray(self.entries["loss_tokens"])

    @property
    def checksum(self) -> int:
        """A checksum (CRC-32) of all tokens and masks: another corpus or tokenizer shows in it."""
        content = np.stack([self.entries["digest"], self.sizes.astype(np.uint64)])
        return zlib.crc32(content.astype("<u8").tobytes())

    def select(self, which: slice | npt.NDArray[Any]) -> TokenTable:
        """Returns some of the records: a slice, row numbers or a mask."""
        return TokenTable(self.blocks, self.entries[which])

    def cut(self, max_tokens: int) -> TokenTable:
        """Returns the records, each without what follows its first `max_tokens` tokens. Reads those it shortens."""
        entries = self.entries.copy()
        for row in np.flatnonzero(entries["size"] > max_tokens).tolist():
            entries["size"][row] = max_tokens
            entries["loss_tokens"][row] = _count(self._values(row)[:max_tokens])
        return TokenTable(self.blocks, entries)

    def _values(self, row: int) -> IntArray:
        block, start, stored, _, _, digest = self.entries[row].item()
        values: IntArray = self.blocks[block][start : start + stored]
        if _digest(values) != digest:
            name = getattr(self.blocks[block], "filename", None)
            raise DamagedRecordError(
                f"the record of {stored} tokens at token {start} of {str(name)!r} is not what was written there: "
                "remove that file's directory, it is made anew"
            )
        return values

    def _record(self, row: int) -> Record:
        values = self._values(row)[: self.entries["size"][row]]
        counts = values < 0
        return {"tokens": np.where(counts, ~values, values), "loss_mask": counts.astype(np.float32)}


def encoded(records: Iterable[Record]) -> tuple[IntArray, Entries]:
    """Returns records as one array of values [tokens], and their entries [records].

    Raises:
        ValueError: If a token is negative, or a loss mask holds anything but 0 and 1.
    """
    pieces, entries = [np.empty(0, np.int32)], []
    start = 0
    for number, record in enumerate(records):
        tokens, loss_mask = np.asarray(record["tokens"], np.int32), np.asarray(record["loss_mask"])
        if tokens.shape != loss_mask.shape or tokens.ndim != 1 or (tokens < 0).any():
            raise ValueError(
                f"record {number}: want tokens of at least 0, each with a loss mask, got {tokens!r:.80} and a mask of "
                f"shape {loss_mask.shape}"
            )
        if not np.isin(loss_mask, (0, 1)).all():
            raise ValueError(f"record {number}: a loss mask holds 0 and 1 only, got {loss_mask!r:.80}")
        values = np.where(loss_mask > 0, ~tokens, tokens)
        entries.append((0, start, len(values), len(values), _count(values), _digest(values)))
        pieces.append(values)
        start += len(values)
    return np.concatenate(pieces), np.array(entries, ENTRY)


def _count(values: IntArray) -> int:
    return int(np.count_nonzero(values[1:] < 0))


def _digest(values: IntArray) -> int:
    content = np.ascontiguousarray(values, "<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
