"""Checks of arguments: what is wrong with a value is said at once, with its name, the value and what it must be."""

from __future__ import annotations

import math
import operator
from typing import Any


def checked_integer(name: str, value: object, least: int) -> int:
    """Returns `value` as a Python int: states are JSON, which NumPy's integers are not.

    Raises:
        ValueError: If it is no integer, or below `least`.

    >>> checked_integer("rows", 2.5, 1)
    Traceback (most recent call last):
    ...
    ValueError: rows must be an integer of at least 1, got 2.5
    """
    try:
        if isinstance(value, bool) or operator.index(value) < least:  # type: ignore[arg-type]
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}") from None


def checked_number(name: str, value: Any, *, least: float | None = None, above: float | None = None) -> float:
    """Returns `value` as a float.

    Raises:
        ValueError: If it is no finite number, below `least`, or not above `above`.

    >>> checked_number("margin", float("nan"), least=0)
    Traceback (most recent call last):
    ...
    ValueError: margin must be finite and at least 0, got nan
    """
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        number = float(value)
        fits = math.isfinite(number) and (least is None or number >= least) and (above is None or number > above)
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        bound = "positive and finite" if above == 0 else "finite"
        bound += f" and at least {least}" if least is not None else ""
        raise ValueError(f"{name} must be {bound}, got {value!r}") from None
    return number


def check_function(name: str, value: object) -> None:
    """Raises ValueError unless `value` can be called."""
    if not callable(value):
        raise ValueError(f"{name} must be callable, got {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
