"""Where a model's answers end, by its own files: the `generation_config.json` of a Hugging Face directory.

Servers stop at the tokens that it names. A directory without the file, or without end tokens in it, has them in
`config.json`, as transformers has it.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from bcl_grain.json_files import read_json

GENERATION_FILE = "generation_config.json"
_KEY = "eos_token_id"


def read_end_ids(directory: pathlib.Path, config: Mapping[str, Any], *, vocab_size: int) -> tuple[int, ...]:
    """Returns the tokens that end an answer as a model directory's files say; none if they say nothing.

    Args:
        directory: Of the model.
        config: Its parsed `config.json`.
        vocab_size: Ids are below it.

    Raises:
        ValueError: If what they say is no token or list of tokens; the message names the file and the value.
    """
    file = directory / GENERATION_FILE
    settings = _settings(file) if file.exists() else {}
    if settings.get(_KEY) is None:
        file, settings = directory / "config.json", dict(config)
    value = settings.get(_KEY)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{str(file)!r}: eos_token_id must be a token's id in [0, {vocab_size:,}), or a list of such, got "
                f"{value!r}: repair the file, or fetch it again"
            )
    return tuple(dict.fromkeys(ids))


def changed_text(directory: pathlib.Path, end_ids: Collection[int], *, known: Collection[int]) -> str | None:
    """Returns what a directory's `generation_config.json` must say for servers to stop at these tokens.

    Args:
        directory: Of the model.
        end_ids: The tokens.
        known: What `read_end_ids` gives for the directory.

    Returns:
        The file's text, all else as it is; None if servers stop at just these tokens already.
    """
    file = directory / GENERATION_FILE
    settings = _settings(file) if file.exists() else {}
    said = settings.get(_KEY, []) if file.exists() else [*known]
    if {*(said if isinstance(said, list) else [said])} == {*end_ids}:
        return None
    ids = [*end_ids]
    return json.dumps({**settings, _KEY: ids if len(ids) > 1 else ids[0]}, indent=2, ensure_ascii=False) + "\n"


def _settings(file: pathlib.Path) -> dict[str, Any]:
    try:
        settings = read_json(file)
    except OSError as error:
        raise ValueError(f"can't read {str(file)!r}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is not JSON ({error}): fetch it again, or remove it") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{str(file)!r} must hold a JSON object, got {settings!r:.60}: fetch it again, or remove it")
    return settings
