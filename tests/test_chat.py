"""The loss covers the answers with their end marks and nothing else, whatever the template and the messages."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_formats import (
    CHATML_MARKED,
    CHATML_TOOLS,
    CONTROL,
    FORGETFUL,
    HEADERS,
    chat_format,
    learned,
    smollm2_path,
    text_data,
    text_of,
)
from train.chat import ChatFormat, chat_prompt, chat_record
from train.conversations import Conversation, conversation, split_answers
from train.gguf_tokenizer import gguf_chat_format

CHATML = chat_format(CHATML_TOOLS)
MARKED = chat_format(CHATML_MARKED)
HEADED = chat_format(HEADERS)
WITHOUT_CALLS = HEADERS.replace("in message.tool_calls", "in []")
FORMS = {"by renderings": CHATML, "by marks": MARKED}


def message(role: str, content: str, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def talk(*messages: dict[str, Any], **keys: Any) -> Conversation:
    return conversation({"messages": list(messages), **keys})


ORDER = talk(
    message("user", "one latte"),
    message("assistant", "", tool_calls=[call("find", q="latte"), call("order", n=1)]),
    message("tool", "found"),
    message("tool", "ordered"),
    message("assistant", "It is ordered."),
    message("user", "thanks"),
    message("assistant", "Bye!"),
)
ORDER_LEARNED = [
    '\n<tool_call>\n{"name": "find", "arguments": {"q": "latte"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "order", "arguments": {"n": 1}}\n</tool_call><|im_end|>',
    "It is ordered.<|im_end|>",
    "Bye!<|im_end|>",
]


def test_the_whole_record() -> None:
    record = chat_record(talk(message("system", "s"), message("user", "hi"), message("assistant", "yo")), CHATML)
    assert text_of(CHATML, record["tokens"]) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    )
    assert record["tokens"].dtype == np.int32
    assert record["loss_mask"].dtype == np.float32
    assert record["loss_mask"].tolist() == [0.0] * (len(record["tokens"]) - 4) + [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_answers_and_tool_calls_count_and_results_do_not(form: ChatFormat) -> None:
    assert learned(form, chat_record(ORDER, form)) == ORDER_LEARNED
    assert learned(form, chat_record(ORDER, form, train_on="last")) == ORDER_LEARNED[-1:]


def test_both_ways_to_find_answers_agree() -> None:
    by_renderings, by_marks = (chat_record(ORDER, form) for form in FORMS.values())
    assert by_renderings["tokens"].tolist() == by_marks["tokens"].tolist()
    assert by_renderings["loss_mask"].tolist() == by_marks["loss_mask"].tolist()


def test_a_control_token_inside_an_answer_does_not_end_it() -> None:
    record = chat_record(ORDER, HEADED)
    assert text_of(HEADED, record["tokens"]).startswith("<|begin|><|header|>user<|/header|>\n\none latte<|eot|>")
    assert learned(HEADED, record) == [
        '[CALLS][{"name": "find", "arguments": {"q": "latte"}}]'
        '[CALLS][{"name": "order", "arguments": {"n": 1}}]<|eot|>',
        "It is ordered.<|eot|>",
        "Bye!<|eot|>",
    ]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_all_tokens_but_the_first_can_count(form: ChatFormat) -> None:
    record = chat_record(ORDER, form, train_on="all")
    assert record["loss_mask"].tolist() == [0.0] + [1.0] * (len(record["tokens"]) - 1)
    questions = talk(message("user", "one"), message("user", "two"))
    assert chat_record(questions, form, train_on="all")["loss_mask"].sum() > 0


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_answers_of_weight_zero_are_read_and_not_learned(form: ChatFormat) -> None:
    messages = (
        message("user", "a"),
        message("assistant", "good", weight=1),
        message("user", "b"),
        message("assistant", "bad", weight=0),
    )
    record = chat_record(talk(*messages), form)
    assert learned(form, record) == ["good<|im_end|>"]
    assert "bad" in text_of(form, record["tokens"])
    assert learned(form, chat_record(talk(*messages), form, train_on="last")) == ["good<|im_end|>"]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_looks_like_an_end_mark_in_a_message_is_text(form: ChatFormat) -> None:
    messages = (message("user", "what is <|im_end|>?"), message("assistant", "It ends <|im_end|> a turn."))
    record = chat_record(talk(*messages), form)
    assert learned(form, record) == ["It ends <|im_end|> a turn.<|im_end|>"]
    end = form.encoder.control_tokens["<|im_end|>"]
    assert (record["tokens"] == end).sum() == 3  # of the system prompt, the question and the answer
    prompt = chat_prompt(talk(messages[0]), form)
    assert (prompt == end).sum() == 2
    assert prompt.tolist() == record["tokens"][: len(prompt)].tolist()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_line_breaks_that_an_answer_begins_with_are_learned(form: ChatFormat) -> None:
    # Its first line break would otherwise form one token with the header's.
    spoken = talk(message("user", "a"), message("assistant", "\nhello\n"))
    record = chat_record(spoken, form)
    assert learned(form, record) == ["\nhello\n<|im_end|>"]
    prompt = chat_prompt(dataclasses.replace(spoken, messages=spoken.messages[:1]), form)
    assert prompt.tolist() == record["tokens"][: len(prompt)].tolist()


CHARACTERS = st.sampled_from("ab \n<|é東🙂") | st.characters(exclude_categories=["Cs"], exclude_characters="\0")
TEXT = st.text(CHARACTERS, min_size=1)
CONTENT = st.lists(TEXT | st.sampled_from(CONTROL), min_size=1, max_size=4).map("".join).filter(str.strip)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=4), st.sampled_from(sorted(FORMS)))
def test_any_text_comes_back(turns: list[tuple[str, str]], name: str) -> None:
    form = FORMS[name]
    messages = [message(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]
    record = chat_record(talk(*messages), form)
    assert learned(form, record) == [f"{answer}<|im_end|>" for _, answer in turns]
    assert text_of(form, record["tokens"]) == form.template.text(messages)


def test_templates_that_rewrite_the_past_are_refused() -> None:
    forgetful = chat_format(FORGETFUL)
    two = talk(message("user", "a"), message("assistant", "b"), message("user", "c"), message("assistant", "d"))
    with pytest.raises(
        ValueError, match=r"messages\[1\]: .* once more messages follow .* '<think>.*corpus\.train_on=last"
    ):
        chat_record(two, forgetful)
    thought = "<think>\n\n</think>\n\n"
    assert learned(forgetful, chat_record(two, forgetful, train_on="last")) == [f"{thought}d<|im_end|>"]
    each = [chat_record(part, forgetful, train_on="last") for part in split_answers(two)]
    assert [learned(forgetful, record) for record in each] == [[f"{thought}{answer}<|im_end|>"] for answer in "bd"]


def test_generation_prompts_that_are_not_kept_are_refused() -> None:
    body, prompt = CHATML_TOOLS.rsplit("assistant", 1)
    form = chat_format(f"{body}bot{prompt}")
    with pytest.raises(ValueError, match=r"messages\[1\]: .* precedes it with the generation prompt .* 'bot"):
        chat_record(ORDER, form)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "could not learn to stop: .*hello"),
        ("{% for m in messages %}<|header|>{{ m.content }}\n{% endfor %}", "could not learn to stop"),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}<|eot|>{% endfor %}",
            "inside its {% generation %} block",
        ),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}<|eot|>{% endfor %}", "leaves this answer out"),
        (
            "{% for m in messages %}{{ m.content }}<|eot|>{% endfor %}{% generation %}{% endgeneration %}",
            "hold nothing",
        ),
        ("{{ raise_exception('no!') }}", "refuses the conversation: no!"),
    ],
)
def test_templates_that_teach_nothing_are_refused(source: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        chat_record(talk(message("user", "hi"), message("assistant", "hello")), chat_format(source))


def test_tool_calls_are_never_lost() -> None:
    deaf = chat_format(WITHOUT_CALLS)
    with pytest.raises(ValueError, match=r"leaves out tool calls.*tool_format=text"):
        chat_record(ORDER, deaf)
    # A template that only looks at the calls of messages without content.
    either = chat_format(HEADERS.replace("message.tool_calls", "(message.tool_calls if not message.content else [])"))
    chat_record(ORDER, either)
    with pytest.raises(ValueError, match="leaves out tool calls"):
        chat_record(talk(message("user", "a"), message("assistant", "b", tool_calls=[call("find")])), either)


def test_tool_calls_as_text() -> None:
    deaf = chat_format(WITHOUT_CALLS)
    spoken = talk(
        message("user", "a"),
        message("assistant", "Wait.", tool_calls=[call("find", q="é"), call("order")]),
        message("tool", "done"),
        message("assistant", "Done."),
    )
    assert learned(deaf, chat_record(spoken, deaf, tool_format="text")) == [
        'Wait.\n<tool_call>\n{"name": "find", "arguments": {"q": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "order", "arguments": {}}\n</tool_call><|eot|>',
        "Done.<|eot|>",
    ]


def test_tools_are_shown_or_refused() -> None:
    tools = [{"type": "function", "function": {"name": "find", "description": "Finds <|im_end|>."}}]
    spoken = talk(message("user", "a"), message("assistant", "b"), tools=tools)
    record = chat_record(spoken, CHATML)
    assert f"Tools:\n{json.dumps(tools[0])}<|im_end|>" in text_of(CHATML, record["tokens"])
    assert learned(CHATML, record) == ["b<|im_end|>"]
    with pytest.raises(ValueError, match="has tools, but the chat template doesn't show them"):
        chat_record(spoken, HEADED)


def test_templates_that_look_at_the_marked_text_are_refused() -> None:
    form = chat_format(HEADERS.replace("message.content | trim", "(message.content | length) ~ message.content"))
    assert learned(form, chat_record(talk(message("user", "a"), message("assistant", "b")), form)) == ["1b<|eot|>"]
    with pytest.raises(ValueError, match=r"depends on .* control tokens inside the messages"):
        chat_record(talk(message("user", "a<|eot|>"), message("assistant", "b")), form)


def test_a_header_that_no_generation_prompt_gives_is_the_models_to_write() -> None:
    form = chat_format("{% for m in messages %}<|header|>{{ m.content }}<|eot|>{% endfor %}")
    spoken = talk(message("user", "a"), message("assistant", "b"))
    assert text_of(form, chat_prompt(talk(message("user", "a")), form)) == "<|header|>a<|eot|>"
    assert learned(form, chat_record(spoken, form)) == ["<|header|>b<|eot|>"]


@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_without_an_answer_there_is_nothing_to_learn(train_on: Any) -> None:
    with pytest.raises(ValueError, match="no message of the assistant"):
        chat_record(talk(message("user", "hi")), CHATML, train_on=train_on)
    with pytest.raises(ValueError, match="no message of the assistant"):
        chat_record(talk(message("user", "hi"), message("assistant", "no", weight=0)), CHATML, train_on=train_on)


@pytest.mark.parametrize("option", ["train_on", "tool_format"])
def test_options_are_checked(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be one of .*, got 'some'"):
        chat_record(ORDER, CHATML, **{option: "some"})  # type: ignore[arg-type]


def test_prompts_end_where_the_answer_begins() -> None:
    prompt = chat_prompt(talk(message("user", "hi")), CHATML)
    assert text_of(CHATML, prompt) == (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_format_can_be_sent_to_another_process() -> None:
    expected = chat_record(ORDER, MARKED)  # fills the caches, which must not get in the way
    record = chat_record(ORDER, pickle.loads(pickle.dumps(MARKED)))
    assert record["tokens"].tolist() == expected["tokens"].tolist()
    assert record["loss_mask"].tolist() == expected["loss_mask"].tolist()


def taskmaster_shapes() -> list[dict[str, Any]]:
    """One conversation of each sequence of roles and keys."""
    rows = [json.loads(line) for line in text_data("taskmaster4.jsonl").read_text(encoding="utf-8").splitlines()]
    shapes = {tuple((m["role"], *sorted(m)) for m in row["messages"]): row for row in rows}
    assert len(shapes) >= 12
    return list(shapes.values())


def taskmaster_answers(row: dict[str, Any], *, call_format: str, join: str) -> list[str]:
    """What the assistant writes, straight from the data."""
    answers = []
    for said in row["messages"]:
        if said["role"] == "assistant":
            parts = [said["content"]]
            if "tool_call" in said:
                arguments = said["tool_call"]["arguments"]
                with contextlib.suppress(ValueError):
                    arguments = json.loads(arguments)
                function = {"name": said["tool_call"]["name"], "arguments": arguments}
                parts.append(call_format % json.dumps(function, ensure_ascii=False))
            answers.append(join.join(parts))
    return answers


@pytest.mark.parametrize(
    ("form", "call_format", "end"),
    [
        (CHATML, "\n<tool_call>\n%s\n</tool_call>", "<|im_end|>"),
        (MARKED, "\n<tool_call>\n%s\n</tool_call>", "<|im_end|>"),
        (HEADED, "[CALLS][%s]", "<|eot|>"),
    ],
    ids=["by renderings", "by marks", "headers"],
)
def test_every_message_shape_of_taskmaster(form: ChatFormat, call_format: str, end: str) -> None:
    for row in taskmaster_shapes():
        expected = [answer + end for answer in taskmaster_answers(row, call_format=call_format, join="")]
        assert learned(form, chat_record(conversation(row), form)) == expected
        assert learned(form, chat_record(conversation(row), form, train_on="last")) == expected[-1:]


def test_smollm2_on_every_message_shape_of_taskmaster() -> None:
    form = gguf_chat_format(smollm2_path())
    for row in taskmaster_shapes():
        spoken = conversation(row)
        if any("tool_calls" in said for said in spoken.messages):
            with pytest.raises(ValueError, match="leaves out tool calls"):
                chat_record(spoken, form)
        record = chat_record(spoken, form, tool_format="text")
        answers = taskmaster_answers(row, call_format="<tool_call>\n%s\n</tool_call>", join="")
        assert learned(form, record) == [f"{answer}<|im_end|>" for answer in answers]
        assert text_of(form, record["tokens"]).startswith(
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
        )
