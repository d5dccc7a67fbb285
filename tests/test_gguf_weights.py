"""GGUF files: what is read computes what the family computes; a real model gives a right answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from tests.chat_formats import smollm2_path
from tests.hf_families import FAMILIES, Config, Tensors, head_dim, random_tensors, reference_logits, write_model
from tests.test_hf_weights import TOKENS, our_logits
from train.chat import chat_prompt
from train.compiling import CompileCounter
from train.conversations import conversation
from train.generate import compile_generator
from train.gguf_tokenizer import gguf_chat_format
from train.hf_weights import open_hf_model
from train.pretrained import export_model, load_params, open_pretrained

# llama.cpp's names, written out for the files of these tests.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, module = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[module]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleaved(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Puts the rows i and i + d/2 of each head beside each other, as the conversion of Llamas does."""
    half = len(weight) // heads // 2
    order = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in range(2)]
    return weight[order]


def write_gguf(
    path: Path,
    config: Config,
    tensors: Tensors,
    *,
    settings: dict[str, Any] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    architecture = config["model_type"]
    settings = dict(settings or {})
    writer = gguf.GGUFWriter(path, settings.pop("architecture", architecture))
    if "split.count" in settings:
        writer.add_uint16("split.count", settings.pop("split.count"))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10_000.0))
    if "head_dim" in config:
        writer.add_key_length(head_dim(config))
        writer.add_value_length(head_dim(config))
    for key, value in settings.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key.removeprefix("/") if key.startswith("/") else f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            tensor = interleaved(tensor, heads)
        if name.startswith("rope_freqs"):
            writer.add_tensor(name, tensor)
        elif tensor.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def divisors(config: Config) -> npt.NDArray[np.float32]:
    """Returns what llama.cpp's conversion of Llama 3.1 divides the rotary frequencies by, for the common settings."""
    dim, factor = head_dim(config), config["rope_scaling"]["factor"]
    result = []
    for i in range(0, dim, 2):
        turns = 8192 * config["rope_theta"] ** (-i / dim) / (2 * np.pi)
        smooth = (turns - 1.0) / (4.0 - 1.0)
        result.append(1 if turns > 4 else factor if turns < 1 else 1 / ((1 - smooth) / factor + smooth))
    return np.array(result, np.float32)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama3", "llama3-tied")])
def test_computes_what_the_family_computes(family: str, tmp_path: Path) -> None:
    config, tensors = FAMILIES[family], random_tensors(FAMILIES[family])
    pretrained = open_pretrained(write_gguf(tmp_path / "model.gguf", config, tensors))
    hf = open_hf_model(write_model(tmp_path / "hf", config, tensors))
    assert pretrained.config == hf.config
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(pretrained.read(name), tensor)
    logits = our_logits(pretrained.config, load_params(pretrained), TOKENS[:40])
    np.testing.assert_allclose(logits, reference_logits(config, tensors, TOKENS[:40]), atol=1e-4)


def test_stretched_rotary_frequencies_are_recognised(tmp_path: Path) -> None:
    # 32 frequencies: some of them lie between those that stay and those that are divided in full.
    config = {**FAMILIES["llama3"], "head_dim": 64}
    config["rope_scaling"] = {**config["rope_scaling"], "original_max_position_embeddings": 8192, "factor": 32.0}
    tensors = random_tensors(config)
    made = divisors(config)
    assert np.sum((made > 1) & (made < 32)) >= 3
    path = write_gguf(tmp_path / "model.gguf", config, {**tensors, "rope_freqs.weight": made})
    assert open_pretrained(path).config == open_hf_model(write_model(tmp_path / "hf", config, tensors)).config
    odd = write_gguf(tmp_path / "odd.gguf", config, {**tensors, "rope_freqs.weight": made[::-1].copy()})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        open_pretrained(odd)


@pytest.mark.parametrize(
    ("kind", "error"), [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 2e-2), ("Q4_0", 0.2), ("Q4_1", 0.2)]
)
def test_quantised_tensors_come_back_within_their_precision(kind: str, error: float, tmp_path: Path) -> None:
    config = {**FAMILIES["llama2"], "intermediate_size": 64}
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "model.gguf", config, tensors, kind=gguf.GGMLQuantizationType[kind])
    pretrained = open_pretrained(path)
    for name, tensor in tensors.items():
        read = pretrained.read(name)
        assert read.dtype == np.float32
        difference = np.abs(read - tensor).max() / np.abs(tensor).max()
        assert difference <= error
        assert (difference > 0) == (tensor.ndim == 2)


def test_a_model_from_gguf_is_written_as_a_directory_that_reads_the_same(tmp_path: Path) -> None:
    config, tensors = FAMILIES["smollm2"], random_tensors(FAMILIES["smollm2"])
    pretrained = open_pretrained(write_gguf(tmp_path / "model.gguf", config, tensors))
    params = load_params(pretrained)
    beside: dict[str, str | Path] = {"tokenizer.json": "{}", "LICENSE": tmp_path / "model.gguf"}
    export_model(
        tmp_path / "out",
        params,
        config=pretrained.config,
        max_tokens=64,
        beside=beside,
        special_ids={"eos_token_id": 2},
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "LICENSE",
    }
    again = open_hf_model(tmp_path / "out")
    assert again.config == pretrained.config
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(again.read(name), tensor)


# What is wrong, how it is brought about, and what the message must name.
DEFECTS: dict[str, tuple[Callable[[Config, Tensors, dict[str, Any]], object], str]] = {
    "unknown architecture": (lambda c, t, s: s.update(architecture="gemma2"), "architecture 'gemma2'"),
    "missing tensor": (lambda c, t, s: t.pop("model.norm.weight"), "'model.norm.weight' .*missing"),
    "fewer layers": (lambda c, t, s: c.update(num_hidden_layers=2), r"'model\.layers\.2.* is unknown"),
    "wrong shape": (
        lambda c, t, s: t.update({"model.norm.weight": np.zeros(31, np.float32)}),
        r"'model.norm.weight' has shape \(31,\)",
    ),
    "experts": (lambda c, t, s: s.update(expert_count=8), r"llama\.expert_count 8"),
    "scaling": (lambda c, t, s: s.update({"rope.scaling.type": "yarn"}), r"rope\.scaling\.type 'yarn'"),
    "partly rotary": (lambda c, t, s: s.update({"rope.dimension_count": 4}), r"rope\.dimension_count 4"),
    "parts": (lambda c, t, s: s.update({"split.count": 2}), "one of 2 parts"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_named_before_anything_is_compiled(defect: str, tmp_path: Path) -> None:
    config, tensors, extra = dict(FAMILIES["llama2"]), random_tensors(FAMILIES["llama2"]), dict[str, Any]()
    spoil, message = DEFECTS[defect]
    spoil(config, tensors, extra)
    path = write_gguf(tmp_path / "model.gguf", config, tensors, settings=extra)
    counter = CompileCounter()
    with pytest.raises(ValueError, match=message):
        open_pretrained(path)
    assert counter.programs == 0


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match=r"can't read '.*model\.gguf'"):
        open_pretrained(path)
    write_gguf(path, FAMILIES["llama2"], random_tensors(FAMILIES["llama2"]))
    whole = path.read_bytes()
    for content in (b"", b"GGUF", b"\0" * 100, whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.gguf' is no GGUF file, or a damaged one"):
            open_pretrained(path)


def test_smollm2_names_the_capital_of_france() -> None:
    path = smollm2_path()
    chat_format, pretrained = gguf_chat_format(path), open_pretrained(path)
    params = load_params(pretrained)
    question = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    prompt = chat_prompt(conversation(question), chat_format)
    tokenizer = chat_format.tokenizer
    generator = compile_generator(
        pretrained.config, params, batch=1, prompt_tokens=48, new_tokens=32, eos_ids=[tokenizer.eos_id]
    )
    answer = generator(params, [prompt])[0]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_id

    # The same file read and computed another way.
    tokens = np.concatenate([prompt, answer])
    logits = our_logits(pretrained.config, params, tokens)
    del params
    np.testing.assert_allclose(logits, reference_logits(SMOLLM2, smollm2_tensors(path), tokens), atol=1e-3)


SMOLLM2: Config = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
}


def smollm2_tensors(path: Path) -> Tensors:
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensors = {}
    for name in random_tensors({**SMOLLM2, "vocab_size": 1, "intermediate_size": 1}):
        tensor = found.pop(gguf_name(name))
        value = gguf.dequantize(tensor.data, tensor.tensor_type)
        for part, heads in (("q_proj", 9), ("k_proj", 3)):
            if part in name:
                value = value[np.argsort(interleaved(np.arange(heads * 64), heads))]
        tensors[name] = value
    assert not found
    return tensors
