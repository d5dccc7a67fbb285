"""Rows of a data set as conversations: which shapes are read, and what is wrong with the others.

Two shapes. A prompt and its response, with an optional system prompt:

    {"system": "Be terse.", "prompt": "2 + 2?", "response": "4"}

Messages, with an optional list of tools, as chat APIs and Hugging Face's templates write them:

    {"messages": [{"role": "user", "content": "one latte"},
                  {"role": "assistant", "content": "", "tool_calls": [
                      {"type": "function", "function": {"name": "order", "arguments": {"item": "latte"}}}]},
                  {"role": "tool", "content": "done"},
                  {"role": "assistant", "content": "It is ordered."}],
     "tools": [...]}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]
Row = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_DEPTH = 64
"""How deep lists and objects may nest. Tool schemas take about ten levels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns of a row to read; None for one to leave alone.

    `messages` wins where a row has both shapes.
    """

    messages: str | None = "messages"
    tools: str | None = "tools"
    system: str | None = "system"
    prompt: str | None = "prompt"
    response: str | None = "response"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """What was said, in the form that chat templates expect.

    Attributes:
        messages: Each with "role" and "content", a string; "tool_calls" only where there are any, their arguments
            parsed; further keys as they came.
        tools: JSON schemas of the tools, or None.
        unweighted: Indices of assistant messages that the data says not to learn from ("weight": 0).
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    unweighted: frozenset[int] = frozenset()


DEFAULT_COLUMNS = Columns()


def conversation(row: Row, columns: Columns = DEFAULT_COLUMNS) -> Conversation:
    """Returns a row as a conversation.

    A value of None is no value: columnar formats write it where a key is missing.

    Raises:
        ValueError: Saying what is wrong with the row, and the remedy.

    >>> conversation({"prompt": "2 + 2?", "response": "4"}).messages
    ({'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '4'})
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"want a JSON object, got a {type(row).__name__}: {row!r:.60}")
    given = {key: value for key, value in row.items() if value is not None}
    if columns.messages is not None and columns.messages in given:
        return _from_messages(given, columns.messages, columns.tools)
    if columns.prompt in given and columns.response in given:
        return _from_pair(given, columns)
    raise ValueError(_no_shape(given, columns))


def question(row: Row, columns: Columns = DEFAULT_COLUMNS) -> tuple[Conversation, Message | None]:
    """Returns what a row asks, and the answer that it has itself: the assistant's message at its end, if there is one.

    A prompt without a response is a question, too.

    Raises:
        ValueError: As `conversation`; or if nothing precedes the answer.

    >>> spoken, answer = question({"prompt": "2 + 2?", "response": "4"})
    >>> spoken.messages, answer["content"]
    (({'role': 'user', 'content': '2 + 2?'},), '4')
    """
    given = {key for key, value in row.items() if value is not None} if isinstance(row, Mapping) else set()
    if columns.prompt in given and not given & {columns.messages, columns.response}:
        return _from_pair({key: row[key] for key in given}, columns), None
    spoken = conversation(row, columns)
    *before, last = spoken.messages
    if last["role"] != "assistant":
        return spoken, None
    if not before:
        raise ValueError("nothing precedes the assistant's answer: there is no question; remove the record")
    return dataclasses.replace(spoken, messages=tuple(before), unweighted=frozenset()), last


def answers_to_learn(spoken: Conversation) -> list[int]:
    """Returns the indices of the assistant's messages that count."""
    return [
        index
        for index, message in enumerate(spoken.messages)
        if message["role"] == "assistant" and index not in spoken.unweighted
    ]


def split_answers(spoken: Conversation) -> list[Conversation]:
    """Returns the beginnings of a conversation that end with an answer to learn, one for each such answer.

    For templates that write an answer differently once more messages follow (Qwen3 drops its thinking): each answer
    is then learned from the text that the model itself sees and writes. The price: earlier messages are repeated.
    """
    return [dataclasses.replace(spoken, messages=spoken.messages[: index + 1]) for index in answers_to_learn(spoken)]


def _from_pair(row: Row, columns: Columns) -> Conversation:
    names = (("system", columns.system), ("user", columns.prompt), ("assistant", columns.response))
    messages: list[Message] = []
    for role, column in names:
        if column is None or column not in row:
            continue
        text = row[column]
        if not isinstance(text, str):
            hint = "; lists of messages belong into one column, 'messages'" if isinstance(text, list) else ""
            raise ValueError(f"{column!r} must be a string, got a {type(text).__name__}: {text!r:.60}{hint}")
        _check_text(text, repr(column))
        if text.strip():
            messages.append({"role": role, "content": text})
        elif role != "system":
            raise ValueError(f"{column!r} is empty; fill or remove the record")
    return Conversation(messages=tuple(messages), tools=_tools(row, columns.tools))


def _from_messages(row: Row, column: str, tools_column: str | None) -> Conversation:
    value = row[column]
    if not isinstance(value, list):
        raise ValueError(f"{column!r} must be a list of messages, got a {type(value).__name__}: {value!r:.60}")
    if not value:
        raise ValueError(f"{column!r} is empty; fill or remove the record")
    messages = []
    unweighted = set()
    for index, given in enumerate(value):
        where = f"{column}[{index}]"
        message = _message(given, where)
        weight = message.pop("weight", 1)
        if weight not in (0, 1) or (weight == 0 and message["role"] != "assistant"):
            raise ValueError(f"{where}: weight must be 0 or 1, and 0 on assistant messages only, got {weight!r}")
        if weight == 0:
            unweighted.add(index)
        messages.append(message)
    return Conversation(messages=tuple(messages), tools=_tools(row, tools_column), unweighted=frozenset(unweighted))


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, Mapping):
        hint = "; parse it first" if isinstance(given, str) else ""
        raise ValueError(f"{where} must be an object with 'role' and 'content', got a {type(given).__name__}{hint}")
    message = {key: value for key, value in given.items() if value is not None}
    if "role" not in message:
        hint = ": rename 'from' to 'role' and 'value' to 'content'" if "from" in message else ""
        raise ValueError(f"{where} has no 'role' among its keys {sorted(message)}{hint}")
    role = message["role"]
    if role not in ROLES:
        raise ValueError(f"{where}: unknown role {role!r:.60}; known ones: {', '.join(ROLES)}")
    calls = _tool_calls(message, where)
    if calls and role != "assistant":
        raise ValueError(f"{where}: only the assistant calls tools, but the role is {role!r}")
    content = _content(message.get("content", ""), where)
    if not content.strip() and not calls and role != "tool" and not message.get("reasoning_content"):
        raise ValueError(f"{where}: the content of role {role!r} is empty; fill or remove the message")
    for key in ("tool_call", "tool_calls", "function_call"):
        message.pop(key, None)
    _check_json(message, where)
    return {**message, "content": content, **({"tool_calls": calls} if calls else {})}


def _content(content: Any, where: str) -> str:
    """Returns a message's text. APIs also write it in parts; parts that are not text can't be learned here."""
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        if len(texts) != len(content):
            raise ValueError(f"{where}: want content of text parts only, got {content!r:.60}")
        content = "".join(texts)
    if not isinstance(content, str):
        raise ValueError(f"{where}: content must be a string, got a {type(content).__name__}: {content!r:.60}")
    _check_text(content, f"{where}: content")
    return content


def _tool_calls(message: Message, where: str) -> list[dict[str, Any]]:
    """Returns the calls in the one form that templates know; data also has them singly, or without the envelope."""
    singles = [message[key] for key in ("tool_call", "function_call") if key in message]
    given = message.get("tool_calls", singles)
    if not isinstance(given, list) or (singles and given is not singles):
        raise ValueError(f"{where}: 'tool_calls' must be the only calls, and a list, got {given!r:.60}")
    calls = []
    for call in given:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"{where}: want a tool call with a 'name' and 'arguments', got {call!r:.60}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        normal: dict[str, Any] = {"type": "function"}
        if call.get("id") is not None:
            normal["id"] = call["id"]
        normal["function"] = {"name": function["name"], "arguments": {} if arguments is None else arguments}
        _check_json(normal, f"{where}: tool call")
        calls.append(normal)
    return calls


def _parsed(arguments: str) -> Any:
    """Returns arguments as an object, or the text itself if it isn't one: models also write calls that don't parse."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _tools(row: Row, column: str | None) -> tuple[dict[str, Any], ...] | None:
    if column is None or column not in row:
        return None
    tools = row[column]
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else []
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{column!r} is a string, but not JSON ({error}); repair it") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{column!r} must be a list of tool schemas, got {tools!r:.60}")
    _check_json(tools, repr(column))
    return tuple(tools) or None


def _check_json(value: Any, where: str) -> None:
    """Raises ValueError unless `value` is JSON of bounded depth whose texts are valid. Iterative: it may be deep."""
    todo: list[tuple[Any, int]] = [(value, 1)]
    while todo:
        item, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"{where} nests deeper than {MAX_DEPTH} levels")
        if isinstance(item, str):
            _check_text(item, where)
        elif isinstance(item, Mapping):
            if not all(isinstance(key, str) for key in item):
                raise ValueError(f"{where} has a key that is not a string: {sorted(map(repr, item))}")
            todo += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple):
            todo += [(part, depth + 1) for part in item]
        elif not isinstance(item, int | float | None):
            raise ValueError(f"{where} holds a {type(item).__name__}, which is not JSON: {item!r:.60}")


def _check_text(text: str, where: str) -> None:
    if "\0" in text:
        raise ValueError(f"{where} has a NUL at character {text.index(chr(0))}; the file is damaged: repair the text")
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has half of a surrogate pair at character {error.start}; repair the text") from error


def _no_shape(row: Row, columns: Columns) -> str:
    found = sorted(map(str, row))
    if "chosen" in row and "rejected" in row:
        return (
            "a preference pair ('chosen' and 'rejected'), but this is supervised fine-tuning: to learn the chosen "
            "answers, say that 'chosen' is the column of messages, or of responses beside a 'prompt'"
        )
    wanted = f"want {columns.messages!r}, or {columns.prompt!r} and {columns.response!r}; found the keys {found}"
    if columns.prompt in row or columns.response in row:
        missing = columns.response if columns.prompt in row else columns.prompt
        return f"{missing!r} is missing: {wanted}; fill the record, or say which columns to read"
    return f"{wanted}; rename them, or say which columns to read"
