"""Where a model's own files say that its answers end, and how long it can read: read, refused, written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.hf_families import FAMILIES, Config, random_tensors, write_model
from tests.test_gguf_weights import write_gguf
from train.generation_config import changed_text, read_end_ids
from train.hf_weights import HfModel, open_hf_model
from train.pretrained import open_pretrained


def model(directory: Path, generation: object, **changes: Any) -> Path:
    """Writes a model of 67 tokens; `generation` is the content of generation_config.json, None for no such file."""
    config: Config = {**FAMILIES["llama3"], **changes}
    write_model(directory, config, random_tensors(config))
    file = directory / "generation_config.json"
    file.unlink()
    if generation is not None:
        file.write_text(generation if isinstance(generation, str) else json.dumps(generation))
    return directory


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 7}, (5,)),
        ({"eos_token_id": [5, 0, 5]}, {}, (5, 0)),
        ({"temperature": 0.6}, {"eos_token_id": [7, 8]}, (7, 8)),
        ({"eos_token_id": None}, {"eos_token_id": 66}, (66,)),
        (None, {"eos_token_id": 7}, (7,)),
        (None, {}, ()),
        ({"eos_token_id": []}, {"eos_token_id": 7}, ()),
    ],
)
def test_end_tokens_are_those_of_the_files(generation: object, config: Config, wanted: object, tmp_path: Path) -> None:
    assert open_hf_model(model(tmp_path, generation, **config)).end_ids == wanted


@pytest.mark.parametrize("value", ["</s>", "2", 2.0, True, -1, 67, [1, "2"], [1, None], {"id": 2}])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_what_is_no_token_is_refused_by_file_and_value(value: object, file: str, tmp_path: Path) -> None:
    broken = {"eos_token_id": value}
    directory = model(tmp_path, broken) if file.startswith("gen") else model(tmp_path, None, **broken)
    message = (
        f"{str(directory / file)!r}: eos_token_id must be a token's id in [0, 67), or a list of such, got {value!r}"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        open_hf_model(directory)


@pytest.mark.parametrize("text", ["{", "[2]", "\ufeff{}", "[" * 100_000])
def test_a_file_that_holds_no_settings_is_refused_by_name(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generation_config\.json' .*or remove it"):
        open_hf_model(model(tmp_path, text))


def written(text: str | None) -> Any:
    assert text is not None
    return json.loads(text)


def test_the_file_is_changed_only_where_servers_would_stop_elsewhere(tmp_path: Path) -> None:
    with_file = model(tmp_path / "a", {"eos_token_id": [5, 6], "temperature": 0.6})
    assert changed_text(with_file, [6, 5], known=(5, 6)) is None
    assert written(changed_text(with_file, [5, 6, 9], known=(5, 6))) == {"eos_token_id": [5, 6, 9], "temperature": 0.6}
    without = model(tmp_path / "b", None, eos_token_id=5)
    assert changed_text(without, [5], known=(5,)) is None
    assert written(changed_text(without, [5, 9], known=(5,))) == {"eos_token_id": [5, 9]}
    # Here transformers finds the file and looks no further.
    silent = model(tmp_path / "c", {"top_p": 0.9}, eos_token_id=5)
    assert read_end_ids(silent, {"eos_token_id": 5}, vocab_size=67) == (5,)
    assert written(changed_text(silent, [5], known=(5,))) == {"top_p": 0.9, "eos_token_id": 5}


def gguf_model(path: Path, **keys: Any) -> Path:
    settings = {f"/tokenizer.ggml.{name}_token_id": value for name, value in keys.items()}
    return write_gguf(path, FAMILIES["llama2"], random_tensors(FAMILIES["llama2"]), settings=settings)


def test_a_gguf_file_names_the_ends_of_texts_turns_and_messages(tmp_path: Path) -> None:
    assert open_pretrained(gguf_model(tmp_path / "a.gguf", eos=3, eot=4, eom=3, bos=9)).end_ids == (3, 4)
    assert open_pretrained(gguf_model(tmp_path / "b.gguf")).end_ids == ()
    for value in (67, "</s>"):
        with pytest.raises(ValueError, match=rf"d\.gguf': tokenizer\.ggml\.eot_token_id must be .*67\), got {value!r}"):
            open_pretrained(gguf_model(tmp_path / "d.gguf", eot=value))


def test_the_context_is_the_stretched_one_not_that_of_the_first_training(tmp_path: Path) -> None:
    config = FAMILIES["llama3"]
    assert config["rope_scaling"]["original_max_position_embeddings"] < config["max_position_embeddings"]
    assert open_pretrained(model(tmp_path / "hf", None)).context_tokens == config["max_position_embeddings"]
    assert open_pretrained(gguf_model(tmp_path / "a.gguf")).context_tokens == config["max_position_embeddings"]


def test_a_context_that_is_no_length_is_refused(tmp_path: Path) -> None:
    unknown = open_pretrained(model(tmp_path / "none", None, max_position_embeddings=None))
    assert isinstance(unknown, HfModel)
    assert unknown.context_tokens is None
    for value in ("8192", 0, -1, 8192.0, True):
        directory = model(tmp_path / "bad", None, max_position_embeddings=value)
        with pytest.raises(ValueError, match=rf"config\.json': max_position_embeddings must be .* got {value!r}"):
            open_pretrained(directory)
