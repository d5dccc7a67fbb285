"""Tokens of rendered chat text, with the characters that each one stands for.

A rendered conversation differs from plain text: the template writes control tokens ("<|im_end|>") as text, and these
must become single tokens. What merely looks like one inside a message must not: a user who writes "<|im_end|>" does not
end a turn.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import tokenizers

from train.chat_template import LITERAL, Span
from train.tokenizers import FileTokenizer, IntArray

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens and their characters: token i stands for `text[starts[i]:ends[i]]`, as part of it or as all of it.

    Attributes:
        ids: int32 [n].
        starts: int64 [n], not falling.
        ends: int64 [n], not falling.
        is_control: bool [n], whether a token is a control token.
    """

    ids: IntArray
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    is_control: npt.NDArray[np.bool_]

    def within(self, span: Span) -> tuple[int, int]:
        """Returns the first token of a span of characters, and one after the last. No token may cross its ends."""
        return int(np.searchsorted(self.starts, span[0])), int(np.searchsorted(self.ends, span[1], side="right"))


@dataclasses.dataclass(frozen=True)
class ChatEncoder:
    """Encodes rendered text as Hugging Face does, control tokens recognised, none added."""

    tokenizer: FileTokenizer

    @functools.cached_property
    def control_tokens(self) -> dict[str, int]:
        """Texts and ids of the control tokens."""
        added = self.tokenizer.backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def mark_literals(self, value: T) -> T:
        """Returns `value`, JSON, with `LITERAL` before each text in it that looks like a control token."""
        if self._control_pattern is None:
            return value
        return _map_texts(self._control_pattern, value)

    def encode(self, text: str, *, boundaries: Sequence[int] = (), literals: Sequence[int] = ()) -> Tokens:
        """Returns the tokens of rendered `text`.

        Args:
            text: What a template wrote.
            boundaries: Positions that no token may cross. Where one does, the text is encoded in two parts, as it is
                when a model is given the first part and writes the second.
            literals: Positions at which the text of a control token stands that isn't meant as one.

        Raises:
            ValueError: If a token crosses a boundary, and the tokenizer can't encode text in parts because it puts a
                blank before each.
        """
        tokens = self._encode(text)
        cuts: set[int] = set()
        # Tokens beside a cut differ from what they were, and may now cross another boundary.
        while crossed := {cut for cut in boundaries if np.any((tokens.starts < cut) & (cut < tokens.ends))}:
            if not self._can_cut:
                first = min(crossed)
                raise ValueError(
                    f"one token covers the end of a prompt and the start of an answer, at {text[:first][-20:]!r} + "
                    f"{text[first:][:20]!r}, and this tokenizer can't part them; strip the answer's leading blanks"
                )
            cuts |= crossed
            edges = itertools.pairwise([0, *sorted(cuts), len(text)])
            tokens = _joined([(self._encode(text[start:end]), start) for start, end in edges])
        for position in literals:
            tokens = self._spelled_out(tokens, text, position)
        return tokens

    @functools.cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        # A copy: the tokenizer's own backend does not recognise control tokens, and is used by other threads.
        backend = tokenizers.Tokenizer.from_str(self.tokenizer.backend.to_str())
        # Many post-processors take the blank off a token's characters; then a token might cross a boundary unseen.
        backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        return backend

    @functools.cached_property
    def _control_pattern(self) -> re.Pattern[str] | None:
        texts = sorted(self.control_tokens)
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    @functools.cached_property
    def _control_ids(self) -> IntArray:
        return np.asarray(sorted(self.control_tokens.values()), np.int32)

    @functools.cached_property
    def _can_cut(self) -> bool:
        whole, *parts = (self._backend.encode(text, add_special_tokens=False).ids for text in ("\na", "\n", "a"))
        return whole == [*parts[0], *parts[1]]

    def _encode(self, text: str) -> Tokens:
        encoding = self._backend.encode(text, add_special_tokens=False)
        offsets = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
        return self._tokens(np.asarray(encoding.ids, np.int32), offsets[:, 0], offsets[:, 1])

    def _tokens(self, ids: IntArray, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Tokens:
        return Tokens(ids, starts, ends, np.isin(ids, self._control_ids))

    def _spelled_out(self, tokens: Tokens, text: str, position: int) -> Tokens:
        """Returns `tokens` with the control token at `position` replaced by the tokens of its letters."""
        (found,) = np.nonzero((tokens.starts <= position) & (position < tokens.ends) & tokens.is_control)
        if not len(found):
            return tokens
        index = int(found[0])
        start, end = int(tokens.starts[index]), int(tokens.ends[index])
        ids = self.tokenizer.encode(text[start:end])
        letters = Tokens(ids, np.full(len(ids), start), np.full(len(ids), end), np.zeros(len(ids), bool))
        return _joined([(_slice(tokens, 0, index), 0), (letters, 0), (_slice(tokens, index + 1, None), 0)])


def _map_texts(pattern: re.Pattern[str], value: Any) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda match: LITERAL + match[0], value)
    if isinstance(value, Mapping):
        return {_map_texts(pattern, key): _map_texts(pattern, part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_texts(pattern, part) for part in value)
    return value


def _slice(tokens: Tokens, start: int, stop: int | None) -> Tokens:
    part = slice(start, stop)
    return Tokens(tokens.ids[part], tokens.starts[part], tokens.ends[part], tokens.is_control[part])


def _joined(parts: Sequence[tuple[Tokens, int]]) -> Tokens:
    """Returns the tokens of consecutive parts of a text, each with the position of its first character."""
    return Tokens(
        np.concatenate([part.ids for part, _ in parts]),
        np.concatenate([part.starts + offset for part, offset in parts]),
        np.concatenate([part.ends + offset for part, offset in parts]),
        np.concatenate([part.is_control for part, _ in parts]),
    )
