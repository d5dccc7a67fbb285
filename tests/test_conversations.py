"""The shapes of rows that are read as conversations, and one clear message for each that isn't."""

from __future__ import annotations

import json
from typing import Any

import pytest

from train.conversations import MAX_DEPTH, Columns, Conversation, conversation, split_answers

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "yo"}
FUNCTION = {"name": "find", "arguments": {"q": "tea"}}
CALL = {"type": "function", "function": FUNCTION}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def test_prompt_and_response() -> None:
    assert conversation({"prompt": "hi", "response": "yo", "id": 7}) == Conversation(messages=(USER, ASSISTANT))
    with_system = conversation({"system": "s", "prompt": "hi", "response": "yo"})
    assert with_system.messages == ({"role": "system", "content": "s"}, USER, ASSISTANT)
    assert conversation({"system": "", "prompt": "hi", "response": "yo"}).messages == (USER, ASSISTANT)


def test_columns_can_be_named_or_left_alone() -> None:
    columns = Columns(prompt="question", response="answer", system=None, tools=None)
    row = {"question": "hi", "answer": "yo", "system": "s", "tools": [TOOL]}
    assert conversation(row, columns) == Conversation(messages=(USER, ASSISTANT))
    chosen = {"prompt": "hi", "chosen": [USER, ASSISTANT], "rejected": [USER, USER]}
    assert conversation(chosen, Columns(messages="chosen")).messages == (USER, ASSISTANT)


def test_messages_win_over_prompt_and_response() -> None:
    row = {"messages": [USER, ASSISTANT], "prompt": "a", "response": "b", "chosen": [], "rejected": []}
    assert conversation(row).messages == (USER, ASSISTANT)


@pytest.mark.parametrize(
    "given",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": [FUNCTION]},
        {"tool_calls": [{"function": {"name": "find", "arguments": '{"q": "tea"}'}}]},
        {"tool_call": FUNCTION},
        {"tool_call": {"name": "find", "arguments": '{"q": "tea"}'}, "tool_calls": None},
        {"function_call": {"name": "find", "arguments": '{"q": "tea"}'}},
    ],
)
def test_tool_calls_come_in_one_form(given: dict[str, Any]) -> None:
    for content in ({"content": ""}, {"content": None}, {}):
        spoken = conversation({"messages": [USER, {"role": "assistant", **content, **given}]})
        assert spoken.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_call_ids_and_broken_arguments_are_kept() -> None:
    calls = [{"id": "a1", "function": {"name": "find", "arguments": '{"q": ""tea""}'}}, {"function": {"name": "now"}}]
    spoken = conversation({"messages": [{"role": "assistant", "content": "so", "tool_calls": calls}]})
    assert spoken.messages[0]["tool_calls"] == [
        {"type": "function", "id": "a1", "function": {"name": "find", "arguments": '{"q": ""tea""}'}},
        {"type": "function", "function": {"name": "now", "arguments": {}}},
    ]


def test_other_keys_stay_and_missing_ones_of_columnar_files_go() -> None:
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}], "name": "Ann"},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": None, "name": None},
            {"role": "tool", "content": "", "tool_call_id": "a1"},
        ],
        "tools": None,
    }
    assert conversation(row).messages == (
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "tool", "content": "", "tool_call_id": "a1"},
    )


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tools(tools: Any) -> None:
    assert conversation({"messages": [USER], "tools": tools}).tools == (TOOL,)
    assert conversation({"prompt": "hi", "response": "yo", "tools": tools}).tools == (TOOL,)


@pytest.mark.parametrize("tools", [[], "", "[]", None])
def test_no_tools(tools: Any) -> None:
    assert conversation({"messages": [USER], "tools": tools}).tools is None


def test_weights_name_answers_not_to_learn() -> None:
    messages = [USER, {**ASSISTANT, "weight": 0}, USER, {**ASSISTANT, "weight": 1}, ASSISTANT]
    spoken = conversation({"messages": messages})
    assert spoken.unweighted == {1}
    assert spoken.messages == (USER, ASSISTANT, USER, ASSISTANT, ASSISTANT)
    assert [len(part.messages) for part in split_answers(spoken)] == [4, 5]
    assert all(part.unweighted == {1} for part in split_answers(spoken))


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (["hi"], "want a JSON object, got a list"),
        ({}, "want 'messages', or 'prompt' and 'response'; found the keys .*rename them"),
        ({"question": "a", "answer": "b"}, r"found the keys \['answer', 'question'\]"),
        ({"prompt": "hi"}, "'response' is missing"),
        ({"prompt": "hi", "response": None}, "'response' is missing"),
        ({"response": "hi"}, "'prompt' is missing"),
        ({"prompt": "hi", "response": ""}, "'response' is empty"),
        ({"prompt": " \n", "response": "yo"}, "'prompt' is empty"),
        ({"prompt": 3, "response": "yo"}, "'prompt' must be a string, got a int: 3"),
        ({"prompt": [USER], "response": [ASSISTANT]}, "lists of messages belong into one column"),
        ({"prompt": "a\0b", "response": "yo"}, "'prompt' has a NUL at character 1"),
        ({"prompt": "hi", "response": "é\ud800"}, "'response' has half of a surrogate pair at character 1"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference pair .* say that 'chosen' is the column"),
        ({"messages": "hi"}, "'messages' must be a list of messages, got a str"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": [USER, "hi"]}, r"messages\[1\] must be an object .* got a str; parse it"),
        ({"messages": [{"content": "hi"}]}, r"messages\[0\] has no 'role' among its keys \['content'\]$"),
        ({"messages": [{"from": "human", "value": "hi"}]}, "rename 'from' to 'role' and 'value' to 'content'"),
        ({"messages": [{"role": "human", "content": "hi"}]}, "unknown role 'human'; known ones: system, developer"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "unknown role"),
        ({"messages": [{"role": "user"}]}, "content of role 'user' is empty"),
        (
            {"messages": [USER, {"role": "assistant", "content": "  "}]},
            r"messages\[1\]: the content of role",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "content must be a string, got a int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "text parts only"),
        ({"messages": [{"role": "user", "content": "a\0"}]}, r"messages\[0\]: content has a NUL"),
        ({"messages": [{"role": "user", "content": "a", "tool_call": FUNCTION}]}, "only the assistant calls tools"),
        ({"messages": [{**ASSISTANT, "tool_calls": {}}]}, "'tool_calls' must be the only calls, and a list"),
        ({"messages": [{**ASSISTANT, "tool_calls": [CALL], "tool_call": FUNCTION}]}, "must be the only calls"),
        ({"messages": [{**ASSISTANT, "tool_calls": ["find"]}]}, "want a tool call with a 'name'"),
        ({"messages": [{**ASSISTANT, "tool_calls": [{"function": {"name": ""}}]}]}, "want a tool call with a 'name'"),
        ({"messages": [{**ASSISTANT, "tool_call": {"name": "f", "arguments": "\ud800"}}]}, "half of a surrogate"),
        ({"messages": [{**ASSISTANT, "weight": 0.5}]}, "weight must be 0 or 1, .* got 0.5"),
        ({"messages": [{**USER, "weight": 0}]}, "0 on assistant messages only"),
        ({"messages": [{**USER, "extra": nested(MAX_DEPTH)}]}, f"nests deeper than {MAX_DEPTH} levels"),
        ({"messages": [{**USER, "extra": {1: 2}}]}, "key that is not a string"),
        ({"messages": [{**USER, "extra": b"x"}]}, "holds a bytes, which is not JSON"),
        ({"messages": [USER], "tools": "{"}, "'tools' is a string, but not JSON"),
        ({"messages": [USER], "tools": ["find"]}, "'tools' must be a list of tool schemas"),
        ({"messages": [USER], "tools": [{"name": nested(10**5)}]}, "'tools' nests deeper"),
    ],
)
def test_what_is_wrong_with_a_row(row: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        conversation(row)
