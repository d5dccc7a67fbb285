"""XLA's persistent compile cache, and a count of what was compiled."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


def enable_compile_cache(path: str | Path) -> None:
    """Keeps compiled programs in a directory, however small and quick to compile they are.

    Call it before the first compilation: JAX opens the cache then, once. Of several processes only process 0 writes.
    """
    settings = {
        "jax_compilation_cache_dir": str(path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


@dataclasses.dataclass
class _Totals:
    programs: int = 0
    seconds: float = 0.0
    cache_hits: int = 0


@functools.cache
def _totals() -> _Totals:
    """Starts to listen, once in a process: JAX calls a listener for every event from then on."""
    totals = _Totals()

    def on_duration(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            totals.programs += 1
            totals.seconds += duration_secs

    def on_event(event: str, **_: str | int) -> None:
        if event == _CACHE_HIT:
            totals.cache_hits += 1

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.monitoring.register_event_listener(on_event)
    return totals


class CompileCounter:
    """Counts the compilations of this process since the counter was made or last reset.

    A program taken from the persistent cache counts as one too: in a steady loop neither may happen.

    >>> counter = CompileCounter()
    >>> _ = jax.jit(lambda x: x + 1.5).lower(jax.ShapeDtypeStruct((3,), "float32")).compile()
    >>> counter.programs
    1
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Starts again from zero."""
        self._start = dataclasses.replace(_totals())

    @property
    def programs(self) -> int:
        """Programs compiled or taken from the cache."""
        return _totals().programs - self._start.programs

    @property
    def cache_hits(self) -> int:
        """Those of them that were in the persistent cache."""
        return _totals().cache_hits - self._start.cache_hits

    @property
    def seconds(self) -> float:
        """Seconds spent on all of them."""
        return _totals().seconds - self._start.seconds
