"""Rows of a source -> training records, all of them checked before the first step.

A broken row must not surface as a traceback from a reader thread hours later. So every row becomes a record before
training begins, in one pass over the source, and the broken ones are reported together, with their places. The pass
works on blocks of rows, one at a time, in this process or in several (see `train.tokenizing`).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from train.chat import ChatFormat, ToolFormat, TrainOn, chat_record
from train.conversations import DEFAULT_COLUMNS, Columns, Conversation, conversation, split_answers
from train.corpus import hash_fraction
from train.sources import Source
from train.token_table import Entries, encoded
from train.tokenizers import IntArray, Record

SHOWN_PROBLEMS = 10


class DataError(ValueError):
    """Rows that can't be used; the message names their places."""


class Problem(NamedTuple):
    """A row that can't be used: where it stands and why."""

    place: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """What a pass over a source found.

    Attributes:
        num_rows: Rows of the source.
        num_broken: Those among them that can't be used.
        problems: The first of these.
    """

    num_rows: int
    num_broken: int
    problems: tuple[Problem, ...]

    def describe(self) -> str:
        """Returns one line for a sound source, a line more for each broken row that is shown."""
        lines = [f"{self.num_rows - self.num_broken:,} of {self.num_rows:,} rows can be used"]
        lines += [f"  {problem.place}: {problem.reason}" for problem in self.problems]
        if self.num_broken > len(self.problems):
            lines.append(f"  and {self.num_broken - len(self.problems):,} more")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowReader:
    """How a row becomes records; it travels to other processes.

    Attributes:
        chat_format: The model's tokenizer and chat template.
        train_on: What counts in the loss; see `chat_record`.
        columns: Which columns are read.
        tool_format: Who writes tool calls; see `chat_record`.
        by_answer: Whether each answer becomes a record of its own, with what precedes it; see `split_answers`.
    """

    chat_format: ChatFormat
    train_on: TrainOn = "assistant"
    columns: Columns = DEFAULT_COLUMNS
    tool_format: ToolFormat = "template"
    by_answer: bool = False

    def __call__(self, row: dict[str, Any]) -> list[Record]:
        """Returns the records of a row, at least one.

        Raises:
            ValueError: Saying what is wrong with the row.
        """
        spoken = conversation(row, self.columns)
        if not self.by_answer:
            return [self._record(spoken, self.train_on)]
        parts = split_answers(spoken)
        if not parts:
            raise ValueError("no message of the assistant to learn from; fill or remove the record")
        train_on: TrainOn = "all" if self.train_on == "all" else "last"
        if self.train_on == "last":
            parts = parts[-1:]
        return [self._record(part, train_on) for part in parts]

    def _record(self, spoken: Conversation, train_on: TrainOn) -> Record:
        return chat_record(spoken, self.chat_format, train_on=train_on, tool_format=self.tool_format)


class Block(NamedTuple):
    """The records of some consecutive rows.

    Attributes:
        num_rows: How many rows these were.
        values: int32 [tokens], see `train.token_table`.
        entries: [records].
        fractions: float64 [records], a hash of each row's place, evenly spread from 0 to 1: for holding a share out.
        num_broken: Rows that can't be used.
        problems: The first of these.
    """

    num_rows: int
    values: IntArray
    entries: Entries
    fractions: npt.NDArray[np.float64]
    num_broken: int
    problems: tuple[Problem, ...]


def read_block(source: Source, rows: range, reader: RowReader, *, folder: str) -> Block:
    """Returns the records of some rows, the broken ones counted.

    Args:
        source: The rows.
        rows: Which of them.
        reader: How a row becomes records.
        folder: See `source_folder`; the hash leaves it out, so that the split stays when the data is moved.
    """
    prefix = os.path.join(folder, "")
    records: list[Record] = []
    fractions: list[float] = []
    problems: list[Problem] = []
    num_broken = 0
    for row in rows:
        try:
            found = reader(source[row])
        except ValueError as error:
            num_broken += 1
            if len(problems) < SHOWN_PROBLEMS:
                problems.append(Problem(source.place(row), str(error)))
            continue
        records += found
        fractions += [hash_fraction("/" + source.place(row).removeprefix(prefix))] * len(found)
    values, entries = encoded(records)
    return Block(len(rows), values, entries, np.array(fractions, np.float64), num_broken, tuple(problems))


def mixture(lengths: Sequence[int], weights: Sequence[float], *, num_records: int, seed: int) -> npt.NDArray[np.int64]:
    """Returns which records of several parts a mixture holds, in order: row numbers of the parts laid end to end.

    Each part is shuffled as a whole, anew each time it is read, and repeated as often as needed: the shares are those
    of the weights from the first record to the last, whatever the parts' lengths. `times_read` says how often.

    Args:
        lengths: Records of each part.
        weights: One for each, positive; only ratios matter.
        num_records: Of the whole mixture.
        seed: Of the shuffles.

    Raises:
        ValueError: If weights and parts don't fit.

    >>> mixture([6, 2], [3, 1], num_records=8, seed=0) >= 6
    array([False, False,  True, False, False, False,  True, False])
    """
    times = times_read(lengths, weights, num_records=num_records)
    due, rows, start = [], [], 0
    for part, (length, often) in enumerate(zip(lengths, times, strict=True)):
        count = min(num_records, int(often * length) + len(lengths))
        order = np.random.default_rng([seed, part]).permuted(
            np.tile(np.arange(length), (-(-count // length), 1)), axis=1
        )
        rows.append(start + order.reshape(-1)[:count])
        due.append((np.arange(count) + 0.5) / (often * length))
        start += length
    return np.concatenate(rows)[np.argsort(np.concatenate(due), kind="stable")[:num_records]]


def times_read(lengths: Sequence[int], weights: Sequence[float], *, num_records: int) -> list[float]:
    """Returns how often a mixture of `num_records` records reads each part.

    Raises:
        ValueError: If weights and parts don't fit.

    >>> times_read([1000, 100], [3, 1], num_records=400)
    [0.3, 1.0]
    """
    if len(lengths) != len(weights) or not weights:
        raise ValueError(f"want one weight for each of {len(lengths)} sources, got {list(weights)}")
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(f"weights must be positive, got {list(weights)}; leave out a source that is not to be read")
    total = math.fsum(weights)
    return [num_records * weight / total / length for length, weight in zip(lengths, weights, strict=True)]
