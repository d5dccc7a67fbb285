"""The tokenizer and the chat template as the files of a Hugging Face model directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import processors

from train.chat import ChatFormat


def tokenizer_files(chat_format: ChatFormat, *, eos_ids: Sequence[int] = ()) -> dict[str, str]:
    """Returns the text of `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`.

    They are for models that came without them, such as those from a GGUF file; a model directory's own files are copied
    as they are (`train.hf_weights.HfModel.beside`).

    Args:
        chat_format: Tokenizer and template.
        eos_ids: Further tokens that end an answer.
    """
    tokenizer, template = chat_format.tokenizer, chat_format.template
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    token_ids = {"eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    if tokenizer.bos_id is not None:
        token_ids["bos_token"] = tokenizer.bos_id
        if backend.encode("", add_special_tokens=True).ids[:1] != [tokenizer.bos_id]:
            # What begins a record stands in the file as what the tokenizer puts before a text.
            bos = _text(backend, tokenizer.bos_id)
            backend.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, tokenizer.bos_id)]
            )
    special = {name: value for name, value in template.variables.items() if name.endswith("_token")}
    special |= {name: _text(backend, token_id) for name, token_id in token_ids.items()}
    sources: Any = template.source
    if template.tool_source is not None:
        sources = [
            {"name": "default", "template": template.source},
            {"name": "tool_use", "template": template.tool_source},
        ]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
        "chat_template": sources,
    }
    ends = sorted({tokenizer.eos_id, *eos_ids})
    generation: dict[str, Any] = {f"{name}_id": token_id for name, token_id in token_ids.items()}
    generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return {
        "tokenizer.json": backend.to_str(pretty=True) + "\n",
        "tokenizer_config.json": _json(config),
        "generation_config.json": _json(generation),
    }


def _text(backend: tokenizers.Tokenizer, token_id: int) -> str:
    text = backend.id_to_token(token_id)
    assert text is not None, token_id
    return text


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
