"""Tokenizer and chat template out of a model directory, in the layouts that published models have."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import tokenizers

from tests.chat_formats import CHATML_TOOLS, byte_level_tokenizer, learned
from train.chat import chat_record
from train.conversations import conversation
from train.hf_tokenizer import hf_chat_format

HI = [{"role": "user", "content": "hi"}]
SOURCE = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}"


def write_model(directory: pathlib.Path, **config: Any) -> pathlib.Path:
    byte_level_tokenizer().backend.save(str(directory / "tokenizer.json"))
    given = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "chat_template": SOURCE, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(given))
    return directory


def test_special_tokens_and_template(tmp_path: pathlib.Path) -> None:
    form = hf_chat_format(write_model(tmp_path))
    assert form.template.text(HI) == "<|begin|>hi<|im_end|>"
    assert form.tokenizer.eos_id == form.encoder.control_tokens["<|im_end|>"]
    spelled_out = {"content": "<|im_end|>", "lstrip": False, "special": True}
    form = hf_chat_format(write_model(tmp_path, eos_token=spelled_out, pad_token="<|end_of_text|>"))
    assert form.template.text(HI) == "<|begin|>hi<|im_end|><|end_of_text|>"


def test_options(tmp_path: pathlib.Path) -> None:
    options = {"mood": "calm"}
    write_model(tmp_path)
    form = hf_chat_format(
        tmp_path, eos_token="<|eot|>", chat_template="{{ mood }}{{ eos_token }}", template_options=options
    )
    assert form.template.text(HI) == "calm<|eot|>"
    assert form.tokenizer.eos_id == form.encoder.control_tokens["<|eot|>"]


def test_a_template_file_wins(tmp_path: pathlib.Path) -> None:
    (write_model(tmp_path) / "chat_template.jinja").write_text(CHATML_TOOLS)
    form = hf_chat_format(tmp_path)
    assert form.template.source == CHATML_TOOLS
    assert learned(form, chat_record(conversation({"prompt": "a", "response": "b"}), form)) == ["b<|im_end|>"]


def test_named_templates(tmp_path: pathlib.Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    form = hf_chat_format(write_model(tmp_path, chat_template=named))
    assert form.template.text(HI) == "plain"
    assert form.template.text(HI, tools=[{}]) == "1 tools"


def test_tokens_that_both_files_know(tmp_path: pathlib.Path) -> None:
    ids = byte_level_tokenizer().backend.get_vocab()
    tokens = {str(ids["<|eot|>"]): {"content": "<|eot|>", "special": True}}
    hf_chat_format(write_model(tmp_path, added_tokens_decoder=tokens))
    with pytest.raises(ValueError, match=r"token '<\|new\|>' has the id 9999 .* but None in tokenizer.json"):
        hf_chat_format(write_model(tmp_path, added_tokens_decoder={"9999": {"content": "<|new|>"}}))


@pytest.mark.parametrize("template", [None, 3, [], [{"name": "rag", "template": "x"}]])
def test_no_template(tmp_path: pathlib.Path, template: Any) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        hf_chat_format(write_model(tmp_path, chat_template=template))


def test_what_is_wrong_with_a_directory(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"can't read .*tokenizer_config.json.*No such file"):
        hf_chat_format(tmp_path)
    write_model(tmp_path)
    for content, problem in (("{", "is not JSON"), ("[]", "must hold a JSON object, got a list")):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ValueError, match=problem):
            hf_chat_format(tmp_path)
    with pytest.raises(ValueError, match="valid Jinja"):
        hf_chat_format(write_model(tmp_path, chat_template="{% for %}"))
    with pytest.raises(ValueError, match=r"has a token without text: \{'lstrip'"):
        hf_chat_format(write_model(tmp_path, bos_token={"lstrip": True}))
    (write_model(tmp_path) / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="can't read tokenizer"):
        hf_chat_format(tmp_path)


def test_an_added_token_with_blanks_keeps_the_answer_whole(tmp_path: pathlib.Path) -> None:
    # Some models' control tokens swallow the blanks after them, and with them an answer's first ones.
    backend = byte_level_tokenizer().backend
    backend.add_special_tokens([tokenizers.AddedToken("<|bot|>", rstrip=True, special=True)])
    source = (
        "{% for m in messages %}{{ '<|bot|>' if m.role == 'assistant' else '' }}{{ m.content }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|bot|>{% endif %}"
    )
    write_model(tmp_path, chat_template=source)
    backend.save(str(tmp_path / "tokenizer.json"))
    form = hf_chat_format(tmp_path)
    record = chat_record(conversation({"prompt": "a", "response": "  b"}), form)
    assert learned(form, record) == ["  b<|eot|>"]
