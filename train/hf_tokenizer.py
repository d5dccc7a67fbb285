"""The tokenizer and the chat template of a Hugging Face model directory.

Read are `tokenizer.json`, `tokenizer_config.json` and, where present, `chat_template.jinja`. Nothing in them is run but
the template, in its sandbox.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from bcl_grain.json_files import read_json
from train.chat import ChatFormat
from train.chat_template import ChatTemplate
from train.tokenizers import FileTokenizer, load_tokenizer

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def hf_chat_format(
    directory: str | os.PathLike[str],
    *,
    eos_token: str | None = None,
    chat_template: str | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> ChatFormat:
    """Returns the tokenizer and the chat template of a model directory.

    Args:
        directory: Holds at least `tokenizer.json` and `tokenizer_config.json`.
        eos_token: The token that ends a text; default: the configuration's.
        chat_template: A template in Jinja's language instead of the directory's own.
        template_options: Names that the template looks at, such as {"enable_thinking": False}.

    Raises:
        ValueError: If a file is missing or damaged, the two disagree on a token, or there is no chat template.
    """
    folder = pathlib.Path(directory)
    config = _config(folder / "tokenizer_config.json")
    tokenizer = load_tokenizer(folder, eos_token=eos_token)
    _check_agreement(tokenizer, config, folder)
    source, tool_source = _templates(folder, config) if chat_template is None else (chat_template, None)
    special = {name: _token_text(config[name]) for name in _SPECIAL if config.get(name) is not None}
    if eos_token is not None:
        special["eos_token"] = eos_token
    template = ChatTemplate(source=source, tool_source=tool_source, variables={**special, **(template_options or {})})
    return ChatFormat(tokenizer=tokenizer, template=template)


def _config(file: pathlib.Path) -> dict[str, Any]:
    config = _json(file)
    if not isinstance(config, dict):
        raise ValueError(f"{str(file)!r} must hold a JSON object, got a {type(config).__name__}; fetch it again")
    return config


def _json(file: pathlib.Path) -> Any:
    try:
        return read_json(file)
    except OSError as error:
        raise ValueError(
            f"can't read {str(file)!r}: {error.strerror or error}; give a model directory with its tokenizer files"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(file)!r} is not JSON ({error}); fetch it again") from error


def _check_agreement(tokenizer: FileTokenizer, config: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Checks that tokenizer.json knows the tokens that the configuration adds, under the same ids."""
    for token_id, token in config.get("added_tokens_decoder", {}).items():
        text = _token_text(token)
        if tokenizer.backend.token_to_id(text) != int(token_id):
            raise ValueError(
                f"{str(folder)!r}: token {text!r} has the id {token_id} in tokenizer_config.json, but "
                f"{tokenizer.backend.token_to_id(text)} in tokenizer.json; save the tokenizer again with transformers"
            )


def _templates(folder: pathlib.Path, config: Mapping[str, Any]) -> tuple[str, str | None]:
    """Returns the template, and the one for conversations with tools if there is another."""
    file = folder / "chat_template.jinja"
    if file.exists():  # newer than the key in the configuration, and wins over it
        return file.read_text(encoding="utf-8"), None
    given = config.get("chat_template")
    if isinstance(given, list):
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        given, tool_source = named.get("default"), named.get("tool_use")
    else:
        tool_source = None
    if not isinstance(given, str):
        raise ValueError(
            f"{str(folder)!r} has no chat template (a base model, perhaps); give one, or train on prompt and response "
            "without"
        )
    return given, tool_source if isinstance(tool_source, str) else None


def _token_text(token: Any) -> str:
    """Returns a token's text; older files spell it out: {"content": "</s>", "lstrip": false, ...}."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"tokenizer_config.json has a token without text: {token!r:.60}; fetch it again")
    return text
