"""Stopping a run from outside without losing a step."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Remembers the first SIGTERM or SIGINT; a second one has its usual effect."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handles both signals inside the block."""
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def on_signal(number: int, frame: FrameType | None) -> None:
            del frame
            self.signal_name = signal.Signals(number).name
            for other, handler in before.items():
                signal.signal(other, handler)

        for number in before:
            signal.signal(number, on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
