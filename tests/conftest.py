"""Settings of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
from absl import flags, logging
from absl.testing import flagsaver

# Every run on a developer's machine tries new examples; CI tries the same ones each time, so that its result depends
# on the change alone.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture
def parsed_flags() -> Iterator[None]:
    """Flags as a command has them after parsing; what a test sets is undone."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver():
        yield


@pytest.fixture
def silent_log() -> Iterator[None]:
    """For tests of thousands of streams that tell what they drop."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    yield
    logging.set_verbosity(before)
