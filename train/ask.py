"""Asks a model: `python -m train.ask --model=FILE_OR_DIRECTORY --prompt="What is the capital of France?"`.

The model is a Hugging Face directory, such as one that a run has exported, or a GGUF file; `--adapters` adds a run's
adapters. The answer is the most likely one, under the model's own chat template. Exit codes: 0, or 2 for bad input.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import jax
from absl import app, flags

from train.chat import chat_prompt
from train.chat_corpus import open_chat_format
from train.conversations import conversation
from train.generate import compile_generator
from train.lora import FROZEN_DTYPE, join_params
from train.peft_adapters import load_adapters, read_lora_config
from train.pretrained import load_params, open_pretrained

EXIT_DONE, EXIT_BAD_INPUT = 0, 2

_MODEL = flags.DEFINE_string("model", None, "A Hugging Face directory or a GGUF file.", required=True)
_PROMPT = flags.DEFINE_string("prompt", None, "The question.", required=True)
_SYSTEM = flags.DEFINE_string("system", None, "A system message before it. Default: what the template says.")
_ADAPTERS = flags.DEFINE_string("adapters", None, "A directory of adapters in PEFT's format, for this model.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "Longest answer.", lower_bound=1)


def answer(model: str, prompt: str, *, system: str | None = None, adapters: str | None = None, max_tokens: int) -> str:
    """Returns the model's most likely answer.

    Raises:
        ValueError: If something can't be read or does not fit; the message names it.
    """
    pretrained, chat_format = open_pretrained(model), open_chat_format(model)
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    ids = chat_prompt(conversation({"messages": [*messages]}), chat_format)
    config = pretrained.config
    if adapters is None:
        params = load_params(pretrained)
    else:
        config = dataclasses.replace(config, lora=read_lora_config(adapters))
        # The run that made them had the model so; with more digits its answers could be others.
        frozen = load_params(pretrained, dtype=FROZEN_DTYPE)
        params = join_params(load_adapters(adapters, config), frozen)
    generator = compile_generator(
        config,
        jax.eval_shape(lambda: params),
        batch=1,
        prompt_tokens=len(ids),
        new_tokens=max_tokens,
        eos_ids=[chat_format.tokenizer.eos_id],
    )
    (written,) = generator(params, [ids])
    return chat_format.tokenizer.backend.decode(written.tolist(), skip_special_tokens=True)


def main(argv: Sequence[str]) -> int:
    """Does what the flags say; returns the exit code."""
    try:
        if argv[1:]:
            raise ValueError(f"unexpected arguments {list(argv[1:])}: flags are written --name=value")
        text = answer(
            _MODEL.value, _PROMPT.value, system=_SYSTEM.value, adapters=_ADAPTERS.value, max_tokens=_MAX_TOKENS.value
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(text)
    return EXIT_DONE


def _parse_flags(argv: Sequence[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse_flags)
