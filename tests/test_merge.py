"""Adapters merged into their model compute what the two compute together, as a directory that others load."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.chat_formats import CHATML_TOOLS, HEADERS, chat_format, write_chat_model
from tests.hf_families import FAMILIES, Config, Tensors, random_tensors, reference_logits, write_model
from tests.test_gguf_weights import write_gguf
from tests.test_hf_weights import files_of, our_logits
from tests.test_lora import LORA, THEIR_NAMES, random_adapters
from train import answers, merge
from train.hf_weights import HfModel, open_hf_model
from train.lora import FROZEN_DTYPE, join_params, split_params
from train.model import Params
from train.peft_adapters import TEMPLATE_FILE, export_adapters, load_adapters
from train.pretrained import load_params, open_pretrained
from train.tokenizer_files import tokenizer_files

TOKENS = np.random.default_rng(1).integers(0, 67, 130)


def chat_family(name: str) -> Config:
    return {**FAMILIES[name], "vocab_size": chat_format(CHATML_TOOLS).tokenizer.vocab_size}


def write_family(directory: Path, name: str, *, dtype: Any = np.float32, shards: int = 1) -> Path:
    """Writes a model of a family with a tokenizer and a template."""
    config = chat_family(name)
    write_model(directory, config, random_tensors(config, dtype=dtype), shards=shards)
    for file, text in tokenizer_files(chat_format(CHATML_TOOLS)).items():
        (directory / file).write_text(text)
    return directory


def write_adapters(directory: Path, model: Path, *, template: str | None = None) -> Params:
    """Writes random adapters of a model; returns them."""
    pretrained = open_pretrained(model)
    trained, _ = split_params(random_adapters(load_params(pretrained), LORA))
    config = dataclasses.replace(pretrained.config, lora=LORA)
    export_adapters(directory, config, trained, base_model=str(model), template=template)
    adapters: Params = trained
    return adapters


def merged_tensors(tensors: Tensors, adapters: Params) -> Tensors:
    """Returns W + alpha / rank * B A for the names of Hugging Face, in float64, W rounded to bfloat16."""
    merged = {name: tensor.astype(ml_dtypes.bfloat16).astype(np.float64) for name, tensor in tensors.items()}
    for name, factors in adapters["layers"].items():
        for layer, (a, b) in enumerate(zip(factors["lora_a"], factors["lora_b"], strict=True)):
            merged[f"model.layers.{layer}.{THEIR_NAMES[name]}.weight"] += 2 * (a.astype(np.float64) @ b).T
    return merged


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_the_merged_model_computes_what_model_and_adapters_do(family: str, tmp_path: Path) -> None:
    base = write_family(tmp_path / "base", family)
    adapters = write_adapters(tmp_path / "adapters", base)
    merge.merge(str(base), str(tmp_path / "adapters"), str(tmp_path / "out"), dtype="F32")
    merged = open_hf_model(tmp_path / "out")
    got = our_logits(merged.config, load_params(merged), TOKENS)

    source = open_hf_model(base)
    config = dataclasses.replace(source.config, lora=LORA)
    parts = join_params(load_adapters(tmp_path / "adapters", config), load_params(source, dtype=FROZEN_DTYPE))
    together = our_logits(config, parts, TOKENS)
    plain = our_logits(source.config, load_params(source), TOKENS)
    assert np.abs(together - plain).max() > 0.1
    np.testing.assert_allclose(got, together, atol=1e-5 * np.abs(together).max())
    wanted = reference_logits(
        chat_family(family), merged_tensors(random_tensors(chat_family(family)), adapters), TOKENS
    )
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())


def test_types_shards_and_files_are_the_models_unless_another_type_is_asked_for(tmp_path: Path) -> None:
    base = write_family(tmp_path / "base", "smollm2", dtype=ml_dtypes.bfloat16, shards=3)
    config = json.loads((base / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    (base / "config.json").write_text(json.dumps(config))
    adapters = write_adapters(tmp_path / "adapters", base)
    merge.merge(str(base), str(tmp_path / "adapters"), str(tmp_path / "same"))
    before, after = files_of(base), files_of(tmp_path / "same")
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert {name for name in changed if not name.endswith(".safetensors")} == {"generation_config.json"}
    tensors = random_tensors(chat_family("smollm2"), dtype=ml_dtypes.bfloat16)
    wanted = merged_tensors(tensors, adapters)
    same = open_hf_model(tmp_path / "same")
    for name, tensor in wanted.items():
        np.testing.assert_allclose(same.read(name).astype(np.float64), tensor, rtol=2**-8)
        assert same.read(name).dtype == ml_dtypes.bfloat16

    merge.merge(str(base), str(tmp_path / "adapters"), str(tmp_path / "exact"), dtype="F32")
    exact = open_hf_model(tmp_path / "exact")
    for name, tensor in wanted.items():
        np.testing.assert_allclose(exact.read(name), tensor, rtol=1e-6, atol=1e-6)
    assert json.loads((tmp_path / "exact/config.json").read_text()) == {**config, "torch_dtype": "float32"}
    assert not (tmp_path / "exact/model.safetensors.index.json").exists()


def test_a_gguf_file_becomes_a_directory_with_its_tokenizer_context_and_ends(tmp_path: Path) -> None:
    config = {**FAMILIES["llama2"], "vocab_size": chat_format(HEADERS).tokenizer.vocab_size}
    gguf = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), settings={"/tokenizer.ggml.eot_token_id": 7})
    write_adapters(tmp_path / "adapters", gguf)
    pretrained = open_pretrained(gguf)
    opened = answers.OpenedModel(
        pretrained=pretrained,
        chat_format=chat_format(HEADERS),
        config=dataclasses.replace(pretrained.config, lora=LORA),
        adapters=str(tmp_path / "adapters"),
    )
    with pytest.MonkeyPatch.context() as patch:  # the tokenizer of the test's own takes the place of the file's
        patch.setattr(merge, "open_model", lambda *_, **__: opened)
        merge.merge(str(gguf), str(tmp_path / "adapters"), str(tmp_path / "out"))
    again = answers.open_model(str(tmp_path / "out"))
    assert isinstance(again.pretrained, HfModel)
    assert again.pretrained.context_tokens == config["max_position_embeddings"]
    wanted = {7, *(chat_format(HEADERS).tokenizer.backend.token_to_id(name) for name in ("<|eot|>", "<|end_of_text|>"))}
    assert {*again.pretrained.end_ids} == wanted
    assert again.chat_format.template.source == HEADERS
    got = our_logits(again.config, again.params(), TOKENS)
    np.testing.assert_allclose(got, our_logits(opened.config, opened.params(), TOKENS), atol=1e-4)


def test_a_template_beside_the_adapters_is_asked_by_and_merged(tmp_path: Path) -> None:
    base = write_chat_model(tmp_path / "base")
    write_adapters(tmp_path / "adapters", base, template=HEADERS)
    assert (tmp_path / "adapters" / TEMPLATE_FILE).read_text() == HEADERS
    assert answers.open_model(str(base)).chat_format.template.source == CHATML_TOOLS
    assert answers.open_model(str(base), adapters=str(tmp_path / "adapters")).chat_format.template.source == HEADERS
    merge.merge(str(base), str(tmp_path / "adapters"), str(tmp_path / "out"))
    out = answers.open_model(str(tmp_path / "out"))
    assert out.chat_format.template.source == HEADERS
    assert out.chat_format.tokenizer.backend.token_to_id("<|eot|>") in out.pretrained.end_ids


def test_the_command_says_where_or_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapters, out = write_chat_model(tmp_path / "base"), tmp_path / "adapters", tmp_path / "out"
    write_adapters(adapters, base)
    arguments = [f"--model={base}", f"--adapters={adapters}", f"--out={out}"]
    assert merge.main(arguments) == 0
    assert capsys.readouterr().out == f"merged: {out}\n"
    before = files_of(out)
    for wrong, message in (
        ([], "is not empty: give another directory"),
        ([f"--out={tmp_path / 'new'}", "--adapters=nowhere"], "give a directory of adapters"),
        ([f"--out={tmp_path / 'new'}", f"--model={write_family(tmp_path / 'other', 'llama3')}"], "the model calls for"),
    ):
        assert merge.main([*arguments, *wrong]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert message in error
    assert files_of(out) == before
    assert not (tmp_path / "new").exists()
    with pytest.raises(SystemExit) as caught:
        merge.main(arguments[:2])
    assert caught.value.code == 2
