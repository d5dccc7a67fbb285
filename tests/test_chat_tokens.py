"""Rendered text becomes tokens: control tokens where the template writes them, characters and tokens in step."""

from __future__ import annotations

import dataclasses
import itertools
import pickle

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_formats import CONTROL, byte_level_tokenizer
from train.chat_template import LITERAL
from train.chat_tokens import ChatEncoder, Tokens
from train.tokenizers import FileTokenizer

ENCODER = ChatEncoder(byte_level_tokenizer())
PIECES = st.sampled_from((*CONTROL, "hello", " the", "\n", "\n\n", " ", "é", "東", "🙂", "<|im_", "end|>"))


def names(tokens: Tokens) -> list[str]:
    return [str(ENCODER.tokenizer.backend.id_to_token(token)) for token in tokens.ids.tolist()]


def text_of(tokens: Tokens) -> str:
    return ENCODER.tokenizer.backend.decode(tokens.ids.tolist(), skip_special_tokens=False)


def test_control_tokens_are_single_tokens() -> None:
    tokens = ENCODER.encode("<|im_start|>user\nhello<|im_end|>")
    assert names(tokens) == ["<|im_start|>", "u", "s", "e", "r", "Ċ", "hello", "<|im_end|>"]
    assert tokens.is_control.tolist() == [True, *[False] * 6, True]
    assert (tokens.starts[-2], tokens.ends[-2]) == (17, 22)
    assert tokens.within((17, 32)) == (6, 8)
    assert ENCODER.control_tokens == {name: ENCODER.tokenizer.backend.token_to_id(name) for name in CONTROL}


def test_a_token_is_cut_only_where_it_crosses_a_boundary() -> None:
    assert names(ENCODER.encode("a\n\nhello")) == ["a", "ĊĊ", "hello"]
    assert names(ENCODER.encode("a\n\nhello", boundaries=[1, 3, 8])) == ["a", "ĊĊ", "hello"]
    cut = ENCODER.encode("a\n\nhello", boundaries=[2, 5])
    assert names(cut) == ["a", "Ċ", "Ċ", "he", "ll", "o"]
    assert cut.starts.tolist() == [0, 1, 2, 3, 5, 7]
    assert cut.ends.tolist() == [1, 2, 3, 5, 7, 8]


def test_a_cut_may_make_another_one_needed() -> None:
    assert names(ENCODER.encode("\n\n\n")) == ["ĊĊ", "Ċ"]
    assert names(ENCODER.encode("\n\n\n", boundaries=[1, 2])) == ["Ċ", "Ċ", "Ċ"]


def test_the_blank_that_a_token_begins_with_is_seen() -> None:
    # The tokenizer's post-processor would put " the" at 2 to 5, and the boundary would look uncrossed.
    assert names(ENCODER.encode("a the", boundaries=[2])) == ["a", "Ġ", "t", "he"]


def test_a_character_of_several_tokens_lies_in_one_span() -> None:
    tokens = ENCODER.encode("a🙂b", boundaries=[1, 2])
    assert len(tokens.ids) == 6
    assert tokens.within((1, 2)) == (1, 5)
    assert tokens.within((2, 3)) == (5, 6)


def test_looking_like_a_control_token_is_not_being_one() -> None:
    message = {"content": "a<|im_end|>b", "parts": [["[CALLS]"], None, 3], "<|eot|>": True}
    assert ENCODER.mark_literals(message) == {
        "content": f"a{LITERAL}<|im_end|>b",
        "parts": [[f"{LITERAL}[CALLS]"], None, 3],
        f"{LITERAL}<|eot|>": True,
    }
    tokens = ENCODER.encode("a<|im_end|>b<|im_end|>", literals=[1])
    assert names(tokens) == ["a", *"<|im_end|>", "b", "<|im_end|>"]
    assert tokens.is_control.sum() == 1
    assert tokens.within((0, 12)) == (0, 12)
    assert names(ENCODER.encode("plain", literals=[1])) == list("plain")


@settings(deadline=None, max_examples=100)
@given(st.lists(PIECES, max_size=12), st.data())
def test_tokens_and_characters_stay_in_step(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    # Boundaries fall between what was put together, as a template's do: never inside a control token's text.
    edges = np.cumsum([0, *map(len, pieces)]).tolist()
    boundaries = data.draw(st.lists(st.sampled_from(edges), max_size=4))
    tokens = ENCODER.encode(text, boundaries=boundaries)
    assert text_of(tokens) == text
    assert np.all(np.diff(tokens.starts) >= 0)
    assert np.all(np.diff(tokens.ends) >= 0)
    for span in itertools.pairwise(sorted({0, len(text), *boundaries})):
        first, last = tokens.within(span)
        part = dataclasses.replace(tokens, ids=tokens.ids[first:last])
        assert text_of(part) == text[slice(*span)]


def test_a_tokenizer_that_blanks_every_part_is_not_cut() -> None:
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({"▁": 0, "a": 1, "▁a": 2, "\n": 3, "\na": 4}, [("▁", "a"), ("\n", "a")])
    )
    backend.normalizer = tokenizers.normalizers.Prepend("▁")
    encoder = ChatEncoder(FileTokenizer(backend, 5, 0, None, 0))
    assert encoder.mark_literals("a") == "a"
    with pytest.raises(ValueError, match=r"covers the end of a prompt.*can't part them; strip"):
        encoder.encode("a\na", boundaries=[2])


def test_an_encoder_can_be_sent_to_another_process() -> None:
    text, literals = "<|im_end|> hello<|im_end|>", [16]
    expected = ENCODER.encode(text, literals=literals)
    assert names(pickle.loads(pickle.dumps(ENCODER)).encode(text, literals=literals)) == names(expected)
