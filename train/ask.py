"""Asks a model: `python -m train.ask --model=FILE_OR_DIRECTORY --prompt="What is the capital of France?"`.

The model is a Hugging Face directory, such as one that a run has exported, or a GGUF file; `--adapters` adds a run's
adapters. Several prompts, or a file of conversations as in training, are answered in batches:

    python -m train.ask --model=... --conversations=held_out.jsonl --out=answers.jsonl

Each answer is the most likely one, under the model's own chat template. `--out` has a line for each question, in order:
its messages, the answer, whether the model ended it, and what the row itself answers as "expected".

Exit codes: 0, all was answered; 1, writing the answers failed; 2, bad input: nothing was asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from absl import app, flags, logging
from tqdm import tqdm

from train.answers import Answer, Prompts, Question, answers, open_model, read_questions
from train.command_line import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, fail, parse_flags
from train.jsonl import FileChangedError
from train.sources import Source, open_source

_MODEL = flags.DEFINE_string("model", None, "A Hugging Face directory or a GGUF file.", required=True)
_PROMPT = flags.DEFINE_multi_string("prompt", [], "A question. May be repeated.")
_CONVERSATIONS = flags.DEFINE_string(
    "conversations", None, "A file of conversations, as for training; an answer at a row's end is left off."
)
_SYSTEM = flags.DEFINE_string("system", None, "A system message where there is none. Default: what the template says.")
_ADAPTERS = flags.DEFINE_string("adapters", None, "A directory of adapters in PEFT's format, for this model.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "Longest answer.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Questions that are answered together.", lower_bound=1)
_TOOL_FORMAT = flags.DEFINE_enum(
    "tool_format", "template", ["template", "text"], "Who writes earlier tool calls: as corpus.tool_format."
)
_OUT = flags.DEFINE_string("out", None, "A new file for the answers, JSON Lines. Default: they are printed.")


def main(argv: Sequence[str]) -> int:
    """Does what the flags say; returns the exit code."""
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # JAX tells which devices there are not
    with contextlib.ExitStack() as cleanup:
        try:
            if argv[1:]:
                raise ValueError(f"unexpected arguments {list(argv[1:])}: flags are written --name=value")
            if _OUT.value is not None and os.path.exists(_OUT.value):
                raise ValueError(f"--out={_OUT.value} is there already: name another file, or remove it")
            model = open_model(_MODEL.value, adapters=_ADAPTERS.value)
            questions = read_questions(
                _source(), model, new_tokens=_MAX_TOKENS.value, system=_SYSTEM.value, tool_format=_TOOL_FORMAT.value
            )
            params = model.params()
            out = None if _OUT.value is None else cleanup.enter_context(open(_OUT.value, "x", encoding="utf-8"))
        except (ValueError, OSError, FileChangedError) as error:
            return fail(error, EXIT_BAD_INPUT)
        prompts = [question.ids for question in questions]
        found = answers(model, params, prompts, new_tokens=_MAX_TOKENS.value, batch_size=_BATCH_SIZE.value)
        bar = tqdm(found, total=len(prompts), unit="answer", disable=None if out else True)  # only on a terminal
        cut = 0
        try:
            for question, answer in zip(questions, bar, strict=True):
                cut += not answer.ended
                if out is None:
                    print(f"> {_heading(question)}\n{answer.text}\n" if len(questions) > 1 else answer.text)
                else:
                    out.write(json.dumps(_line(question, answer), ensure_ascii=False) + "\n")
                    out.flush()
        except OSError as error:
            return fail(OSError(f"can't write all answers: {error}"), EXIT_FAILED)
        if cut:
            of = f"{cut} of {len(questions)} answers" if len(questions) > 1 else "the answer"
            print(f"cut after --max_tokens={_MAX_TOKENS.value}: {of}", file=sys.stderr)
    return EXIT_DONE


def _source() -> Source:
    if bool(_PROMPT.value) == bool(_CONVERSATIONS.value):
        raise ValueError("want questions, either by --prompt or by --conversations")
    return Prompts(_PROMPT.value) if _PROMPT.value else open_source(_CONVERSATIONS.value)


def _heading(question: Question) -> str:
    return f"{question.place}: {textwrap.shorten(question.spoken.messages[-1]['content'], 80, placeholder=' ...')}"


def _line(question: Question, answer: Answer) -> dict[str, Any]:
    tools = {} if question.spoken.tools is None else {"tools": list(question.spoken.tools)}
    expected = {} if question.expected is None else {"expected": question.expected}
    return {
        "messages": list(question.spoken.messages),
        **tools,
        "answer": answer.text,
        "ended": answer.ended,
        "answer_tokens": answer.tokens,
        **expected,
    }


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
