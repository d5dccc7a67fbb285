"""Starts a job of several processes on this machine: for development and tests.

    python -m train.launch --processes 2 --pin -- --config=configs/smoke.py

Each process gets `train.main`'s flags behind `--`, and its place in the job. If one ends badly, the others are ended
too and the launcher's exit code is not 0. On a cluster its own launcher takes this one's place: see docs/cluster.md.

Exit codes: those of `train.main` if all processes end with the same; else that of the process that failed first, or 1
if a signal ended it.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import IO

EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_STOPPED = 0, 1, 2, 75
GRACE_SECONDS = 15.0
"""How long the others may take to tell their own story once one process has failed, and again once they are told to
end; then they are killed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Does what the arguments say; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, passed = arguments[:end], arguments[end + 1 :]
    parser = argparse.ArgumentParser(prog="python -m train.launch", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, required=True, help="how many to start")
    parser.add_argument("--devices-per-process", type=int, help="split the CPU into so many devices; default: all GPUs")
    parser.add_argument("--pin", action="store_true", help="one core for each process, and no threads in its kernels")
    options = parser.parse_args(own)
    if not passed:
        parser.error("give the flags of train.main after --, for example -- --config=configs/smoke.py")
    cores = sorted(os.sched_getaffinity(0))
    if options.processes < 1:
        parser.error(f"--processes must be at least 1, got {options.processes}")
    if options.devices_per_process is not None and options.devices_per_process < 1:
        parser.error(f"--devices-per-process must be at least 1, got {options.devices_per_process}")
    if options.pin and options.processes > len(cores):
        parser.error(f"--pin needs a core for each of {options.processes} processes, there are {len(cores)}")
    address = f"127.0.0.1:{_free_port()}"
    place = [f"--coordinator_address={address}", f"--num_processes={options.processes}"]
    environment = _environment(options.devices_per_process, pinned=options.pin)
    environment["JAX_COORDINATOR_BIND_ADDRESS"] = address  # by default it would listen on all interfaces
    return run(
        [
            [sys.executable, "-m", "train.main", *place, f"--process_id={number}", *passed]
            for number in range(options.processes)
        ],
        environment,
        cores=cores[: options.processes] if options.pin else None,
    )


def run(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], *, cores: Sequence[int] | None = None
) -> int:
    """Runs one process for each command until all have ended; returns the exit code.

    Args:
        commands: Of the processes.
        environment: Of all of them.
        cores: The core of each process; None for any.
    """
    processes = [
        subprocess.Popen(
            command,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C reaches them through us, once
        )
        for command in commands
    ]
    for number, process in enumerate(processes):
        if cores is not None:
            os.sched_setaffinity(process.pid, {cores[number]})
    forwarding = [_forward(number, process) for number, process in enumerate(processes)]
    before = {number: signal.signal(number, _pass_on(processes)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _wait(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for thread in forwarding:
            thread.join()
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(devices: int | None, *, pinned: bool) -> dict[str, str]:
    flags = [os.environ.get("XLA_FLAGS", "")]
    if devices is not None:
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    if pinned:
        flags.append("--xla_cpu_multi_thread_eigen=false")
    environment = {**os.environ, "XLA_FLAGS": " ".join(flag for flag in flags if flag), "PYTHONUNBUFFERED": "1"}
    if devices is not None or pinned:
        environment["JAX_PLATFORMS"] = "cpu"
    return environment


def _forward(number: int, process: subprocess.Popen[str]) -> threading.Thread:
    """Prints a process's lines as they come, with its number in front."""

    def forward(stream: IO[str]) -> None:
        with stream:
            for line in stream:
                print(f"[{number}] {line}", end="" if line.endswith("\n") else "\n", flush=True)

    assert process.stdout is not None
    thread = threading.Thread(target=forward, args=(process.stdout,), daemon=True)
    thread.start()
    return thread


def _pass_on(processes: Sequence[subprocess.Popen[str]]) -> Callable[[int, FrameType | None], None]:
    def handler(number: int, frame: FrameType | None) -> None:
        del frame
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    return handler


def _wait(processes: Sequence[subprocess.Popen[str]]) -> int:
    """Waits for all; once one has failed, ends the others. Returns the exit code."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # their numbers in the order in which they end
    for number, process in enumerate(processes):
        threading.Thread(target=_note_end, args=(number, process, ended), daemon=True).start()
    failed: int | None = None
    last_words, signals = math.inf, [signal.SIGTERM, signal.SIGKILL]
    left = len(processes)
    while left:
        try:
            number = ended.get(timeout=0.1)
        except queue.Empty:
            if time.monotonic() > last_words and signals:
                _pass_on(processes)(signals.pop(0), None)
                last_words = time.monotonic() + GRACE_SECONDS
            continue
        left -= 1
        if failed is None and processes[number].returncode not in (EXIT_DONE, EXIT_STOPPED):
            failed = number
            _tell(failed, processes[failed], "the others are ended")
            last_words = time.monotonic() + GRACE_SECONDS
    if failed is None:
        return max(process.returncode for process in processes)
    code: int = processes[failed].returncode
    return code if code > 0 else EXIT_FAILED


def _note_end(number: int, process: subprocess.Popen[str], ended: queue.SimpleQueue[int]) -> None:
    process.wait()
    ended.put(number)


def _tell(number: int, process: subprocess.Popen[str], what: str) -> None:
    code = process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    print(f"error: process {number} of the job {how}: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
