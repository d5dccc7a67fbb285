"""Import this before `bcl_grain` where Grain may be missing: planning, layouts and costs need none of it.

A bare GPU image has JAX and its friends, but no Grain. A stand-in lets the package be imported; only pipelines fail.
"""

from __future__ import annotations

import importlib.util
import sys
import types


def _absent(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absence(name, (), {})


class _Absence(type):
    """A class that has whatever is asked of it, can be a base, and takes type arguments; its instances can nothing."""

    def __getattr__(cls, name: str) -> type:
        return _absent(name)

    def __getitem__(cls, item: object) -> type:
        return cls

    def __call__(cls, *args: object, **kwargs: object) -> object:
        return super().__call__()


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module without a spec, or one that was blocked
        return False


if not _is_installed("grain"):
    module = types.ModuleType("grain")
    module.__getattr__ = _absent  # type: ignore[method-assign]
    sys.modules["grain"] = module
