"""Answers of the model in training to a few fixed questions, written down from time to time."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from train.answers import PROMPT_STEP, end_ids, read_answer
from train.chat import ChatFormat
from train.generate import Generator, compile_generator
from train.lora import join_params
from train.model import Params
from train.prepare import Prepared
from train.programs import Programs
from train.tokenizers import IntArray

SAMPLES_FILE = "samples.jsonl"


class Sampler:
    """Asks the model; compiled before the run, so that nothing is compiled in it."""

    def __init__(
        self, questions: Sequence[str], prompts: Sequence[IntArray], chat_format: ChatFormat, generator: Generator
    ) -> None:
        self._questions = questions
        self._prompts = prompts
        self._chat_format = chat_format
        self._generator = generator

    def write(self, run_dir: Path, step: int, trained: Params, frozen: Params | None) -> None:
        """Appends a line for each question to `samples.jsonl`."""
        answers = self._generator(join_params(trained, frozen), self._prompts)
        with (run_dir / SAMPLES_FILE).open("a", encoding="utf-8") as file:
            for question, ids in zip(self._questions, answers, strict=True):
                answer = read_answer(ids, self._chat_format, self._generator.eos_ids)
                line = {"step": step, "prompt": question, "answer": answer.text, "ended": answer.ended}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


def cut_samples(run_dir: Path, first_step: int) -> None:
    """Removes the answers that a run which goes on after `first_step` updates will give again."""
    path = run_dir / SAMPLES_FILE
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]  # the last one may have been cut short by a kill
    kept = [line for line in whole if json.loads(line)["step"] <= first_step] if first_step else []
    replacement = path.with_suffix(".tmp")
    replacement.write_text("".join(kept), encoding="utf-8")
    os.replace(replacement, path)


def compile_sampler(prepared: Prepared, programs: Programs) -> Sampler | None:
    """Returns what writes the run's samples, on the main process; None if there are none to write."""
    prompts, chat_format = prepared.sample_prompts, prepared.chat_format
    if not prompts or chat_format is None or prepared.pretrained is None or not prepared.topology.is_main:
        return None
    params = join_params(programs.abstract_state.params, programs.abstract_frozen)
    generator = compile_generator(
        prepared.model,
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params),  # type: ignore[no-untyped-call]
        batch=len(prompts),
        prompt_tokens=-(-max(map(len, prompts)) // PROMPT_STEP) * PROMPT_STEP,
        new_tokens=prepared.config.runtime.sample_tokens,
        eos_ids=end_ids(prepared.pretrained, chat_format),
        device=programs.local_devices[0],
    )
    return Sampler(prepared.config.runtime.sample_prompts, prompts, chat_format, generator)
