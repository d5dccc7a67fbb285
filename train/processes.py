"""Several processes in one job: joining it, agreeing before anything is computed, and ending together.

In multi-controller JAX nothing notices that processes run different programs: a global step whose local shapes differ
can end with a different loss on each, silently. So they compare what they are about to do, while it costs nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from train.run_directory import find_differences

T = TypeVar("T")

START_TIMEOUT_SECONDS = 30 * 60
"""How long the processes that are there wait at the start for the others to appear."""

HEARTBEAT_TIMEOUT_SECONDS = 30
"""After so long without a sign of life a process counts as dead, and JAX ends all others."""

PATIENCE_SECONDS = 4 * 60 * 60.0
"""How long processes that live wait for one that is busy: reading data, loading a model, compiling, writing."""

SHUTDOWN_TIMEOUT_SECONDS = 60
"""How long a process that is done waits for the others."""

_meetings = itertools.count()


class DisagreementError(ValueError):
    """Processes were started with different inputs; the message shows both values."""


def join(
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    detect: bool = False,
) -> None:
    """Makes this process part of a job, before JAX does anything else. Without arguments it stays alone.

    Args:
        coordinator_address: host:port of process 0, which listens there.
        num_processes: All processes.
        process_id: This one, from 0.
        detect: Ask the cluster (SLURM, Open MPI, Kubernetes, TPU) for what is not given.

    Raises:
        ValueError: If only some of the three are given, or the cluster is not recognised.
    """
    given = {"coordinator_address": coordinator_address, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given) and not detect:
        return
    if missing and not detect:
        raise ValueError(
            f"--{missing[0]} is missing: give coordinator_address, num_processes and process_id, or --distributed to "
            "ask the cluster for them"
        )
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(
            f"process_id must be in 0..{num_processes - 1} for {num_processes} processes, got {process_id}"
        )
    if coordinator_address is not None and not coordinator_address.rpartition(":")[2].isdigit():
        raise ValueError(f"coordinator_address must be host:port, got {coordinator_address!r}")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator_address,
            num_processes=num_processes,
            process_id=process_id,
            initialization_timeout=START_TIMEOUT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_SECONDS,
        )
    except ValueError as error:
        raise ValueError(
            f"no cluster was recognised ({error}): give --coordinator_address, --num_processes and --process_id"
        ) from error
    # JAX has installed a handler that only takes note of it: nothing could end a job that is still preparing.
    signal.signal(signal.SIGTERM, on_sigterm or signal.SIG_DFL)


def exchange(value: Any) -> list[Any]:
    """Returns the JSON-safe values of all processes, in their order. All call it together.

    Compiles small programs: not for the time after warm-up.

    Raises:
        RuntimeError: If not all have called it within `PATIENCE_SECONDS`, or one has died.
    """
    if jax.process_count() == 1:
        return [json.loads(json.dumps(value))]
    _meet("exchange")
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.ravel(_gather(np.array([text.size], np.int32)))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: text.size] = text
    rows = np.reshape(_gather(padded), (sizes.size, -1))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _gather(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    try:
        gathered: npt.NDArray[Any] = multihost_utils.process_allgather(array)
    except ValueError as error:  # as JAX calls a broken connection; here it means bad input
        raise RuntimeError(f"another process is gone: {error}") from error
    return gathered


def agree(values: Mapping[str, Any]) -> None:
    """Makes sure that all processes have the same JSON-safe values. All call it together.

    Raises:
        DisagreementError: On every process alike; it names each value that differs, and both.
    """
    first, *others = exchange(values)
    for process, theirs in enumerate(others, start=1):
        differences = find_differences(first, theirs)
        if differences:
            raise DisagreementError(
                "; ".join(
                    f"{name} is {here} on process 0 and {there} on process {process}"
                    for name, here, there in differences
                )
                + ": all processes need the same config, code and data"
            )


def from_main(make: Callable[[], T]) -> T:
    """Returns what `make` gives on process 0, a JSON-safe value, to every process. All call it together.

    Raises:
        ValueError: Everywhere, if `make` raises one.
    """
    value: T = exchange(together(lambda: make() if jax.process_index() == 0 else None))[0]
    return value


def together(make: Callable[[], T]) -> T:
    """Returns what `make` gives on this process. All call it together.

    Raises:
        ValueError: Everywhere, if `make` raises one anywhere.
    """
    mine: ValueError | None = None
    try:
        value = make()
    except ValueError as error:
        mine = error
    texts = exchange(None if mine is None else str(mine))
    if mine is not None:
        raise mine
    for process, text in enumerate(texts):
        if text is not None:
            raise ValueError(f"process {process}: {text}")
    return value


def wait_for_all(name: str) -> None:
    """Returns once all processes have called it.

    Raises:
        RuntimeError: If not all have within `PATIENCE_SECONDS`.
    """
    if jax.process_count() > 1:
        _meet(name)


def _meet(name: str) -> None:
    """Waits for all processes through JAX's coordinator.

    A collective of the devices would not do where one may be busy for long: on a CPU the first one waits 30 s for the
    others and any later one 30 minutes, on a GPU the first one 10 minutes.
    """
    meet = ocp.multihost.get_barrier_sync_fn()
    try:
        meet(key=f"bcl-grain {next(_meetings)}: {name}", timeout_ms=int(PATIENCE_SECONDS * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise RuntimeError(
            f"the processes did not meet within {PATIENCE_SECONDS:,g} s ({name}): one of them is stuck, or much slower "
            "than the others. See in their logs what they do, and whether all read their files equally fast"
        ) from error


@contextlib.contextmanager
def main_first(name: str) -> Iterator[None]:
    """Runs the block on process 0, and on the others once it is through there."""
    if jax.process_index() > 0:
        wait_for_all(name)
    yield
    if jax.process_index() == 0:
        wait_for_all(name)


def leave(exit_code: int) -> int:
    """Ends this process at once if others might wait for it: they must not stand in a collective until it times out.

    JAX notices within `HEARTBEAT_TIMEOUT_SECONDS` and ends them. An orderly end would wait for them instead.

    Returns:
        `exit_code`, if the process is alone.
    """
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code
