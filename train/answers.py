"""A model's answers to conversations: which tokens end them, what fits its context, batches of them.

Shared by `train.ask` and the samples that a run writes, so that both stop, and refuse, alike.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from train.chat import ChatFormat, ToolFormat, chat_prompt, end_mark
from train.chat_corpus import open_chat_format
from train.chat_data import SHOWN_PROBLEMS, Check, Problem
from train.context import check_context
from train.conversations import Conversation, Message, conversation, question
from train.generate import Generator, compile_generator
from train.lora import FROZEN_DTYPE, join_params
from train.model import ModelConfig, Params
from train.peft_adapters import TEMPLATE_FILE, load_adapters, read_lora_config
from train.pretrained import Pretrained, load_params, open_pretrained
from train.sources import Source
from train.tokenizers import IntArray

PROMPT_STEP = 64
"""Prompts are filled up to multiples of it: few lengths are few programs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model that can be asked, its weights not read yet; made by `open_model`.

    Attributes:
        pretrained: Its files, opened.
        chat_format: Its tokenizer and chat template.
        config: Its dimensions, those of the adapters included.
        adapters: The adapters' directory, if it has any.
    """

    pretrained: Pretrained
    chat_format: ChatFormat
    config: ModelConfig
    adapters: str | None

    def params(self) -> Params:
        """Reads its parameters onto the first device."""
        if self.adapters is None:
            return load_params(self.pretrained)
        # The run that made them had the model so; with more digits its answers could be others.
        frozen = load_params(self.pretrained, dtype=FROZEN_DTYPE)
        return join_params(load_adapters(self.adapters, self.config), frozen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What a model is asked.

    Attributes:
        place: Where it stands, in words.
        spoken: The conversation up to the answer.
        expected: The answer that the row has itself, if any.
        ids: int32 [n], the tokens after which the answer begins.
    """

    place: str
    spoken: Conversation
    expected: Message | None
    ids: IntArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model wrote.

    Attributes:
        text: Without control tokens.
        ended: Whether the model ended it; else it was cut off at the number of tokens asked for.
        tokens: How many were written, the end's included.
    """

    text: str
    ended: bool
    tokens: int


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Texts as a `train.sources.Source` of conversations of one message each."""

    texts: Sequence[str]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": self.texts[index]}

    def place(self, index: int) -> str:
        """Returns which of the texts, from 1."""
        return f"prompt {index + 1}"


def open_model(path: str, *, adapters: str | None = None) -> OpenedModel:
    """Opens a model to ask it. No weight is read, nothing is compiled.

    Args:
        path: A Hugging Face directory or a GGUF file.
        adapters: A directory of adapters in PEFT's format. The chat template that lies there goes before the model's.

    Raises:
        ValueError: If something can't be read or does not fit; the message names it.
    """
    pretrained, template = open_pretrained(path), None
    config = pretrained.config
    if adapters is not None:
        config = dataclasses.replace(config, lora=read_lora_config(adapters))
        if (file := pathlib.Path(adapters, TEMPLATE_FILE)).exists():
            template = str(file)
    chat_format = open_chat_format(path, template=template)
    return OpenedModel(pretrained=pretrained, chat_format=chat_format, config=config, adapters=adapters)


def end_ids(pretrained: Pretrained, chat_format: ChatFormat) -> tuple[int, ...]:
    """Returns the tokens that end an answer.

    They are the tokenizer's end token, those that the model's files name, and the end mark that the chat template
    writes, where it can be told: what fine-tuning teaches.
    """
    mark = end_mark(chat_format)
    marks = [] if mark is None else [mark]
    return tuple(dict.fromkeys([*pretrained.end_ids, chat_format.tokenizer.eos_id, *marks]))


def read_questions(
    source: Source,
    model: OpenedModel,
    *,
    new_tokens: int,
    system: str | None = None,
    tool_format: ToolFormat = "template",
) -> list[Question]:
    """Reads all rows of a source as questions.

    Args:
        source: Conversations; see `train.conversations.question`.
        model: Whom they are asked.
        new_tokens: Longest answer.
        system: A system message for those without one.
        tool_format: Who writes earlier tool calls; see `train.chat.chat_record`.

    Raises:
        ValueError: If rows can't be asked; they are named together.
    """
    before: tuple[Message, ...] = ()
    if system is not None:
        before = conversation({"messages": [{"role": "system", "content": system}]}).messages
    questions, problems = [], []
    for row in range(len(source)):
        place = source.place(row)
        try:
            spoken, expected = question(source[row])
            if spoken.messages[0]["role"] not in ("system", "developer"):
                spoken = dataclasses.replace(spoken, messages=(*before, *spoken.messages))
            ids = chat_prompt(spoken, model.chat_format, tool_format=tool_format)
            check_context(len(ids), new_tokens, model.pretrained.context_tokens, setting="--max_tokens")
        except ValueError as error:
            problems.append(Problem(place, str(error)))
        else:
            questions.append(Question(place=place, spoken=spoken, expected=expected, ids=ids))
    if problems and len(source) == 1:
        raise ValueError(f"{problems[0].place}: {problems[0].reason}")
    if problems:
        shown = tuple(problems[:SHOWN_PROBLEMS])
        raise ValueError(Check(num_rows=len(source), num_broken=len(problems), problems=shown).describe())
    return questions


def sample_prompts(
    texts: Sequence[str], pretrained: Pretrained, chat_format: ChatFormat, *, new_tokens: int
) -> tuple[IntArray, ...]:
    """Returns the tokens of the questions that a run samples, checked.

    Raises:
        ValueError: If the template refuses one, or it does not fit the model's context.
    """
    prompts = []
    for text in texts:
        try:
            ids = chat_prompt(conversation({"messages": [{"role": "user", "content": text}]}), chat_format)
            check_context(len(ids), new_tokens, pretrained.context_tokens, setting="runtime.sample_tokens")
        except ValueError as error:
            raise ValueError(f"runtime.sample_prompts, {text!r:.60}: {error}") from error
        prompts.append(ids)
    return tuple(prompts)


def answers(
    model: OpenedModel, params: Params, prompts: Sequence[IntArray], *, new_tokens: int, batch_size: int
) -> Iterator[Answer]:
    """Gives the most likely answer to each prompt, in order, as soon as its batch is done.

    A batch is filled up to the next length in a ladder of `PROMPT_STEP` times powers of two; each compiles one program.

    Args:
        model: Whom to ask.
        params: From `OpenedModel.params`.
        prompts: Ids [n] of each.
        new_tokens: Longest answer.
        batch_size: Prompts that are answered together, at most.
    """
    ends = end_ids(model.pretrained, model.chat_format)
    batch_size = min(batch_size, len(prompts))
    generators: dict[int, Generator] = {}
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        longest = -(-max(map(len, batch)) // PROMPT_STEP)
        rung = PROMPT_STEP * 2 ** (longest - 1).bit_length()
        if rung not in generators:
            generators[rung] = compile_generator(
                model.config,
                jax.eval_shape(lambda: params),
                batch=batch_size,
                prompt_tokens=rung,
                new_tokens=new_tokens,
                eos_ids=ends,
            )
        yield from (read_answer(ids, model.chat_format, ends) for ids in generators[rung](params, batch))


def read_answer(ids: IntArray, chat_format: ChatFormat, ends: Sequence[int]) -> Answer:
    """Returns an answer's tokens [n] as text."""
    text = chat_format.tokenizer.backend.decode(ids.tolist(), skip_special_tokens=True)
    return Answer(text=text, ended=len(ids) > 0 and int(ids[-1]) in ends, tokens=len(ids))
