"""A tokenizer and a template written as files come back the same, and other programs read them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.chat_formats import CHATML_TOOLS, HEADERS, chat_format, smollm2_path
from tests.test_gguf_tokenizer import PIECES
from train.chat import ChatFormat, chat_prompt, chat_record
from train.conversations import conversation
from train.gguf_tokenizer import gguf_chat_format
from train.hf_tokenizer import hf_chat_format
from train.tokenizer_files import tokenizer_files

TEXTS = [*PIECES.split(" "), PIECES, "", " ", "hello\n\n the", "<|im_end|> in someone's text"]
SPOKEN = conversation(
    {
        "messages": [
            {"role": "user", "content": "What is 17 + 25?"},
            {"role": "assistant", "content": "42"},
            {"role": "user", "content": "And 東京?"},
            {"role": "assistant", "content": "A city."},
        ]
    }
)


def written(directory: Path, form: ChatFormat) -> Path:
    for name, text in tokenizer_files(form, eos_ids=[3]).items():
        (directory / name).write_text(text, encoding="utf-8")
    return directory


def assert_same(form: ChatFormat, again: ChatFormat) -> None:
    for text in TEXTS:
        assert again.tokenizer.encode(text).tolist() == form.tokenizer.encode(text).tolist()
    assert (again.tokenizer.bos_id, again.tokenizer.eos_id) == (form.tokenizer.bos_id, form.tokenizer.eos_id)
    assert again.tokenizer.vocab_size == form.tokenizer.vocab_size
    assert (again.template.source, again.template.tool_source) == (form.template.source, form.template.tool_source)
    for name, value in chat_record(SPOKEN, form).items():
        assert chat_record(SPOKEN, again)[name].tolist() == value.tolist()


@pytest.mark.parametrize("source", [CHATML_TOOLS, HEADERS])
@pytest.mark.parametrize("tool_source", [None, CHATML_TOOLS])
def test_what_is_written_comes_back(source: str, tool_source: str | None, tmp_path: Path) -> None:
    form = chat_format(source)
    form = dataclasses.replace(form, template=dataclasses.replace(form.template, tool_source=tool_source))
    assert_same(form, hf_chat_format(written(tmp_path, form)))
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == sorted([3, form.tokenizer.eos_id])
    assert generation["bos_token_id"] == form.tokenizer.bos_id


@pytest.mark.parametrize("source", [CHATML_TOOLS, HEADERS])
def test_transformers_reads_the_same(source: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    form = chat_format(source)
    assert_reads_the_same(transformers.AutoTokenizer.from_pretrained(written(tmp_path, form)), form)


def assert_reads_the_same(theirs: object, form: ChatFormat) -> None:
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)  # type: ignore[attr-defined]
        assert ids == form.tokenizer.encode(text).tolist()
    prompt = theirs.apply_chat_template(  # type: ignore[attr-defined]
        [dict(message) for message in SPOKEN.messages], add_generation_prompt=True, return_dict=False
    )
    assert prompt == chat_prompt(SPOKEN, form).tolist()


def test_smollm2_comes_back(tmp_path: Path) -> None:
    form = gguf_chat_format(smollm2_path())
    assert_same(form, hf_chat_format(written(tmp_path, form)))


def test_transformers_reads_smollm2_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    form = gguf_chat_format(smollm2_path())
    assert_reads_the_same(transformers.AutoTokenizer.from_pretrained(written(tmp_path, form)), form)
