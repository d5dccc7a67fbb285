"""From a config file and the command line to a `TrainConfig`."""

from __future__ import annotations

import ast
import dataclasses
import runpy
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from train.config import TrainConfig


def load_config(path: str | Path) -> TrainConfig:
    """Returns what the `get_config()` of a config file returns. The file is executed: it is code.

    Raises:
        ValueError: If there is no such file, it has no `get_config`, or names a field that does not exist.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"there is no config file {str(file)!r}: give a path such as configs/default.py")
    get_config = runpy.run_path(str(file)).get("get_config")
    if get_config is None:
        raise ValueError(f"config file {str(file)!r} must define get_config() -> TrainConfig")
    try:
        config = get_config()
    except TypeError as error:  # what a dataclass raises for a field that it does not have
        raise ValueError(f"config file {str(file)!r}: {error}") from error
    if not isinstance(config, TrainConfig):
        raise ValueError(f"get_config() of {str(file)!r} must return a TrainConfig, got {type(config).__name__}")
    _check_types(config, str(file))
    return config


def override(config: TrainConfig, assignments: Sequence[str]) -> TrainConfig:
    """Returns a config with fields replaced, each `name=value` or `part.name=value`, and checked anew.

    All are made before anything is checked, so that fields which belong together may come in any order. If one is
    assigned twice the later assignment wins. A group that may be None becomes one by `part=None`; a field of a group
    that is None makes one of it, with defaults for its other fields.

    Raises:
        ValueError: If an assignment is malformed, names no field, or its value has the wrong type; or if the fields
            don't go together.

    >>> override(TrainConfig(), ["balance.pack_size=8", "steps=3"]).balance.pack_size
    8
    >>> override(TrainConfig(), ["model.lora.rank=8", "pretrained=m", "corpus.chat_paths=['c']"]).model.lora.rank
    8
    """
    draft = _draft(config)
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator:
            raise ValueError(f"expected name=value, got {assignment!r}")
        _assign(draft, name.strip().split("."), text.strip(), assignment)
    changed: TrainConfig = _built(draft)
    return changed


def _check_types(value: Any, where: str) -> None:
    """Checks a dataclass and those in it: Python does not, and a string for a number would come to light late."""
    wanted = typing.get_type_hints(type(value))
    for field in dataclasses.fields(value):
        current = getattr(value, field.name)
        if dataclasses.is_dataclass(current):
            _check_types(current, f"{where}: {field.name}")
            continue
        try:
            _converted(current, wanted[field.name])
        except TypeError:
            raise ValueError(
                f"{where}: {field.name} must be {_type_name(wanted[field.name])}, got {current!r}"
            ) from None


def _type_name(wanted: Any) -> str:
    return wanted.__name__ if isinstance(wanted, type) else str(wanted).replace("typing.", "")


@dataclasses.dataclass
class _Draft:
    """A group of fields before it is checked.

    Attributes:
        kind: The dataclass that it will be.
        values: Fields that have a value; that of a group is a draft.
    """

    kind: Any
    values: dict[str, Any]


def _draft(value: Any) -> _Draft:
    """Returns the draft of a dataclass; of a kind of dataclass the draft of what has a default."""
    values = {}
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            current = getattr(value, field.name)
            values[field.name] = _draft(current) if dataclasses.is_dataclass(current) else current
    return _Draft(value if isinstance(value, type) else type(value), values)


def _assign(draft: _Draft, path: list[str], text: str, assignment: str) -> None:
    name, *rest = path
    names = [field.name for field in dataclasses.fields(draft.kind)]
    if name not in names:
        raise ValueError(f"{assignment!r}: {draft.kind.__name__} has no field {name!r}, only {', '.join(names)}")
    wanted = typing.get_type_hints(draft.kind)[name]
    members = typing.get_args(wanted) or (wanted,)
    group = next((member for member in members if dataclasses.is_dataclass(member)), None)
    if rest:
        if group is None:
            raise ValueError(f"{assignment!r}: {name!r} has no fields")
        if draft.values.get(name) is None:
            draft.values[name] = _draft(group)
        _assign(draft.values[name], rest, text, assignment)
    elif group is None:
        draft.values[name] = _parsed(text, wanted, assignment)
    elif text == "None" and type(None) in members:
        draft.values[name] = None
    else:
        none = f", or {name}=None for none" if type(None) in members else ""
        raise ValueError(f"{assignment!r}: {name!r} is a group of fields: set one of them, {name}.<field>=value{none}")


def _built(draft: _Draft) -> Any:
    """Returns the dataclass, its groups made first; each checks itself then."""
    names = [field.name for field in dataclasses.fields(draft.kind)]
    if missing := [name for name in names if name not in draft.values]:
        raise ValueError(f"a {draft.kind.__name__} needs {', '.join(missing)} too: set that as well")
    return draft.kind(**{n: _built(v) if isinstance(v, _Draft) else v for n, v in draft.values.items()})


def _parsed(text: str, wanted: Any, assignment: str) -> Any:
    """Returns `text` as a value of type `wanted`: a Python literal, or the text itself where that fits."""
    try:
        literal = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        literal = text
    for value in (literal, text):
        try:
            return _converted(value, wanted)
        except TypeError:
            continue
    hint = ""
    if typing.get_origin(wanted) is tuple:
        example = '["A", "B"]' if str in typing.get_args(wanted) else "[1, 2]"
        hint = f": a list is written as {example}, the whole flag in quotes against the shell"
    raise ValueError(f"{assignment!r}: expected {_type_name(wanted)}, got {text!r}{hint}")


def _converted(value: Any, wanted: Any) -> Any:
    """Returns `value` if it is a `wanted`, an int also as a float and a list as a tuple; else raises TypeError."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        for member in arguments:
            try:
                return _converted(value, member)
            except TypeError:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
    elif origin is tuple:
        if isinstance(value, tuple | list):
            kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
            if len(kinds) == len(value):
                return tuple(_converted(item, kind) for item, kind in zip(value, kinds, strict=True))
    elif wanted is float and type(value) is int:
        return float(value)
    elif type(value) is wanted:
        return value
    raise TypeError
