from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bcl_grain.costs import TransformerCost
from bcl_grain.models import KNOWN_MODELS, ModelDims, dims_from_config, load_model

# Parameter counts as the models' publishers state them, an oracle for dimensions and arithmetic alike.
PUBLISHED_PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
}

QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def test_every_known_model_has_its_published_number_of_parameters() -> None:
    assert {name: dims.num_parameters for name, dims in KNOWN_MODELS.items()} == PUBLISHED_PARAMETERS


def test_a_config_gives_the_dimensions_of_the_same_known_model() -> None:
    assert dims_from_config(QWEN) == KNOWN_MODELS["qwen2.5-0.5b"]


def test_a_multimodal_config_gives_those_of_its_text_decoder() -> None:
    assert dims_from_config({"model_type": "some_vl", "hidden_size": 1, "text_config": QWEN}) == dims_from_config(QWEN)


def test_older_names_and_plain_feed_forward_layers_are_understood() -> None:
    config = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_inner": None}
    dims = dims_from_config(config)
    assert (dims.hidden, dims.kv_heads, dims.head_dim, dims.gated, dims.tied_embeddings) == (3072, 12, 64, False, True)
    # 124.4 million are published, of which positions (786,432) and biases (102,144 + 768 norms' ones) are not counted.
    assert dims.num_parameters == pytest.approx(124_439_808 - 1024 * 768, rel=2e-3)


def test_the_cost_is_that_of_the_dimensions() -> None:
    dims = KNOWN_MODELS["smollm2-135m"]
    expected = TransformerCost.from_dims(
        layers=30, width=576, heads=9, kv_heads=3, head_dim=64, hidden=1536, vocab_size=49152, remat=True
    )
    assert dims.cost(remat=True) == expected


def test_models_are_found_by_name_file_and_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    for place in ("Qwen2.5-0.5B", str(tmp_path), str(tmp_path / "config.json")):
        assert load_model(place) == KNOWN_MODELS["qwen2.5-0.5b"]


def test_what_is_no_model_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown model 'gpt-9': pass one of smollm2-135m, .* config\.json"):
        load_model("gpt-9")
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load_model(str(broken))
    broken.write_text("[]")
    with pytest.raises(ValueError, match="holds a list, not an object"):
        load_model(str(broken))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"hidden_size": 0}, "'hidden_size' is 0"),
        ({"num_hidden_layers": "24"}, "'num_hidden_layers' is '24'"),
        ({"num_local_experts": 8}, "mixture of experts.*linear=A,quadratic=B"),
        ({"num_key_value_heads": 3}, "kv_heads 3 does not divide heads 14"),
    ],
)
def test_a_config_that_cannot_be_used_says_why(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dims_from_config({**QWEN, **change})


def test_dimensions_must_be_positive_integers() -> None:
    with pytest.raises(ValueError, match=r"layers must be an integer of at least 1, got 2\.5"):
        ModelDims(layers=2.5, width=8, heads=2, kv_heads=1, head_dim=4, hidden=16, vocab_size=10)  # type: ignore[arg-type]
