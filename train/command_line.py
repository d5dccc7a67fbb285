"""What all commands with absl flags do alike: errors in one line, exit codes that are honest."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import flags

EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT = 0, 1, 2


def fail(error: Exception, exit_code: int) -> int:
    """Says what went wrong on standard error; returns the exit code."""
    print(f"error: {error}", file=sys.stderr)
    return exit_code


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses the flags; ends the process with one line where they are wrong. For `absl.app.run`."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(fail(error, EXIT_BAD_INPUT))
