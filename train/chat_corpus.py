"""Data files and a model's own chat template -> training records and held-out ones."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np

from train.chat import ChatFormat
from train.chat_data import DataError, RowReader, mixture, times_read
from train.config import CorpusConfig
from train.gguf_tokenizer import gguf_chat_format
from train.hf_tokenizer import hf_chat_format
from train.jsonl import FileChangedError
from train.token_files import Say, SourceTokens, source_tokens
from train.token_table import TokenTable


def open_chat_format(path: str, *, template: str | None = None) -> ChatFormat:
    """Reads tokenizer and chat template of a model: a Hugging Face directory or a GGUF file.

    Args:
        path: The model.
        template: A file with another template in Jinja's language, instead of the model's own.

    Raises:
        ValueError: If there is none that is read here.
    """
    source = None
    if template is not None:
        try:
            source = pathlib.Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"can't read the chat template {template!r}: {error}; give a file in UTF-8") from error
    read = gguf_chat_format if path.endswith(".gguf") else hf_chat_format
    return read(path, chat_template=source)


def read_chat_corpus(
    corpus: CorpusConfig,
    chat_format: ChatFormat,
    *,
    seed: int,
    token_cache: str | None,
    workers: int | None,
    say: Say,
    progress: bool = False,
) -> tuple[TokenTable, TokenTable]:
    """Reads all rows, reports broken ones together, and holds a share of each source out.

    Held out are rows chosen by a hash of their place, so that they stay when others come or go, but for those whose
    tokens are also learnt from.

    Args:
        corpus: Which files, how they are read, what is held out.
        chat_format: The model's tokenizer and template.
        seed: Of the mixture.
        token_cache: See `source_tokens`.
        workers: See `source_tokens`.
        say: Takes lines for the user.
        progress: Whether a bar shows how far the reading is.

    Returns:
        What to learn from, and what is held out.

    Raises:
        ValueError: If a source can't be read, or has broken rows and `on_bad_row` is "stop"; all of them are named.
    """
    reader = RowReader(
        chat_format=chat_format,
        train_on=corpus.train_on,
        columns=corpus.chat_columns,
        tool_format=corpus.tool_format,
        by_answer=corpus.split_answers,
    )
    parts: list[TokenTable] = []
    held_out: list[TokenTable] = []
    for path in corpus.chat_paths:
        try:
            found = source_tokens(path, reader, cache=token_cache, workers=workers, say=say, progress=progress)
        except FileChangedError as error:
            raise ValueError(str(error)) from error
        _report(path, found, corpus.on_bad_row, say)
        out = found.fractions < corpus.eval_share
        if out.all():
            raise ValueError(
                f"all rows of {path!r} are held out: lower corpus.eval_share {corpus.eval_share}, or give more rows"
            )
        parts.append(found.table.select(~out))
        held_out.append(found.table.select(out))
    evaluation = TokenTable.joined(held_out)
    if not len(evaluation):
        raise ValueError(f"no row is held out: raise corpus.eval_share {corpus.eval_share}, or give more rows")
    train = TokenTable.joined(parts)
    leaked = np.isin(evaluation.entries["digest"], train.entries["digest"])
    if leaked.all():
        raise ValueError(
            f"all {len(evaluation):,} held-out records stand in the training part, too: remove repeated rows, or give "
            "more of them"
        )
    if leaked.any():
        say(f"held-out: {leaked.sum():,} records left out because the training part has the same")
    if corpus.chat_weights is not None:
        train = _mixed(train, parts, corpus, seed, say)
    return train, evaluation.select(~leaked)


def _report(path: str, found: SourceTokens, on_bad_row: str, say: Say) -> None:
    check = found.check
    if check.num_broken and (on_bad_row == "stop" or not len(found.table)):
        skip = ", or set corpus.on_bad_row=skip to leave them out" if len(found.table) else ""
        raise DataError(f"{path}: {check.describe()}\nrepair or remove them{skip}")
    say(f"corpus: {path}: {check.describe()}")


def _mixed(train: TokenTable, parts: Sequence[TokenTable], corpus: CorpusConfig, seed: int, say: Say) -> TokenTable:
    """Returns as many records as the parts have together, each part's read as often as its weight asks for."""
    assert corpus.chat_weights is not None
    lengths = [len(part) for part in parts]
    times = times_read(lengths, corpus.chat_weights, num_records=len(train))
    for path, often in zip(corpus.chat_paths, times, strict=True):
        say(f"mixture: {path} is read {often:.2f} times an epoch")
    return train.select(mixture(lengths, corpus.chat_weights, num_records=len(train), seed=seed))
