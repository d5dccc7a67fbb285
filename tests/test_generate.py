"""Greedy generation: with the cache, in batches, it writes what the model alone would, and stops where it should."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest

from tests.hf_families import FAMILIES, Config, Tensors, random_tensors, reference_logits, write_model
from train.compiling import CompileCounter
from train.generate import compile_generator
from train.lora import LoraConfig, merge_adapters, split_params
from train.model import ModelConfig, Params
from train.pretrained import load_params, open_pretrained

PROMPTS = [np.random.default_rng(length).integers(0, 67, length) for length in (1, 9, 4)]


def greedy(config: Config, tensors: Tensors, prompt: npt.ArrayLike, new_tokens: int) -> list[int]:
    """Returns what the reference writes, the whole sequence read again for every token."""
    tokens = [int(token) for token in np.asarray(prompt)]
    for _ in range(new_tokens):
        tokens.append(int(reference_logits(config, tensors, np.array(tokens))[-1].argmax()))
    return tokens[-new_tokens:]


def loaded(directory: Path, family: str) -> tuple[ModelConfig, Params, Tensors]:
    tensors = random_tensors(FAMILIES[family])
    pretrained = open_pretrained(write_model(directory, FAMILIES[family], tensors))
    return pretrained.config, load_params(pretrained), tensors


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_writes_what_the_reference_would(family: str, tmp_path: Path) -> None:
    config, params, tensors = loaded(tmp_path, family)
    generator = compile_generator(config, params, batch=4, prompt_tokens=12, new_tokens=10, eos_ids=[])
    written = generator(params, PROMPTS)
    wanted = [greedy(FAMILIES[family], tensors, prompt, 10) for prompt in PROMPTS]
    assert [answer.tolist() for answer in written] == wanted
    assert len({token for answer in wanted for token in answer}) > 5


def test_stops_at_any_end_token_each_prompt_for_itself(tmp_path: Path) -> None:
    config, params, tensors = loaded(tmp_path, "llama3")
    wanted = [greedy(FAMILIES["llama3"], tensors, prompt, 10) for prompt in PROMPTS]
    eos_ids = [wanted[0][5], wanted[1][0]]
    generator = compile_generator(config, params, batch=3, prompt_tokens=9, new_tokens=10, eos_ids=eos_ids)

    def cut(answer: Sequence[int]) -> list[int]:
        stop = next((i + 1 for i, token in enumerate(answer) if token in eos_ids), len(answer))
        return [*answer[:stop]]

    assert [answer.tolist() for answer in generator(params, PROMPTS)] == [cut(answer) for answer in wanted]
    assert len(cut(wanted[1])) == 1
    # And the program itself has stopped: nothing stands behind an end, nor in a row without a prompt.
    tokens = np.zeros((3, 9), np.int32)
    tokens[0, :1] = PROMPTS[0]
    raw = np.asarray(generator.program(params, tokens, np.array([1, 0, 0], np.int32)))
    assert raw[0].tolist() == [*cut(wanted[0]), *[0] * (10 - len(cut(wanted[0])))]


def test_a_batch_compiles_nothing_and_other_prompts_change_nothing(tmp_path: Path) -> None:
    config, params, _ = loaded(tmp_path, "qwen3")
    generator = compile_generator(config, params, batch=3, prompt_tokens=9, new_tokens=8, eos_ids=[])
    counter = CompileCounter()
    together = generator(params, PROMPTS)
    alone = [generator(params, [prompt])[0] for prompt in PROMPTS]
    assert counter.programs == 0
    assert [answer.tolist() for answer in together] == [answer.tolist() for answer in alone]
    assert generator(params, []) == []


def test_one_token_may_be_all_that_is_asked_for(tmp_path: Path) -> None:
    config, params, tensors = loaded(tmp_path, "llama2")
    generator = compile_generator(config, params, batch=1, prompt_tokens=9, new_tokens=1, eos_ids=[])
    assert generator(params, [PROMPTS[1]])[0].tolist() == greedy(FAMILIES["llama2"], tensors, PROMPTS[1], 1)


def test_adapters_and_parameters_on_all_devices_are_taken(tmp_path: Path) -> None:
    config, params, _ = loaded(tmp_path, "llama3")
    lora = LoraConfig(rank=2, targets=("query", "down"))
    rng = np.random.default_rng(0)
    for name in lora.targets:
        matrix = params["layers"][name]
        layers, inputs, outputs = matrix["kernel"].shape
        matrix["lora_a"] = rng.standard_normal((layers, inputs, 2)).astype(np.float32)
        matrix["lora_b"] = 0.1 * rng.standard_normal((layers, 2, outputs)).astype(np.float32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())  # type: ignore[no-untyped-call]
    params = jax.device_put(params, everywhere)
    sizes: dict[str, Any] = {"batch": 1, "prompt_tokens": 9, "new_tokens": 10, "eos_ids": ()}
    with_adapters = dataclasses.replace(config, lora=lora)
    written = compile_generator(with_adapters, params, **sizes)(params, PROMPTS[1:2])
    merged = merge_adapters(params, lora.scale)
    generator = compile_generator(config, merged, **sizes)
    assert written[0].tolist() == generator(merged, PROMPTS[1:2])[0].tolist()
    _, frozen = split_params(params)
    assert written[0].tolist() != generator(frozen, PROMPTS[1:2])[0].tolist()


@pytest.mark.parametrize("prompt", [[], [[1]], list(range(10))])
def test_prompts_that_do_not_fit_are_refused(prompt: Any, tmp_path: Path) -> None:
    config, params, _ = loaded(tmp_path, "smollm2")
    generator = compile_generator(config, params, batch=1, prompt_tokens=9, new_tokens=2, eos_ids=[])
    with pytest.raises(ValueError, match="want 1 to 9 tokens"):
        generator(params, [prompt])
    with pytest.raises(ValueError, match="got 2 prompts, compiled for 1"):
        generator(params, [[1], [2]])
    with pytest.raises(ValueError, match="new_tokens must be at least 1, got 0"):
        compile_generator(config, params, batch=1, prompt_tokens=9, new_tokens=0, eos_ids=[])
