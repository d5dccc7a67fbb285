"""One line on a terminal that says how far a long run has come."""

from __future__ import annotations

import dataclasses
import time
from typing import TextIO


@dataclasses.dataclass
class ProgressLine:
    """Writes progress: over and over into one line of a terminal, else a line every few seconds.

    Attributes:
        stream: Where it goes, or None to be silent.
        seconds_between_lines: Where `stream` is no terminal.

    >>> import sys
    >>> line = ProgressLine(sys.stdout)
    >>> line.update("windowed", 1, 8)
    windowed: 12 %
    """

    stream: TextIO | None
    seconds_between_lines: float = 5.0
    _written: float = dataclasses.field(default=-1e9, init=False)
    _label: str = dataclasses.field(default="", init=False)

    def update(self, label: str, done: int, total: int) -> None:
        """Says that `done` of `total` parts of `label` are done. Each label's start and end are always written."""
        if self.stream is None:
            return
        terminal = self.stream.isatty()
        now = time.monotonic()
        pause = 0.1 if terminal else self.seconds_between_lines
        if done < total and label == self._label and now - self._written < pause:
            return
        self._written, self._label = now, label
        text = f"{label}: {100 * done // max(total, 1)} %"
        if terminal:
            end = "\n" if done >= total else ""
            self.stream.write(f"\r\x1b[K{text}{end}")
        else:
            self.stream.write(f"{text}\n")
        self.stream.flush()
