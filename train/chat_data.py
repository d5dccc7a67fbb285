"""From data files to training records: checked once, in one pass, then read at random.

A broken row must not surface as a traceback from a reader thread hours later. So `checked_records` reads every row once
before training, keeping nothing but row numbers and sizes, and reports the broken ones together, with their places.
Two depths:

* "full" (default) makes the record of every row: whatever could go wrong later, goes wrong now. It also yields the
  sizes of all records. A few milliseconds a conversation.
* "shape" checks that every row is a conversation, some ten times faster, and makes the first records only. A template
  may still refuse a later row while training runs: that stops the run with one line, or, with `on_error="skip"`, the
  row is replaced by one token that carries no loss, so that the number of steps stays what it was, and is logged.
"""

from __future__ import annotations

import array
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Literal

import grain
import numpy as np
import numpy.typing as npt

from train.conversations import DEFAULT_COLUMNS, Columns, Conversation, conversation, split_answers
from train.sources import Source
from train.tokenizers import Record

OnError = Literal["stop", "skip"]
Depth = Literal["full", "shape"]
MakeRecord = Callable[[Conversation], Record]

_SHOWN = 10
_FIRST_RECORDS = 100

_log = logging.getLogger(__name__)


class DataError(ValueError):
    """Rows that can't be used; the message names their places."""


@dataclasses.dataclass(frozen=True)
class Problem:
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Records:
    """The usable rows of a source as training records, made when they are read; made by `checked_records`.

    Attributes:
        source: Where the rows are.
        rows: int64 [n], the row that each record comes from.
        answers: int32 [n], for conversations split by answer: which of the row's; else None.
        sizes_tokens: int32 [n], the records' sizes, after a "full" check; else None.
        check: What the check found.
        columns: Which columns were read.
        make_record: From a conversation to a record.
        on_error: What happens to a row that turns out to be broken only now.
    """

    source: Source
    rows: npt.NDArray[np.int64]
    answers: npt.NDArray[np.int32] | None
    sizes_tokens: npt.NDArray[np.int32] | None
    check: Check
    columns: Columns
    make_record: MakeRecord
    on_error: OnError

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Record:
        row = int(self.rows[index])
        try:
            spoken = conversation(self.source[row], self.columns)
            if self.answers is not None:
                spoken = split_answers(spoken)[self.answers[index]]
            return self.make_record(spoken)
        except ValueError as error:
            message = f"{self.source.place(row)}: {error}"
            if self.on_error == "stop":
                raise DataError(message) from error
            _log.warning("left out: %s", message)
            return {"tokens": np.zeros(1, np.int32), "loss_mask": np.zeros(1, np.float32)}

    def dataset(self) -> grain.MapDataset[Record]:
        """Returns the records as a Grain data set, to shuffle, slice and mix."""
        return grain.MapDataset.source(self)


def checked_records(
    source: Source,
    make_record: MakeRecord,
    *,
    columns: Columns = DEFAULT_COLUMNS,
    on_error: OnError = "stop",
    depth: Depth = "full",
    by_answer: bool = False,
) -> Records:
    """Checks every row of a source, in constant memory but for at most 16 bytes a record.

    Args:
        source: The rows.
        make_record: From a conversation to a record, raising ValueError if it can't; such as `chat_record` with its
            format filled in by `functools.partial`.
        columns: Which columns to read.
        on_error: "stop" if there is a broken row, after all are found; or "skip" them, counted.
        depth: "full" or "shape", see above.
        by_answer: Whether each answer becomes a record of its own, with what precedes it; see `split_answers`.
            `make_record` should then learn the last answer only.

    Raises:
        DataError: If there are broken rows and `on_error` is "stop", or none is sound. It names the first of them.
    """
    for name, value, choices in (("on_error", on_error, ("stop", "skip")), ("depth", depth, ("full", "shape"))):
        if value not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {value!r}")
    rows, answers, sizes = array.array("q"), array.array("i"), array.array("i")
    num_broken = 0
    problems: list[Problem] = []
    for row in range(len(source)):
        try:
            spoken = conversation(source[row], columns)
            parts = split_answers(spoken) if by_answer else [spoken]
            if not parts:
                raise ValueError("no message of the assistant to learn from; fill or remove the record")
            full = depth == "full" or len(rows) < _FIRST_RECORDS
            found = [len(make_record(part)["tokens"]) if full else 0 for part in parts]
        except ValueError as error:
            num_broken += 1
            if len(problems) < _SHOWN:
                problems.append(Problem(source.place(row), str(error)))
            continue
        rows.extend([row] * len(parts))
        answers.extend(range(len(parts)))
        sizes.extend(found)
    check = Check(num_rows=len(source), num_broken=num_broken, problems=tuple(problems))
    if num_broken and (on_error == "stop" or not rows):
        remedy = "repair or remove them" + (', or pass on_error="skip" to leave them out' if rows else "")
        raise DataError(f"{check.describe()}\n{remedy}")
    return Records(
        source=source,
        rows=np.asarray(rows, np.int64),
        answers=np.asarray(answers, np.int32) if by_answer else None,
        sizes_tokens=np.asarray(sizes, np.int32) if depth == "full" else None,
        check=check,
        columns=columns,
        make_record=make_record,
        on_error=on_error,
    )


def mixed_records(
    parts: Sequence[Records | Sequence[Record]], weights: Sequence[float], *, num_records: int, seed: int
) -> grain.MapDataset[Record]:
    """Returns `num_records` records of several sources, interleaved by weight.

    Each part is shuffled as a whole, anew each time it is read, and repeated as often as needed: the shares are those
    of the weights from the first record to the last, whatever the parts' lengths. `times_read` says how often.

    Args:
        parts: The sources.
        weights: One for each, positive; only ratios matter.
        num_records: Of the whole mixture.
        seed: Of the shuffles.

    Raises:
        ValueError: If weights and parts don't fit.
    """
    times_read([len(part) for part in parts], weights, num_records=num_records)
    shuffled = [grain.MapDataset.source(part).seed(seed + index).shuffle().repeat() for index, part in enumerate(parts)]
    return grain.MapDataset.mix(shuffled, weights)[:num_records]


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
