r"""Conversations as training records: tokens, and a loss on what the assistant writes.

Where an answer starts and ends is never guessed from the text. Two ways, both of the template's own:

* Its `{% generation %}` blocks, if it has any.
* Otherwise its renderings of the conversation's beginnings. What it writes for the messages before an answer, with the
  generation prompt, is what the model is given; what it writes for the messages up to the answer ends with what the
  model writes:

      given      <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n
      answered   <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n
      loss                                                            ^^^^^^^^^^^^^^^

  Both must be true beginnings of the whole text, else the record is refused: there are templates that write a message
  differently once others follow it. (Where a template has no generation prompt, the model writes the header, too.)

An answer ends with its end mark, the last control token of what the template writes for it; what follows (a line break)
is the template's and not the model's. An answer without one is refused: the model could not learn to stop.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Literal

import numpy as np

from train.chat_template import CALL, ChatTemplate, Rendered, Span, first_difference
from train.chat_tokens import ChatEncoder, Tokens
from train.conversations import Conversation, Message, answers_to_learn, conversation
from train.tokenizers import FileTokenizer, IntArray, Record

TrainOn = Literal["assistant", "last", "all"]
ToolFormat = Literal["template", "text"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """How a model is talked to: its tokenizer and its chat template."""

    tokenizer: FileTokenizer
    template: ChatTemplate

    @functools.cached_property
    def encoder(self) -> ChatEncoder:
        """Turns rendered text into tokens."""
        return ChatEncoder(self.tokenizer)


def chat_record(
    spoken: Conversation,
    chat_format: ChatFormat,
    *,
    train_on: TrainOn = "assistant",
    tool_format: ToolFormat = "template",
) -> Record:
    """Returns a conversation as a record.

    Tool calls are part of the assistant's answer; tool results are not.

    Cost: two renderings for each answer, one encoding.

    Args:
        spoken: What was said.
        chat_format: The model's tokenizer and template.
        train_on: What counts in the loss: all answers of the "assistant", its "last" one, or "all" tokens.
        tool_format: Who writes tool calls: the "template", or, for a template that does not know them, "text": each
            call becomes `<tool_call>` JSON `</tool_call>` at the end of the message's content.

    Returns:
        {"tokens": int32 [n], "loss_mask": float32 [n]}.

    Raises:
        ValueError: Saying what is wrong with the conversation or with the template.

    >>> import tokenizers
    >>> from train.conversations import conversation
    >>> words = {word: index for index, word in enumerate("? user assistant tea please here".split())}
    >>> backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    >>> backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    >>> _ = backend.add_special_tokens(["<end>"])
    >>> source = (
    ...     "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}"
    ...     "{% if add_generation_prompt %}assistant {% endif %}"
    ... )
    >>> form = ChatFormat(tokenizer=FileTokenizer(backend, 7, 6, None, 6), template=ChatTemplate(source=source))
    >>> record = chat_record(conversation({"prompt": "tea please", "response": "here"}), form)
    >>> for token, counts in zip(record["tokens"], record["loss_mask"], strict=True):
    ...     print(f"{backend.id_to_token(token)}:{counts:.0f}", end=" ")
    user:0 tea:0 please:0 <end>:0 assistant:0 here:1 <end>:1
    """
    _check_choice("train_on", train_on, ("assistant", "last", "all"))
    spoken = _with_calls(spoken, tool_format)
    answers = answers_to_learn(spoken)
    if not answers and train_on != "all":
        raise ValueError("no message of the assistant to learn from; fill or remove the record")
    rendered = _render(spoken, chat_format)
    if train_on == "all":
        spans = [(0, len(rendered.text))]
    else:
        wanted = answers[-1:] if train_on == "last" else answers
        spans = _answer_spans(spoken, chat_format.template, rendered, wanted)
    tokens = chat_format.encoder.encode(
        rendered.text, boundaries=[edge for span in spans for edge in span], literals=rendered.literals
    )
    loss_mask = np.zeros(len(tokens.ids), np.float32)
    for index, span in enumerate(spans):
        first, end = tokens.within(span)
        if train_on != "all":
            end = _end_of_answer(tokens, rendered.text, first, end, required=index == len(spans) - 1)
        loss_mask[first:end] = 1
    loss_mask[:1] = 0  # nothing stands before it
    return {"tokens": tokens.ids, "loss_mask": loss_mask}


def chat_prompt(spoken: Conversation, chat_format: ChatFormat, *, tool_format: ToolFormat = "template") -> IntArray:
    """Returns the tokens [n] after which the model writes its answer to a conversation.

    Args:
        spoken: What was said.
        chat_format: The model's tokenizer and template.
        tool_format: As in `chat_record`.

    Raises:
        ValueError: If the template refuses the conversation.
    """
    spoken = _with_calls(spoken, tool_format)
    rendered = _render(spoken, chat_format, add_generation_prompt=True)
    return chat_format.encoder.encode(rendered.text, literals=rendered.literals).ids


def end_mark(chat_format: ChatFormat) -> int | None:
    """Returns the token that the template ends an answer with, which training teaches; None if it can't be told."""
    try:
        record = chat_record(conversation({"prompt": "Hello", "response": "Hello"}), chat_format)
    except ValueError:  # no control token, or a template that refuses so short a talk
        return None
    return int(record["tokens"][np.flatnonzero(record["loss_mask"])[-1]])


def _render(spoken: Conversation, chat_format: ChatFormat, *, add_generation_prompt: bool = False) -> Rendered:
    """Renders a conversation, control tokens in its messages marked as literal; checks that no tool call is lost."""
    template, encoder = chat_format.template, chat_format.encoder
    messages, tools = spoken.messages, spoken.tools
    if tools and not template.shows_tools():
        raise ValueError(
            "the record has tools, but the chat template doesn't show them; leave that column out, or give a template "
            "that does"
        )
    rendered = template.render(
        encoder.mark_literals([_mark_calls(message) for message in messages]),
        tools=encoder.mark_literals(tools),
        add_generation_prompt=add_generation_prompt,
    )
    if len(rendered.calls) < sum(len(message.get("tool_calls", ())) for message in messages):
        raise ValueError(
            "the chat template leaves out tool calls, and they would be lost; give a template that shows them, or set "
            "corpus.tool_format=text to have them written into the content"
        )
    if rendered.literals or rendered.calls:
        plain = template.text(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        if plain != rendered.text:
            raise ValueError(
                "the chat template depends on the names of called tools or on control tokens inside the messages: "
                f"{first_difference(plain, rendered.text)} when they are marked; remove them from the record"
            )
    return rendered


def _answer_spans(
    spoken: Conversation, template: ChatTemplate, rendered: Rendered, wanted: Sequence[int]
) -> list[Span]:
    """Returns the characters that the template writes for the messages at `wanted`, in order."""
    if template.marks_generation(tools=bool(spoken.tools)):
        spans = _marked_spans(spoken, template, rendered, wanted)
    else:
        spans = [_rendered_span(spoken, template, rendered.text, index) for index in wanted]
    if not spans:
        raise ValueError("the chat template's {% generation %} blocks hold nothing of the answers; repair the template")
    return spans


def _marked_spans(
    spoken: Conversation, template: ChatTemplate, rendered: Rendered, wanted: Sequence[int]
) -> list[Span]:
    messages, tools = spoken.messages, spoken.tools
    if len(wanted) == sum(message["role"] == "assistant" for message in messages):
        return list(rendered.generated)

    def blocks_before(index: int) -> int:
        return len(template.render(messages[:index], tools=tools).generated) if index else 0

    return [span for index in wanted for span in rendered.generated[blocks_before(index) : blocks_before(index + 1)]]


def _rendered_span(spoken: Conversation, template: ChatTemplate, text: str, index: int) -> Span:
    messages, tools = spoken.messages, spoken.tools
    given = template.text(messages[:index], tools=tools, add_generation_prompt=True)
    with_answer = text if index == len(messages) - 1 else template.text(messages[: index + 1], tools=tools)
    for beginning, whole, what in (
        (given, with_answer, "what precedes it with the generation prompt"),
        (with_answer, text, "its own text once more messages follow"),
    ):
        if not whole.startswith(beginning):
            raise ValueError(
                f"messages[{index}]: the chat template writes {what} in another way: "
                f"{first_difference(beginning, whole)}; set corpus.split_answers=True to learn each in a record of "
                "its own, or corpus.train_on=last to learn the last alone, or give a template with {% generation %} "
                "blocks around what the model writes"
            )
    if len(with_answer) == len(given):
        raise ValueError(f"messages[{index}]: the chat template leaves this answer out; give another template")
    return len(given), len(with_answer)


def _end_of_answer(tokens: Tokens, text: str, first: int, end: int, *, required: bool) -> int:
    """Returns one after the end mark among the tokens from `first` to before `end`, or `end` if there is none."""
    (controls,) = np.nonzero(tokens.is_control[first:end])
    if len(controls):
        mark = first + int(controls[-1])
        if not text[tokens.ends[mark] : tokens.ends[end - 1]].strip():
            return mark + 1
    if required:
        answer = text[tokens.starts[first] : tokens.ends[end - 1]] if end > first else ""
        raise ValueError(
            "the chat template ends an answer without a control token, so that the model could not learn to stop: "
            f"{answer[-40:]!r}; add the end token to the template, inside its {{% generation %}} block if it has one"
        )
    return end


def _with_calls(spoken: Conversation, tool_format: ToolFormat) -> Conversation:
    _check_choice("tool_format", tool_format, ("template", "text"))
    if tool_format == "template":
        return spoken
    return dataclasses.replace(spoken, messages=tuple(map(_calls_as_text, spoken.messages)))


def _mark_calls(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "name": CALL + call["function"]["name"]}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _calls_as_text(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = "\n".join(
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message["tool_calls"]
    )
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": f"{message['content']}\n{calls}" if message["content"] else calls}


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
