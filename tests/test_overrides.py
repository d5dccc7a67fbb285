"""Config files and overrides: what they may say, and what is refused in words."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from tests.tiny_run import shapes_of, tiny_config
from train.config import TrainConfig
from train.lora import LoraConfig
from train.overrides import load_config, override
from train.rotary import RopeScaling

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "must define get_config"),
        ("def get_config(): return 3", "must return a TrainConfig, got int"),
        (
            "from train.config import *\ndef get_config(): return TrainConfig(stepz=3)",
            "unexpected keyword argument 'stepz'",
        ),
        ("from train.config import *\ndef get_config(): return TrainConfig(steps='3')", "steps must be an integer"),
        (
            "from train.config import *\ndef get_config(): return TrainConfig(optimizer=OptimizerConfig(b1='0'))",
            "optimizer: b1 must be float, got '0'",
        ),
    ],
)
def test_a_config_file_is_checked(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text(source)
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path / "c.py")
    with pytest.raises(ValueError, match="there is no config file"):
        load_config(tmp_path / "d.py")


def test_overrides_take_the_types_of_fields(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "7")
    changed = override(
        config,
        [
            "layout.heights=[1, 3]",
            "steps=None",
            "optimizer.b1=1",
            "corpus.path=7",
            "constant_denominator=True",
            "steps=4",
        ],
    )
    assert shapes_of(changed) == ((1, 64), (2, 64), (3, 64))
    assert (changed.steps, changed.optimizer.b1, changed.corpus.path, changed.constant_denominator) == (
        4,
        1.0,
        "7",
        True,
    )
    assert isinstance(changed.optimizer.b1, float)


@pytest.mark.parametrize(
    "assignments", list(itertools.permutations(["layout.length=32", "corpus.max_tokens=32", "steps=2"]))
)
def test_overrides_are_checked_together_in_any_order(assignments: tuple[str, ...], tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "corpus.jsonl")
    assert config.corpus.max_tokens == shapes_of(config)[-1][1] == 64
    changed = override(config, assignments)
    assert (changed.corpus.max_tokens, shapes_of(changed)[-1][1], changed.steps) == (32, 32, 2)
    with pytest.raises(ValueError, match=r"corpus\.max_tokens 64 is longer than the layout's longest row 32"):
        override(config, [a for a in assignments if not a.startswith("corpus")])


def test_of_two_assignments_the_later_wins() -> None:
    config = load_config(ROOT / "configs" / "smollm2_135m.py")
    assert override(config, ["steps=0", "steps=4"]).steps == 4
    assert override(config, ["model.lora.rank=4", "model.lora=None"]).model.lora is None
    with pytest.raises(ValueError, match="steps must be an integer of at least 1, got 0"):
        override(config, ["steps=4", "steps=0"])


def test_a_group_may_become_none_and_a_field_of_none_makes_a_group() -> None:
    config = load_config(ROOT / "configs" / "smollm2_135m.py")
    assert override(config, ["model.lora.alpha=8"]).model.lora == LoraConfig(rank=16, alpha=8.0)
    without = override(config, ["model.lora=None"])
    assert without == dataclasses.replace(config, model=dataclasses.replace(config.model, lora=None))
    assert override(without, ["model.lora.rank=8"]).model.lora == LoraConfig(rank=8)
    assert override(config, ["model.lora=None", "model.lora.rank=8"]).model.lora == LoraConfig(rank=8)
    with pytest.raises(ValueError, match=r"LoRA rank must be at least 1, got 0"):
        override(without, ["model.lora.rank=0"])
    scaled = override(config, ["model.rope_scaling.original_tokens=4096", "model.rope_scaling.factor=2"])
    assert scaled.model.rope_scaling == RopeScaling(factor=2.0, original_tokens=4096)
    with pytest.raises(ValueError, match="a RopeScaling needs factor too"):
        override(config, ["model.rope_scaling.original_tokens=4096"])


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("model.lora=8", r"'lora' is a group of fields: .* lora\.<field>=value, or lora=None for none"),
        ("corpus=None", r"'corpus' is a group of fields: set one of them, corpus\.<field>=value$"),
        ("model.lora.size=8", "LoraConfig has no field 'size', only rank, alpha, targets"),
        ("pretrained.lora=8", "'pretrained' has no fields"),
    ],
)
def test_overrides_that_name_no_field_are_refused(assignment: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        override(TrainConfig(), [assignment])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_configs_are_valid(path: Path) -> None:
    load_config(path)
    header = path.read_text().split('"""')[1]
    for word in ("Command:", "Hardware:", "Time:", "Result:"):
        assert word in header
