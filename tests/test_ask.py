"""The command that asks a model: what it prints, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from absl.testing import flagsaver

from tests.chat_formats import smollm2_path, write_chat_model
from train import ask
from train.chat import chat_prompt

pytestmark = pytest.mark.usefixtures("parsed_flags")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_chat_model(tmp_path / "model")


def asked(*argv: str, **given: Any) -> int:
    with flagsaver.flagsaver(**{"max_tokens": 4, "prompt": "hello", **given}):
        return ask.main(["train.ask", *argv])


def test_the_answer_is_printed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(model=str(model)) == 0
    assert capsys.readouterr().out == ask.answer(str(model), "hello", max_tokens=4) + "\n"


def test_a_system_message_is_part_of_the_prompt(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    made = chat_prompt

    def prompt(spoken: Any, form: Any) -> Any:
        ids = made(spoken, form)
        seen.append(form.tokenizer.backend.decode(list(ids), skip_special_tokens=False))
        return ids

    monkeypatch.setattr(ask, "chat_prompt", prompt)
    assert asked(model=str(model), system="be kind") == 0
    assert seen[0].index("be kind") < seen[0].index("hello")


def test_bad_input_has_one_line_and_exit_code_2(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(message: str, *argv: str, **given: Any) -> None:
        assert asked(*argv, **{"model": str(model), **given}) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert message in captured.err

    refused("can't read", model=str(model / "no.gguf"))
    refused("unexpected arguments ['hello']", "hello")
    refused("content of role 'user' is empty", prompt="")
    refused("give a directory of adapters", adapters=str(model / "nowhere"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    refused("chat template")
    (model / "config.json").write_text('{"architectures": ["FooForCausalLM"], "model_type": "foo"}')
    refused("FooForCausalLM")


def test_bad_flags_have_exit_code_2() -> None:
    command = [sys.executable, "-m", "train.ask", "--prompt=hello"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    assert done.returncode == 2
    assert "error: flag --model" in done.stderr


def test_smollm2_knows_the_capital_of_france(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(model=str(smollm2_path()), prompt="What is the capital of France?", max_tokens=16) == 0
    assert "Paris" in capsys.readouterr().out
