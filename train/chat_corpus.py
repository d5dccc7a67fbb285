"""Data files and a model's own chat template -> training records and held-out ones."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Sequence

from train.chat import ChatFormat, chat_record
from train.chat_data import DataError, checked_records, mixed_records, times_read
from train.conversations import Conversation
from train.corpus import in_held_out_share
from train.gguf_tokenizer import gguf_chat_format
from train.hf_tokenizer import hf_chat_format
from train.jsonl import FileChangedError
from train.sources import open_source
from train.tokenizers import Record

Say = Callable[[str], None]


def open_chat_format(path: str) -> ChatFormat:
    """Reads tokenizer and chat template of a model: a Hugging Face directory or a GGUF file.

    Raises:
        ValueError: If there is none that is read here.
    """
    return gguf_chat_format(path) if path.endswith(".gguf") else hf_chat_format(path)


class ChatCorpus:
    """Conversations of one or several sources, as records in memory.

    Attributes:
        train: To learn from.
        evaluation: Held out: rows chosen by a hash of their place, so that they stay when others come or go.
        num_leaked: Rows left out of the evaluation because the same tokens are learnt from.
    """

    def __init__(self, train: list[Record], evaluation: list[Record]) -> None:
        learnt = {record["tokens"].tobytes() for record in train}
        self.train = train
        self.evaluation = [record for record in evaluation if record["tokens"].tobytes() not in learnt]
        self.num_leaked = len(evaluation) - len(self.evaluation)


def read_chat_corpus(
    paths: Sequence[str],
    weights: Sequence[float] | None,
    chat_format: ChatFormat,
    *,
    train_on: str,
    on_bad_row: str,
    eval_share: float,
    seed: int,
    say: Say,
) -> ChatCorpus:
    """Reads all rows, reports broken ones together, and holds a share of each source out.

    Args:
        paths: Files, directories or patterns; see `open_source`.
        weights: Shares of the sources in training; None for all rows of all. Else the sources are mixed: as many
            records as they have together, each read as often as its share asks for.
        chat_format: The model's tokenizer and template.
        train_on: See `chat_record`.
        on_bad_row: "stop" or "skip", counted.
        eval_share: Share of rows held out.
        seed: Of the mixture.
        say: Takes lines for the user.

    Raises:
        ValueError: If a source can't be read, or has broken rows and `on_bad_row` is "stop"; all of them are named.
    """
    parts: list[list[Record]] = []
    evaluation: list[Record] = []
    for path in paths:
        learnt: list[Record] = []
        for place, record in _rows(path, chat_format, train_on, on_bad_row, say):
            (evaluation if in_held_out_share(place, eval_share) else learnt).append(record)
        if not learnt:
            raise ValueError(f"all rows of {path!r} are held out: lower eval_share {eval_share}, or give more rows")
        parts.append(learnt)
    if not evaluation:
        raise ValueError(f"no row is held out: raise eval_share {eval_share}, or give more rows")
    corpus = ChatCorpus(_mixed(parts, paths, weights, seed, say), evaluation)
    if corpus.num_leaked:
        say(f"held-out: {corpus.num_leaked} rows left out because the training part has the same")
    return corpus


def _rows(path: str, chat_format: ChatFormat, train_on: str, on_bad_row: str, say: Say) -> Iterable[tuple[str, Record]]:
    """Yields the usable rows of a source with their places in it, made once."""
    made: list[Record] = []

    def make(spoken: Conversation) -> Record:
        record = chat_record(spoken, chat_format, train_on=train_on)  # type: ignore[arg-type]
        made.append(record)
        return record

    try:
        source = open_source(path)
        records = checked_records(source, make, on_error=on_bad_row)  # type: ignore[arg-type]
    except DataError as error:
        raise ValueError(str(error).replace('pass on_error="skip"', "set corpus.on_bad_row=skip")) from None
    except FileChangedError as error:
        raise ValueError(str(error)) from error
    say(f"corpus: {path}: {records.check.describe()}")
    assert len(made) == len(records)
    # Without the folder: the split stays when the data is moved.
    folder = str(pathlib.Path(path).parent)
    return [
        (source.place(int(row)).removeprefix(folder), record) for row, record in zip(records.rows, made, strict=True)
    ]


def _mixed(
    parts: list[list[Record]], paths: Sequence[str], weights: Sequence[float] | None, seed: int, say: Say
) -> list[Record]:
    if weights is None:
        return [record for part in parts for record in part]
    total = sum(map(len, parts))
    for path, times in zip(paths, times_read([len(part) for part in parts], weights, num_records=total), strict=True):
        say(f"mixture: {path} is read {times:.2f} times an epoch")
    return list(mixed_records(parts, weights, num_records=total, seed=seed))
