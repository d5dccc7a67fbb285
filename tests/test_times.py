"""Where the time of a step goes: notes of ranks, the clock, the timeline."""

from __future__ import annotations

import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from train.clock import StepClock
from train.notes import Note, decode, encode, time_figures
from train.timeline import draw_timeline, segments


def test_times_of_a_step_add_up_over_ranks() -> None:
    notes = decode(
        np.concatenate(
            [
                encode(Note(timed_step=3, idle_seconds=0.1, local_seconds=1.0, step_seconds=2.5, data_seconds=0.1)),
                encode(Note(timed_step=3, idle_seconds=0.2, local_seconds=1.9, step_seconds=2.4)),
            ]
        )
    )
    figures, by_rank = time_figures(notes)
    assert figures["step_seconds"] == pytest.approx(2.5)
    assert by_rank["wait"] == pytest.approx([1.0, 0.0])
    assert figures["wait_share"] == pytest.approx(0.5 / 2.5)
    assert figures["update_seconds"] == pytest.approx(0.4)
    event = {"kind": "time", "step": 3, **figures, **by_rank}
    np.testing.assert_allclose(sum(segments([event]).values()), [[2.5, 2.5]], rtol=1e-6)


def test_a_clock_that_is_read_late_makes_no_time_negative() -> None:
    """The thread of one step may look at the clock after that of the next."""
    with StepClock(1) as clock:
        clock.restart()
        begin = time.monotonic()
        late = clock.watch(begin, jnp.zeros(1))
        late.times()
        clock._end_before += 1000.0
        times = clock.watch(begin, jnp.zeros(1)).times()
    assert (times.idle, times.local, times.step) == ([0.0], [0.0], 0.0)
    figures, by_rank = time_figures(decode(encode(Note(timed_step=1))))
    event = {"kind": "time", "step": 1, **figures, **by_rank}
    assert figures["wait_share"] == 0
    assert not draw_timeline(Path("nowhere.png"), [event])
