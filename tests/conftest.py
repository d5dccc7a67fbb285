"""Settings of all tests."""

from __future__ import annotations

import os

import hypothesis

# Every run on a developer's machine tries new examples; CI tries the same ones each time, so that its result depends
# on the change alone.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")
