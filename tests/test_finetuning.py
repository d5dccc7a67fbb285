"""A pretrained model and conversations in, a model directory or adapters out: the whole command, on a tiny model."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from absl.testing import flagsaver

import train.main as command
from bcl_grain.memory import GIB
from tests.chat_formats import END_OF_TEXT, HEADERS, byte_level_tokenizer, write_chat_model
from tests.test_answers import ask
from tests.tiny_tuning import LORA, eval_losses, write_config, write_talk
from train.chat_corpus import open_chat_format
from train.memory import Setup, peak_bytes
from train.prepare import Prepared
from train.pretrained import open_pretrained
from train.programs import Programs
from train.run_directory import saved_identity
from train.samples import SAMPLES_FILE
from train.token_files import Say
from train.warm_up import warm_up

pytestmark = pytest.mark.usefixtures("parsed_flags")

_COMPILED: dict[Any, Programs] = {}


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the same model and layout share their programs."""

    def once(prepared: Prepared, say: Say) -> Programs:
        key = prepared.model, prepared.lay_out.layout.shapes, prepared.config.runtime.memory_gib
        if key not in _COMPILED:
            _COMPILED[key] = warm_up(prepared, say)
        return _COMPILED[key]

    monkeypatch.setattr(command, "warm_up", once)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_chat_model(tmp_path / "pretrained")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_talk(tmp_path / "talk.jsonl")


def run(tmp_path: Path, model: Path, data: Path, *assignments: str, lora: str = "None", **given: Any) -> int:
    config = write_config(tmp_path / "tune.py", model=model, data=data, lora=lora)
    with flagsaver.flagsaver(config=str(config), set=list(assignments), compile_cache="", **given):
        return command.main(["train.main"])


def test_a_model_directory_comes_out_that_has_the_losses_of_the_run(
    tmp_path: Path, model: Path, data: Path, capsys: Any
) -> None:
    assert run(tmp_path, model, data, run_dir=str(tmp_path / "first")) == 0
    listed = re.findall(r"^  (\S+/first/\S+): ", capsys.readouterr().out, re.MULTILINE)
    assert listed[:2] == [str(tmp_path / "first" / name) for name in ("model", SAMPLES_FILE)]
    assert all(Path(path).exists() for path in listed)
    first = eval_losses(tmp_path / "first")
    assert first[-1] < first[0] - 0.1
    exported = tmp_path / "first" / "model"
    assert {path.name for path in exported.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert run(tmp_path, exported, data, run_dir=str(tmp_path / "second")) == 0
    assert eval_losses(tmp_path / "second")[0] == pytest.approx(first[-1], abs=1e-6)


def test_adapters_come_out_that_have_the_losses_of_the_run(tmp_path: Path, model: Path, data: Path) -> None:
    assert run(tmp_path, model, data, lora=LORA, run_dir=str(tmp_path / "first")) == 0
    first = eval_losses(tmp_path / "first")
    assert first[-1] < first[0] - 0.05
    adapters = tmp_path / "first" / "adapters"
    assert {path.name for path in adapters.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    second = tmp_path / "second"
    assert run(tmp_path, model, data, f"adapters={adapters}", lora=LORA, run_dir=str(second)) == 0
    assert eval_losses(second)[0] == pytest.approx(first[-1], abs=1e-6)


def test_adapters_that_can_not_be_read_leave_nothing_behind(
    tmp_path: Path, model: Path, data: Path, capsys: Any
) -> None:
    assert run(tmp_path, model, data, "steps=2", lora=LORA, run_dir=str(tmp_path / "first")) == 0
    weights = tmp_path / "first" / "adapters" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    run_dir = tmp_path / "second"
    assert run(tmp_path, model, data, f"adapters={weights.parent}", lora=LORA, run_dir=str(run_dir)) == 2
    assert re.search(rf"^error: .*{weights}", capsys.readouterr().err, re.MULTILINE)
    assert not run_dir.exists()


@pytest.mark.parametrize("lora", ["None", LORA])
def test_a_run_that_was_cut_short_goes_on_bit_for_bit(tmp_path: Path, model: Path, data: Path, lora: str) -> None:
    """Cut after 4 of 6 steps: the last checkpoint and all that a longer run adds are taken away."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run_dir in (whole, cut):
        assert run(tmp_path, model, data, lora=lora, run_dir=str(run_dir)) == 0
    for path in sorted((cut / "checkpoints").glob("6*"), reverse=True):
        for file in sorted(path.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        path.rmdir()
    assert run(tmp_path, model, data, lora=lora, run_dir=str(cut), resume=True) == 0
    assert eval_losses(cut)[-1] == eval_losses(whole)[-1]


def test_samples_are_written_at_every_evaluation(tmp_path: Path, model: Path, data: Path) -> None:
    assert run(tmp_path, model, data, lora=LORA, run_dir=str(tmp_path / "run")) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / SAMPLES_FILE).read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (step, prompt) for step in (0, 4, 6) for prompt in ("hello", "what is it?")
    ]
    assert all(isinstance(line["answer"], str) for line in lines)


BROKEN = [
    '{"messages": [{"role": "user", "content": "hi"}]}',
    '{"messages": [',
    '{"prompt": "a", "response": ""}',
    '{"chosen": "a", "rejected": "b"}',
    '{"messages": [{"role": "user", "content": 7}, {"role": "assistant", "content": "x"}]}',
    '{"messages": [{"role": "assistant", "content": "a\\u0000b"}',
    '"' + "x" * 5_000_000 + '"',
    '{"prompt": "a\0", "response": "b"}',
]


def test_broken_rows_are_reported_together(tmp_path: Path, model: Path, data: Path, capsys: Any) -> None:
    data.write_text("\ufeff" + data.read_text().replace("\n", "\r\n") + "\n".join(BROKEN) + "\n", newline="")
    assert run(tmp_path, model, data, run_dir=str(tmp_path / "run")) == 2
    error = capsys.readouterr().err
    assert f"60 of {60 + len(BROKEN)} rows can be used" in error
    for line in range(61, 61 + len(BROKEN)):
        assert f"talk.jsonl, line {line}: " in error
    assert "set corpus.on_bad_row=skip to leave them out" in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()
    assert run(tmp_path, model, data, "corpus.on_bad_row=skip", "steps=2", run_dir=str(tmp_path / "run")) == 0
    assert f"60 of {60 + len(BROKEN)} rows can be used" in capsys.readouterr().out


def test_tokens_are_made_once_and_read_by_a_template_of_ones_own(
    tmp_path: Path, model: Path, data: Path, capsys: Any
) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.role + ': ' + m.content + '<|eot|>' }}{% endfor %}")
    checksums = []
    for number, assignments in enumerate([(), (), (f"corpus.chat_template={template}",)]):
        run_dir = tmp_path / f"run{number}"
        assert run(tmp_path, model, data, "steps=2", *assignments, run_dir=str(run_dir)) == 0
        assert ("talk.jsonl: from " in capsys.readouterr().out) == (number == 1)
        checksums.append(saved_identity(run_dir)["data"])
    assert checksums[0] == checksums[1] != checksums[2]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("pretrained=nowhere", "'nowhere' is not a model: give a Hugging Face directory"),
        ('corpus.chat_paths=["nowhere.jsonl"]', "there is no file 'nowhere.jsonl'"),
        ("corpus.chat_paths=[]", "set corpus.chat_paths"),
        ("corpus.chat_weights=[1.0, 2.0]", "want one of chat_weights"),
        ("corpus.train_on=user", "corpus.train_on=user"),
        ("corpus.chat_template=nowhere.jinja", "can't read the chat template 'nowhere.jinja'"),
        ("corpus.chat_columns.messages=talk", "want 'talk', or 'prompt' and 'response'; found the keys ['messages']"),
        ("corpus.max_tokens=8", "43 of 43 records have more than max_tokens 8: raise corpus.max_tokens"),
        ("runtime.memory_gib=0.001", "no row fits: train adapters alone"),
        ("runtime.memory_gib=-1.0", "memory_gib must be positive, got -1.0"),
        ("adapters=nowhere", "set model.lora as they were made"),
        ("corpus.path=pairs.jsonl", "drop path and tokenizer"),
    ],
)
def test_what_does_not_fit_is_refused(
    assignment: str, message: str, tmp_path: Path, model: Path, data: Path, capsys: Any
) -> None:
    assert run(tmp_path, model, data, assignment, run_dir=str(tmp_path / "run")) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_that_does_not_fit_trains_at_the_cap_that_is_named(
    tmp_path: Path, model: Path, data: Path, capsys: Any
) -> None:
    config = dataclasses.replace(open_pretrained(str(model)).config, remat=True)
    small, large = (peak_bytes(config, 1, length, Setup(platform="cpu")) / GIB for length in (128, 192))
    limit = f"runtime.memory_gib={(small + large) / 2 / 0.9}"
    settings = ["model.remat=True", "corpus.on_oversize=drop", limit]
    assert run(tmp_path, model, data, *settings, run_dir=str(tmp_path / "refused")) == 2
    # Rows of 192 were asked for, but all these records are short.
    (cap,) = re.findall(r"cap records at (\d+) tokens \(no training record is longer\)", capsys.readouterr().err)
    assert cap == "128"
    settings += [f"corpus.max_tokens={cap}", f"layout.length={cap}"]
    assert run(tmp_path, model, data, *settings, run_dir=str(tmp_path / "capped")) == 0
    assert eval_losses(tmp_path / "capped")


def test_two_starts_are_refused(tmp_path: Path, model: Path, data: Path, capsys: Any) -> None:
    assert run(tmp_path, model, data, run_dir=str(tmp_path / "run"), init=str(tmp_path)) == 2
    assert "--init from the parameters of another run: leave one out" in capsys.readouterr().err


def test_a_mixture_has_the_shares_asked_for(tmp_path: Path, model: Path, data: Path, capsys: Any) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(f'{{"prompt": "p{i}", "response": "r{i}"}}\n' for i in range(20)))
    paths = json.dumps([str(data), str(other)])
    arguments = (f"corpus.chat_paths={paths}", "corpus.chat_weights=[1.0, 1.0]", "steps=2")
    assert run(tmp_path, model, data, *arguments, run_dir=str(tmp_path / "run")) == 0
    output = capsys.readouterr().out
    assert "talk.jsonl is read 0." in output
    assert "other.jsonl is read" in output


def test_a_model_is_asked_with_and_without_adapters(tmp_path: Path, model: Path, data: Path) -> None:
    """The adapters' answer is the one that the run itself wrote down at its end."""
    assert run(tmp_path, model, data, lora=LORA, run_dir=str(tmp_path / "run")) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / SAMPLES_FILE).read_text().splitlines()]
    adapters = str(tmp_path / "run" / "adapters")
    for line in lines[-2:]:
        (answer,) = ask(model, line["prompt"], adapters=adapters)
        assert (answer.text, answer.ended) == (line["answer"], line["ended"])
    assert [answer.text for answer in ask(model, "hello", "what is it?")] == [line["answer"] for line in lines[:2]]


def end_tokens(directory: Path) -> set[int]:
    value = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    return {*value} if isinstance(value, list) else {value}


def test_a_server_of_what_comes_out_stops_where_the_samples_do_and_has_the_runs_template(
    tmp_path: Path, model: Path, data: Path
) -> None:
    ids = byte_level_tokenizer().backend.get_vocab()
    end, turn, eot = (ids[name] for name in (END_OF_TEXT, "<|im_end|>", "<|eot|>"))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 5], "temperature": 0.6}))
    template = tmp_path / "headers.jinja"
    template.write_text(HEADERS)
    own = f"corpus.chat_template={template}"
    assert run(tmp_path, model, data, "steps=2", run_dir=str(tmp_path / "a")) == 0
    assert end_tokens(tmp_path / "a/model") == {end, 5, turn}
    assert json.loads((tmp_path / "a/model/generation_config.json").read_text())["temperature"] == 0.6
    assert not (tmp_path / "a/model/chat_template.jinja").exists()
    assert run(tmp_path, model, data, "steps=2", own, run_dir=str(tmp_path / "b")) == 0
    assert end_tokens(tmp_path / "b/model") == {end, 5, eot}
    assert open_chat_format(str(tmp_path / "b/model")).template.source == HEADERS
    assert run(tmp_path, model, data, "steps=2", own, lora=LORA, run_dir=str(tmp_path / "c")) == 0
    lines = [json.loads(line) for line in (tmp_path / "c" / SAMPLES_FILE).read_text().splitlines()]
    answers = ask(model, "hello", "what is it?", adapters=str(tmp_path / "c/adapters"))
    assert [answer.text for answer in answers] == [line["answer"] for line in lines[-2:]]


def set_context(model: Path, tokens: int) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": tokens}))


def test_samples_beyond_the_context_are_refused_before_the_data_are_read(
    tmp_path: Path, model: Path, data: Path, capsys: Any
) -> None:
    set_context(model, 192)
    assert run(tmp_path, model, data, "runtime.sample_tokens=160", run_dir=str(tmp_path / "run")) == 2
    captured = capsys.readouterr()
    assert re.search(
        r"error: runtime.sample_prompts, 'hello': (\d+) tokens, \d+ with an answer of 160, but the model's context is "
        r"192: shorten the prompt to 32 tokens, or lower runtime.sample_tokens to \d+\n",
        captured.err,
    )
    assert "corpus:" not in captured.out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("context", [100, 191, 192])
def test_records_beyond_the_context_are_told_before_anything_is_compiled(
    context: int, tmp_path: Path, model: Path, data: Path, capsys: Any
) -> None:
    set_context(model, context)
    assert run(tmp_path, model, data, "steps=2", run_dir=str(tmp_path / "run")) == 0
    output = capsys.readouterr().out
    warnings = [line for line in output.splitlines() if line.startswith("warning: corpus.max_tokens")]
    assert len(warnings) == (context < 192)
    if context == 191:
        assert warnings == ["warning: corpus.max_tokens 192 is above the model's context of 191; no record is longer"]
    if context == 100:
        (longest,) = re.findall(r"^training: .*longest (\d+)", output, re.MULTILINE)
        assert re.search(
            rf"context of 100: \d+ of \d+ records are longer, the longest has {longest} tokens", warnings[0]
        )
        assert output.index("warning: ") < output.index("run directory: ")
