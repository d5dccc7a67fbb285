"""How long each local device computes in a step, told without holding up the host.

The host runs ahead of the devices, so its own clock says nothing. Threads wait for what a device gives before it joins
the others, and for what all give together, and look at the clock.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The times of one step on the local devices, seconds.

    Attributes:
        idle: By device: from the end of the step before until it had something to do.
        local: By device: that it then computed by itself; all of the step, if that is one program.
        step: From the end of the step before to its own.
    """

    idle: list[float]
    local: list[float]
    step: float


class StepClock:
    """Times the steps of the local devices; steps are watched and read in order.

    Args:
        num_devices: Local devices.
    """

    def __init__(self, num_devices: int) -> None:
        self._threads = concurrent.futures.ThreadPoolExecutor(num_devices + 1, thread_name_prefix="step-clock")
        self._num_devices = num_devices
        self._local: list[concurrent.futures.Future[float]] = []
        self._end_before = time.monotonic()

    def restart(self) -> None:
        """Lets the next step begin now: what came before it was none."""
        self._end_before = time.monotonic()

    def dispatched(self, accumulators: Sequence[Any]) -> None:
        """Takes what the devices give by themselves, in the moment in which it was dispatched; see `train_step`."""
        self._local = [self._threads.submit(_ready_at, accumulator) for accumulator in accumulators]

    def watch(self, begin: float, result: Any) -> Watch:
        """Returns a step that is under way.

        Args:
            begin: When the host began to dispatch it, by `time.monotonic()`.
            result: What the devices give together.
        """
        end = self._threads.submit(_ready_at, result)
        local, self._local = self._local or [end] * self._num_devices, []
        return Watch(self, begin, local, end)

    def __enter__(self) -> StepClock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=kind is None, cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class Watch:
    """A step under way."""

    clock: StepClock
    begin: float
    local: Sequence[concurrent.futures.Future[float]]
    end: concurrent.futures.Future[float]

    def times(self) -> StepTimes:
        """Waits for the step's end, and returns its times."""
        before = self.clock._end_before
        end = max(self.end.result(), before)  # a thread may look at the clock late, after the next step's thread
        start = max(before, self.begin)
        self.clock._end_before = end
        ready = [min(future.result(), end) for future in self.local]
        return StepTimes(
            idle=[start - before] * len(ready), local=[max(0.0, at - start) for at in ready], step=end - before
        )


def _ready_at(tree: Any) -> float:
    jax.block_until_ready(tree)  # type: ignore[no-untyped-call]
    return time.monotonic()
