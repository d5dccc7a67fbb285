"""Every option of both command lines at zero, negative, huge, NaN, empty, nonsense: refused in words, or taken."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bcl_grain.cli import build_parser, main
from tests.tiny_run import tiny_config, write_corpus
from train.config import TrainConfig
from train.overrides import override
from train.prepare import prepare
from train.topology import Topology

TEXTS = (
    "0",
    "-1",
    "99999999999999999999",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "",
    " ",
    "x",
    "[1]",
    "None",
    "../../x",
)
QUICK = {
    "profile": ["--ranks=2", "--pack-size=2", "--lookahead=2"],
    "simulate": ["--ranks=2", "--pack-size=2", "--lookahead=2", "--steps=4", "--policies=windowed"],
    "plan": ["--model=smollm2-135m", "--memory-gib=80", "--pack-size=4"],
    "boundary": ["--model=smollm2-135m", "--memory-gib=80", "--pack-sizes=4"],
}
WRITES = {"--json", "--plot", "--prior-out"}  # any text names a file to write
DEAR = {("plan", "--seed"), ("plan", "--reserve"), ("plan", "--memory-gib"), ("boundary", "--seed")}


def command_options() -> Iterator[tuple[str, str]]:
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for command, parser in commands.choices.items():
        for action in parser._actions:
            for option in action.option_strings:
                if option.startswith("--") and action.nargs != 0 and option not in WRITES:
                    yield command, option


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("lengths") / "lengths.npy"
    np.save(path, np.random.default_rng(0).lognormal(4, 1, 400).astype(int) + 1)
    return str(path)


@pytest.mark.parametrize(("command", "option"), sorted(set(command_options())))
def test_bcl_grain_refuses_in_words(command: str, option: str, data: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused = 0
    for text in TEXTS[1:] if (command, option) in DEAR else TEXTS:
        if (command, option) in DEAR and text in ("99999999999999999999", "1.5"):
            continue
        try:
            code = main([command, data, *QUICK[command], f"{option}={text}", "--quiet"])
        except SystemExit as stop:  # argparse's way
            code = int(str(stop.code))
        errors = capsys.readouterr().err
        assert code in (0, 2), f"{option}={text}"
        if code == 2:
            refused += 1
            assert "error: " in errors.splitlines()[-1]
            assert "Traceback" not in errors
    assert refused


def fields(config: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from fields(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return tiny_config(write_corpus(tmp_path_factory.mktemp("corpus") / "pairs.jsonl"))


@pytest.mark.parametrize("name", list(fields(tiny_config(Path("x")))))
def test_a_training_setting_is_taken_or_refused_in_words(name: str, tiny: TrainConfig) -> None:
    for text in TEXTS:
        if (name, text) == ("corpus.path", "None"):
            continue  # the embedded corpus, whose records are too long for this layout
        message = None
        try:
            config = override(tiny, [f"{name}={text}"])
            prepare(config, Topology(process_index=0, process_count=1, local_devices=1), say=lambda line: None)
        except ValueError as error:
            message = str(error)
        if message is not None:
            assert len(message) > 20
            shown = {name.rpartition(".")[2], repr(text.strip()), text.strip() or name}
            assert any(part in message for part in shown), f"{text}: {message}"
