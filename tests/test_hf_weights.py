"""Hugging Face directories: what is read computes what the family computes; what is written is what was read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hf_families import (
    FAMILIES,
    Config,
    Tensors,
    random_tensors,
    reference_logits,
    write_model,
    write_safetensors,
)
from train.attention import masked_attention
from train.compiling import CompileCounter
from train.hf_config import from_hf_config, to_hf_config
from train.hf_weights import open_hf_model
from train.model import ModelConfig, Params, graphdef
from train.pretrained import export_model, load_params, new_layouts, open_pretrained
from train.safetensors_file import read_layout, read_tensor

TOKENS = np.random.default_rng(1).integers(0, 67, 130)


def our_logits(config: ModelConfig, params: Params, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
    @jax.jit
    def run(params: Params, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef(config), params)
        positions = np.arange(len(tokens))[None]
        segment_ids = np.ones(positions.shape, np.int32)
        hidden = model(tokens[None], positions, segment_ids, attention=masked_attention, dtype=np.float32)
        return model.logits(hidden[0])

    return np.asarray(run(params, tokens.astype(np.int32)))


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_computes_what_the_family_computes(family: str, tmp_path: Path) -> None:
    config, tensors = FAMILIES[family], random_tensors(FAMILIES[family])
    pretrained = open_pretrained(write_model(tmp_path, config, tensors, shards=2))
    got = our_logits(pretrained.config, load_params(pretrained), TOKENS)
    wanted = reference_logits(config, tensors, TOKENS)
    assert np.abs(wanted).max() > 1
    np.testing.assert_allclose(got, wanted, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_transformers(family: str, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**FAMILIES[family])
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
        wanted = theirs(torch.tensor(TOKENS[None])).logits[0].numpy()
    theirs.save_pretrained(tmp_path / "theirs")
    pretrained = open_hf_model(tmp_path / "theirs")
    params = load_params(pretrained)
    np.testing.assert_allclose(our_logits(pretrained.config, params, TOKENS), wanted, atol=1e-4)

    for name, like in (("same", pretrained), ("new", None)):
        export_model(tmp_path / name, params, like=like, config=pretrained.config, max_tokens=512)
        reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        with torch.no_grad():
            np.testing.assert_array_equal(reloaded(torch.tensor(TOKENS[None])).logits[0].numpy(), wanted)
    assert files_of(tmp_path / "same") == files_of(tmp_path / "theirs")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
def test_import_then_export_is_the_identity(family: str, dtype: npt.DTypeLike, shards: int, tmp_path: Path) -> None:
    config = FAMILIES[family]
    source = write_model(tmp_path / "in", config, random_tensors(config, dtype=dtype), shards=shards)
    pretrained = open_hf_model(source)
    export_model(tmp_path / "out", load_params(pretrained), like=pretrained)
    assert files_of(tmp_path / "out") == files_of(source)


def test_types_may_differ_and_copies_and_buffers_of_old_files_come_back(tmp_path: Path) -> None:
    config = {**FAMILIES["smollm2"]}
    tensors = random_tensors(config, dtype=ml_dtypes.bfloat16)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.arange(4, dtype=np.float32)
    source = write_model(tmp_path / "in", config, tensors)
    pretrained = open_hf_model(source)
    params = load_params(pretrained)
    export_model(tmp_path / "same", params, like=pretrained)
    assert files_of(tmp_path / "same") == files_of(source)

    trained = jax.tree.map(lambda x: np.asarray(x) * 2, params)
    export_model(tmp_path / "trained", trained, like=pretrained)
    assert json.loads((tmp_path / "trained/config.json").read_text()) == config
    again = open_hf_model(tmp_path / "trained")
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight"):
        np.testing.assert_array_equal(again.read(name), 2 * tensors[name])


def test_parameters_have_the_type_and_sharding_that_were_asked_for(tmp_path: Path) -> None:
    pretrained = open_hf_model(write_model(tmp_path, FAMILIES["qwen3"], random_tensors(FAMILIES["qwen3"])))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())  # type: ignore[no-untyped-call]
    params = load_params(pretrained, dtype=ml_dtypes.bfloat16, sharding=sharding)
    assert {(leaf.dtype.name, leaf.sharding) for leaf in jax.tree.leaves(params)} == {("bfloat16", sharding)}
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == pretrained.config.num_parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_written_anew_describes_the_same_model(family: str) -> None:
    config = from_hf_config(FAMILIES[family], origin="config.json")
    written = to_hf_config(config, dtype="bfloat16", max_tokens=512, special_ids={"eos_token_id": 2})
    assert from_hf_config(json.loads(json.dumps(written)), origin="config.json") == config
    assert written["eos_token_id"] == 2


def test_a_model_is_cut_into_shards_of_bounded_size(tmp_path: Path) -> None:
    config = from_hf_config(FAMILIES["llama3"], origin="config.json")
    files = new_layouts(config, "BF16", shard_bytes=10_000)
    assert [*files] == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 2
    assert all(layout.num_bytes - len(layout.header) <= 10_000 for layout in files.values())
    assert sum(len(layout.entries) for layout in files.values()) == len(random_tensors(FAMILIES["llama3"]))


# What is wrong, how it is brought about, and what the message must name.
DEFECTS: dict[str, tuple[Callable[[Config, Tensors], object], str]] = {
    "unknown family": (lambda c, t: c.update(model_type="gemma2"), "gemma2.*only LlamaForCausalLM"),
    "unknown head": (lambda c, t: c.update(architectures=["LlamaForSequenceClassification"]), "SequenceClassification"),
    "no dimension": (lambda c, t: c.pop("intermediate_size"), "lacks intermediate_size"),
    "dimension as text": (lambda c, t: c.update(hidden_size="32"), "out of range"),
    "odd kv heads": (lambda c, t: c.update(num_key_value_heads=3), "kv_heads 3"),
    "activation": (lambda c, t: c.update(hidden_act="gelu"), "hidden_act 'gelu'"),
    "bias": (lambda c, t: c.update(attention_bias=True), "attention_bias"),
    "rope": (lambda c, t: c.update(rope_scaling={"type": "yarn", "factor": 2.0}), "'yarn'"),
    "rope incomplete": (lambda c, t: c.update(rope_scaling={"rope_type": "llama3", "factor": 2.0}), "low_freq_factor"),
    "sliding window": (lambda c, t: c.update(layer_types=["sliding_attention"]), "sliding_attention"),
    "quantised": (lambda c, t: c.update(quantization_config={"bits": 4}), "quantization_config"),
    "missing tensor": (lambda c, t: t.pop("model.norm.weight"), "'model.norm.weight' .* is missing"),
    "unknown tensor": (
        lambda c, t: t.update({"model.layers.0.mlp.experts.0.weight": np.zeros(3, np.float32)}),
        "'model.layers.0.mlp.experts.0.weight' .* is unknown",
    ),
    "too many layers": (lambda c, t: c.update(num_hidden_layers=2), "'model.layers.2.*is unknown.* more"),
    "wrong shape": (
        lambda c, t: t.update({"model.norm.weight": np.zeros(31, np.float32)}),
        r"'model.norm.weight' has shape \(31,\).* \(32,\)",
    ),
    "tied to another": (lambda c, t: c.update(tie_word_embeddings=True), "'lm_head.weight' is not"),
    "integers": (
        lambda c, t: t.update({"model.norm.weight": np.zeros(32, np.int8)}),
        "'model.norm.weight' .* of type INT8",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_named_before_anything_is_compiled(defect: str, tmp_path: Path) -> None:
    config, tensors = dict(FAMILIES["llama3"]), random_tensors(FAMILIES["llama3"])
    spoil, message = DEFECTS[defect]
    spoil(config, tensors)
    write_model(tmp_path, config, tensors, shards=2)
    counter = CompileCounter()
    with pytest.raises(ValueError, match=message):
        open_pretrained(tmp_path)
    assert counter.programs == 0


def test_reading_compiles_nothing(tmp_path: Path) -> None:
    write_model(tmp_path, FAMILIES["qwen2"], random_tensors(FAMILIES["qwen2"]))
    counter = CompileCounter()
    load_params(open_pretrained(tmp_path))
    assert counter.programs == 0


def test_missing_shards_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a model"):
        open_pretrained(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"config\.json"):
        open_pretrained(tmp_path)
    write_model(tmp_path, FAMILIES["llama2"], random_tensors(FAMILIES["llama2"]), shards=3)
    os.remove(tmp_path / "model-00002-of-00003.safetensors")
    with pytest.raises(ValueError, match=r"1 of the 3 shards .*model-00002-of-00003"):
        open_pretrained(tmp_path)
    os.remove(tmp_path / "model.safetensors.index.json")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor .*pytorch_model\.bin"):
        open_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        open_pretrained(tmp_path)


def test_an_index_that_contradicts_the_shards_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, FAMILIES["llama2"], random_tensors(FAMILIES["llama2"]), shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    places = index["weight_map"]
    places["model.norm.weight"] = next(file for file in places.values() if file != places["model.norm.weight"])
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"contradict each other: tensor 'model\.norm\.weight'"):
        open_pretrained(tmp_path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="no weight_map"):
        open_pretrained(tmp_path)


def test_a_file_that_is_cut_off_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"a": np.ones((2, 3), np.float32), "b": np.ones(2, np.float16)})
    whole = file.read_bytes()
    for size in [*range(0, len(whole), 7), len(whole) - 1]:
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=re.escape(repr(str(file)))):
            read_layout(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match=f"has {len(whole) + 1} bytes, its header promises {len(whole)}"):
        read_layout(file)


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_damaged_header_is_refused_or_reads_as_tensors(data: st.DataObject, tmp_path_factory: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    write_safetensors(file, {"a": np.ones((2, 3), np.float32), "b": np.ones(2, np.float16)})
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 20))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        layout = read_layout(file)
    except ValueError:
        return
    for name, entry in layout.entries.items():
        try:
            assert read_tensor(file, layout, name).shape == entry.shape
        except ValueError as error:
            assert "of type" in str(error)  # noqa: PT017 - both outcomes are right


def test_exports_appear_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretrained = open_hf_model(write_model(tmp_path / "in", FAMILIES["llama2"], random_tensors(FAMILIES["llama2"])))
    params = load_params(pretrained)
    with pytest.raises(ValueError, match="is not empty"):
        export_model(tmp_path / "in", params, like=pretrained)
    with monkeypatch.context() as patch:
        patch.delitem(params["layers"]["down"], "kernel")
        with pytest.raises(KeyError, match="kernel"):
            export_model(tmp_path / "out", params, like=pretrained)
    assert not (tmp_path / "out").exists()
    export_model(tmp_path / "out", params, like=pretrained)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "in")
    with pytest.raises(ValueError, match="config and max_tokens"):
        export_model(tmp_path / "new", params)
    with pytest.raises(ValueError, match="F8"):
        export_model(tmp_path / "new", params, config=pretrained.config, max_tokens=9, dtype="F8")


def test_files_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    config = from_hf_config(FAMILIES["qwen2"], origin="config.json")
    tensors = random_tensors(FAMILIES["qwen2"])
    pretrained = open_hf_model(write_model(tmp_path / "in", FAMILIES["qwen2"], tensors))
    export_model(tmp_path / "out", load_params(pretrained), config=config, max_tokens=64)
    read = library.load_file(tmp_path / "out/model.safetensors")
    assert {*read} == {*tensors}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read[name], tensor)
    library.save_file(tensors, tmp_path / "in/model.safetensors", metadata={"format": "pt"})
    again = open_hf_model(tmp_path / "in")
    export_model(tmp_path / "again", load_params(again), like=again)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "in")
