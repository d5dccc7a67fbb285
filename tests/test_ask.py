"""The command that asks a model: what it prints and writes, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from absl.testing import flagsaver

from tests import test_answers
from tests.chat_formats import smollm2_path, write_chat_model
from train import ask

pytestmark = pytest.mark.usefixtures("parsed_flags")

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the"}]},
    {"system": "be kind", "prompt": "what?"},
    {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f"}}]},
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_chat_model(tmp_path / "model")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def asked(*argv: str, **given: Any) -> int:
    with flagsaver.flagsaver(**{"max_tokens": 4, "prompt": [] if "conversations" in given else ["a"], **given}):
        return ask.main(["train.ask", *argv])


def test_one_answer_is_printed_as_it_is_several_under_their_questions(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (answer.text for answer in test_answers.ask(model, "a", "what?", max_tokens=4))
    assert asked(model=str(model)) == 0
    assert capsys.readouterr() == (f"{first}\n", "cut after --max_tokens=4: the answer\n")
    assert asked(model=str(model), prompt=["a", "what?"]) == 0
    out, err = capsys.readouterr()
    assert out == f"> prompt 1: a\n{first}\n\n> prompt 2: what?\n{second}\n\n"
    assert err == "cut after --max_tokens=4: 2 of 2 answers\n"


def test_conversations_are_answered_into_a_file_line_by_line(model: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    given = {"model": str(model), "conversations": str(rows), "out": str(out), "batch_size": 2}
    assert asked(**given) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    user = {"role": "user", "content": "a"}
    assert [line["messages"] for line in lines] == [
        [user],
        [{"role": "system", "content": "be kind"}, {"role": "user", "content": "what?"}],
        [user],
    ]
    assert lines[0]["answer"] == test_answers.ask(model, "a", max_tokens=4)[0].text
    assert lines[0]["expected"] == {"role": "assistant", "content": "the"}
    assert lines[2]["tools"] == ROWS[2]["tools"]
    assert lines[2]["answer"] != lines[0]["answer"]  # the tools stand in the prompt
    assert (lines[0]["ended"], lines[0]["answer_tokens"]) == (False, 4)
    assert not lines[1].keys() & {"expected", "tools"}
    before = out.read_text()
    assert asked(**given) == 2
    assert out.read_text() == before


def test_bad_input_has_exit_code_2_and_asks_nothing(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"

    def refused(message: str, *argv: str, **given: Any) -> None:
        assert asked(*argv, **{"model": str(model), "out": str(out), **given}) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        assert message in captured.err
        assert not out.exists()

    refused("can't read", model=str(model / "no.gguf"))
    refused("unexpected arguments ['hello']", "hello")
    refused("prompt 1: 'prompt' is empty", prompt=[""])
    refused("by --prompt or by --conversations", prompt=[])
    refused("by --prompt or by --conversations", prompt=["hello"], conversations=str(rows))
    refused("there is no file", conversations="nowhere.jsonl")
    refused("the content of role 'system' is empty", system=" ")
    refused("give a directory of adapters", adapters=str(model / "nowhere"))
    refused("but the model's context is 512: shorten the prompt to 400 tokens", max_tokens=112, prompt=["x" * 480])
    refused("No such file or directory", out=str(tmp_path / "nowhere" / "answers.jsonl"))
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": "</s>"}))
    refused("generation_config.json': eos_token_id must be a token's id in")
    (model / "generation_config.json").unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    refused("no chat template")
    (model / "config.json").write_text('{"architectures": ["FooForCausalLM"], "model_type": "foo"}')
    refused("FooForCausalLM")


def test_answers_that_cannot_be_written_have_exit_code_1(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> Iterator[Any]:
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr(ask, "answers", full)
    assert asked(model=str(model), out=str(tmp_path / "answers.jsonl")) == 1
    assert "error: can't write all answers: [Errno 28] No space left" in capsys.readouterr().err


def test_bad_flags_have_exit_code_2() -> None:
    command = [sys.executable, "-m", "train.ask", "--prompt=hello"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    assert done.returncode == 2
    assert "error: flag --model" in done.stderr


def test_smollm2_knows_the_capital_of_france_and_its_context(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(smollm2_path())
    assert asked(model=model, prompt=["What is the capital of France?"], max_tokens=16) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"
    assert asked(model=model, max_tokens=8192) == 2
    assert "but the model's context is 8,192" in capsys.readouterr().err
