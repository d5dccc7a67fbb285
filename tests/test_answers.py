"""Answers of a model: what ends them, what is refused before anything is compiled, batches of questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chat_formats import (
    CHATML_MARKED,
    CHATML_TOOLS,
    END_OF_TEXT,
    FORGETFUL,
    HEADERS,
    byte_level_tokenizer,
    chat_format,
    write_chat_model,
)
from train.answers import Answer, OpenedModel, Prompts, answers, end_ids, open_model, read_questions
from train.chat import end_mark
from train.compiling import CompileCounter
from train.jsonl import index_lines

CONTEXT = 512
TEXTS = ["what is it?", "the " * 40, "the the", "a", "tell me"]


def ask(
    model: Path, *texts: str, adapters: str | None = None, max_tokens: int = 8, batch_size: int = 8
) -> list[Answer]:
    """Returns a model's answers to prompts."""
    opened = open_model(str(model), adapters=adapters)
    questions = read_questions(Prompts(texts), opened, new_tokens=max_tokens)
    prompts = [question.ids for question in questions]
    return list(answers(opened, opened.params(), prompts, new_tokens=max_tokens, batch_size=batch_size))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def opened(model: Path) -> OpenedModel:
    return open_model(str(model))


def token(text: str) -> int:
    token_id = byte_level_tokenizer().backend.token_to_id(text)
    assert token_id is not None
    return token_id


@pytest.mark.parametrize(
    ("source", "mark"),
    [
        (CHATML_TOOLS, "<|im_end|>"),
        (CHATML_MARKED, "<|im_end|>"),
        (FORGETFUL, "<|im_end|>"),
        (HEADERS, "<|eot|>"),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + eos_token + '\n' }}{% endfor %}", END_OF_TEXT),
    ],
)
def test_the_end_mark_is_what_the_template_writes_after_an_answer(source: str, mark: str) -> None:
    assert end_mark(chat_format(source)) == token(mark)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
        "{{ raise_exception('only in Latin') }}",
        "{{ messages[0].content }}",
    ],
)
def test_where_the_end_mark_cannot_be_told_there_is_none(source: str) -> None:
    assert end_mark(chat_format(source)) is None


def test_an_answer_ends_at_the_tokenizers_the_files_and_the_templates_tokens(model: Path, opened: OpenedModel) -> None:
    assert {*end_ids(opened.pretrained, opened.chat_format)} == {token(END_OF_TEXT), token("<|im_end|>")}


@pytest.fixture(scope="module")
def written(model: Path) -> list[Answer]:
    """The answers to `TEXTS` by two programs, for prompts of up to 128 and 64 tokens; the last batch is not full."""
    found = ask(model, *TEXTS, batch_size=3)
    assert len({answer.text for answer in found}) == len(TEXTS)
    assert [(answer.ended, answer.tokens == 8) for answer in found].count((True, False)) == 1
    return found


def test_batches_answer_in_order_what_each_question_would_get_alone(model: Path, written: list[Answer]) -> None:
    assert [ask(model, text)[0] for text in TEXTS[1:3]] == written[1:3]


@pytest.mark.parametrize("as_list", [False, True])
def test_an_answer_stops_where_generation_config_says(as_list: bool, tmp_path: Path, written: list[Answer]) -> None:
    """A token that the model writes in the middle becomes an end token: the answer is the same up to there."""
    text = written[0].text
    assert not written[0].ended
    assert text.index("/") == text.index("\ufffd") + 1 == len(" the") + 1  # three tokens
    stop = token("/")
    model = write_chat_model(tmp_path)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, stop] if as_list else stop}))
    assert ask(model, TEXTS[0]) == [Answer(text=text[: text.index("/") + 1], ended=True, tokens=3)]


def test_what_does_not_fit_the_context_is_refused_before_anything_is_compiled(opened: OpenedModel) -> None:
    (question,) = read_questions(Prompts(["hello"]), opened, new_tokens=1)
    room = CONTEXT - len(question.ids)
    counter = CompileCounter()
    assert read_questions(Prompts(["hello"]), opened, new_tokens=room)
    message = (
        rf"prompt 1: {len(question.ids)} tokens, 513 with an answer of {room + 1}, but the model's context is 512: .* "
        rf"lower --max_tokens to {room}$"
    )
    with pytest.raises(ValueError, match=message):
        read_questions(Prompts(["hello"]), opened, new_tokens=room + 1)
    with pytest.raises(ValueError, match=r"shorten the prompt to 504 tokens$"):
        read_questions(Prompts(["x" * CONTEXT]), opened, new_tokens=8)
    assert counter.programs == 0


def test_rows_that_cannot_be_asked_are_named_together(opened: OpenedModel, tmp_path: Path) -> None:
    rows = [
        {"prompt": "hello"},
        {"messages": [{"role": "assistant", "content": "hello"}]},
        {"messages": [{"role": "user", "content": "x" * 600}]},
        {"prompt": ""},
        {"response": "hello"},
    ]
    file = tmp_path / "talk.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    with pytest.raises(ValueError, match="1 of 6 rows can be used") as caught:
        read_questions(index_lines(file), opened, new_tokens=8)
    message = str(caught.value)
    for line, part in enumerate(("nothing precedes", "context is 512", "is empty", "'prompt' is missing", "JSON"), 2):
        assert f"talk.jsonl, line {line}: " in message
        assert part in message
    assert "line 1:" not in message


def test_the_answer_at_the_end_of_a_row_is_left_off_and_kept_for_comparison(
    opened: OpenedModel, tmp_path: Path
) -> None:
    user, answer = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "the"}
    system = {"role": "system", "content": "be kind"}
    rows = [
        {"messages": [user, answer, user, answer]},
        {"messages": [user, answer, user]},
        {"system": "be terse", "prompt": "hello", "response": "the"},
    ]
    file = tmp_path / "talk.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = read_questions(index_lines(file), opened, new_tokens=8, system="be kind")
    asked = [list(question.spoken.messages) for question in questions]
    assert asked == [[system, user, answer, user]] * 2 + [[{"role": "system", "content": "be terse"}, user]]
    assert [question.expected for question in questions] == [answer, None, answer]
    text = opened.chat_format.template.text(asked[2], add_generation_prompt=True)
    assert opened.chat_format.tokenizer.backend.decode(questions[2].ids.tolist(), skip_special_tokens=False) == text
