"""From text to training records: the tokenizers, and what of a record counts in the loss.

`ByteTokenizer` needs no file. `load_tokenizer` reads a local Hugging Face `tokenizer.json`.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tokenizers

from bcl_grain.json_files import read_json
from train.corpus import Pair

IntArray = npt.NDArray[np.int32]
Record = dict[str, npt.NDArray[Any]]
"""A training record: "tokens", int32 [n], and "loss_mask", float32 [n]."""


class Tokenizer(Protocol):
    """What the trainer needs of a tokenizer. Ids are below `vocab_size`; the special ones never come from `encode`."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def pad_id(self) -> int:
        """Stands where no record is. It carries no loss, so it may be another token's id."""

    @property
    def bos_id(self) -> int | None:
        """Begins a record, or None."""

    @property
    def separator_id(self) -> int | None:
        """Stands between prompt and response, or None."""

    @property
    def eos_id(self) -> int:
        """Ends a response: the model learns to write it."""

    def encode(self, text: str) -> IntArray:
        """Returns the ids [n] of `text`, special tokens neither added nor recognised in it."""

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Returns the text of `ids`, special tokens left out."""


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and four special tokens. Any text comes back exactly as it was.

    >>> ByteTokenizer().encode("aé")
    array([ 97, 195, 169], dtype=int32)
    >>> ByteTokenizer().decode([256, 97, 195, 169, 259])
    'aé'
    """

    pad_id: int = dataclasses.field(default=256, init=False)
    bos_id: int | None = dataclasses.field(default=257, init=False)
    separator_id: int | None = dataclasses.field(default=258, init=False)
    eos_id: int = dataclasses.field(default=259, init=False)
    vocab_size: int = dataclasses.field(default=260, init=False)

    def encode(self, text: str) -> IntArray:
        """Returns the UTF-8 bytes of `text`, int32 [n]."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Returns the text of `ids`; bytes that are not UTF-8 become U+FFFD, as a model may write any.

        Raises:
            ValueError: If an id is not in [0, vocab_size).
        """
        values = np.asarray(ids, np.int64)
        wrong = values[(values < 0) | (values >= self.vocab_size)]
        if wrong.size:
            raise ValueError(f"id {wrong[0]} is not in [0, {self.vocab_size}): these are another tokenizer's ids")
        return values[values < 256].astype(np.uint8).tobytes().decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class FileTokenizer:
    """A Hugging Face tokenizer; made by `load_tokenizer`. It has no separator: the prompt's text should end as such."""

    backend: tokenizers.Tokenizer
    vocab_size: int
    pad_id: int
    bos_id: int | None
    eos_id: int
    separator_id: int | None = dataclasses.field(default=None, init=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.backend.encode_special_tokens = True  # pickling the backend loses it

    def encode(self, text: str) -> IntArray:
        """Returns the ids of `text`, int32 [n]. The text of a special token is ordinary text here."""
        return np.asarray(self.backend.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Returns the text of `ids`, special tokens left out."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=True)


def load_tokenizer(path: str | os.PathLike[str], *, eos_token: str | None = None) -> FileTokenizer:
    """Reads a `tokenizer.json`, or the one in a model directory.

    A record begins with the token that the tokenizer's own post-processor puts first, if any. Truncation and padding
    that the file may ask for are turned off: caps and layouts do both, counted.

    Args:
        path: The file, or its directory.
        eos_token: The token that ends a response; default: "eos_token" of the `tokenizer_config.json` beside the
            file, because `tokenizer.json` itself doesn't say which it is.

    Raises:
        ValueError: If the file is missing, unreadable or not a tokenizer, or the end token is unknown or not in the
            vocabulary. The message names the file and the remedy.
    """
    file = pathlib.Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"can't read tokenizer {str(file)!r}: {error.strerror or error}; give the path of a tokenizer.json, or "
            "leave the option out for the byte tokenizer"
        ) from error
    except Exception as error:  # the library raises bare Exception; UnicodeDecodeError is caught here as well
        raise ValueError(
            f"{str(file)!r} is not a Hugging Face tokenizer.json ({error}); a sentencepiece model or a vocabulary file "
            "must be converted first (transformers' `save_pretrained` of a fast tokenizer writes one)"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # "</s>" in someone's text must not end the record
    eos_id = _eos_id(backend, file, eos_token)
    first = backend.encode("", add_special_tokens=True).ids[:1]
    return FileTokenizer(
        backend=backend,
        vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values()),
        pad_id=eos_id,
        bos_id=first[0] if first and first[0] != eos_id else None,
        eos_id=eos_id,
    )


def to_record(pair: Pair, tokenizer: Tokenizer) -> Record:
    """Returns a pair as the trainer's record: `[bos] prompt [separator] response eos`.

    The loss mask is 1 on the tokens the model learns to predict, the response's and the end's, else 0. The very first
    token is never one: nothing stands before it. The mask is float32, the type it is multiplied in, and leaves room
    for weights.

    Returns:
        {"tokens": int32 [n], "loss_mask": float32 [n]}.

    Raises:
        ValueError: If the response has no tokens.

    >>> record = to_record(Pair("hi", "yo", "greetings"), ByteTokenizer())
    >>> record["tokens"].tolist()
    [257, 104, 105, 258, 121, 111, 259]
    >>> record["loss_mask"].astype(int).tolist()
    [0, 0, 0, 0, 1, 1, 1]
    """
    response = tokenizer.encode(pair.response)
    if not len(response):
        raise ValueError(
            f"the response of a pair from {pair.module} has no tokens: {pair.response!r:.60}; leave the pair out, or "
            "give a tokenizer that knows its characters"
        )
    before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    between = [] if tokenizer.separator_id is None else [tokenizer.separator_id]
    tokens = np.concatenate([before, tokenizer.encode(pair.prompt), between, response, [tokenizer.eos_id]])
    loss_mask = np.zeros(len(tokens), np.float32)
    loss_mask[-1 - len(response) :] = 1
    loss_mask[0] = 0
    return {"tokens": tokens.astype(np.int32), "loss_mask": loss_mask}


def _eos_id(backend: tokenizers.Tokenizer, file: pathlib.Path, eos_token: str | None) -> int:
    name = _configured_eos(file) if eos_token is None else eos_token
    eos_id = None if name is None else backend.token_to_id(name)
    if eos_id is None:
        special = sorted(token.content for token in backend.get_added_tokens_decoder().values() if token.special)
        wanted = "which token ends a response is unknown" if name is None else f"there is no end token {name!r}"
        raise ValueError(
            f"{wanted} in tokenizer {str(file)!r}: pass eos_token, one of its special tokens {special[:20]}, or put a "
            "tokenizer_config.json with an eos_token beside it"
        )
    return eos_id


def _configured_eos(file: pathlib.Path) -> str | None:
    config_file = file.with_name("tokenizer_config.json")
    if not config_file.exists():
        return None
    try:
        config = read_json(config_file)
        token = config.get("eos_token")
        # Older files spell the token out: {"content": "</s>", "lstrip": false, ...}.
        name = token["content"] if isinstance(token, dict) else token
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(
            f"can't take the end token from {str(config_file)!r} ({error!r}): repair the file, or pass eos_token"
        ) from error
    return None if name is None else str(name)
