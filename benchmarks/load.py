"""A long stream under load: `python -m benchmarks.load` (minutes), `--quick` for a thousandth of it.

    stream    100 thousand and 10 million records through streaming and a row-packed layout, each in a process of its
              own: peak memory must not grow with the stream
    restore   from the state 10 million records in, in a fresh process: time to the next pack, and records read again
    cycles    1,000 times: save, through JSON, restore, go on: memory, handles and threads before and after
    several   iterators over one dataset, in turn: what they give, and what they leave behind

Random-access source, records of up to 512 tokens made when asked for, pack 64, lookahead 32, max_age 16.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from typing import Any

import grain
import numpy as np

import bcl_grain as bcl
from bcl_grain.planner_config import PlannerConfig
from bcl_grain.pool_state import cycle_records
from benchmarks.result import write_result

LENGTH = 512
PACK_SIZE, LOOKAHEAD = 64, 32
READ_IN_PLACE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
_TABLE = np.random.default_rng(0).lognormal(3.6, 0.9, 1 << 16).clip(1, LENGTH).astype(int)
_TOKENS = np.ones(LENGTH, np.int32)


class Source:
    """Records of log-normal length, the same at each index whenever it is asked for; counts what is read.

    Attributes:
        mark: Reads below this index are counted apart.
        reads: Reads so far.
        reads_below_mark: Those of them below `mark`.
    """

    def __init__(self, count: int, mark: int = 0) -> None:
        self._count = count
        self.mark = mark
        self.reads = self.reads_below_mark = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        self.reads_below_mark += index < self.mark
        return {"tokens": _TOKENS[: _TABLE[index * 2654435761 % len(_TABLE)]]}


def pipeline(source: Source) -> Any:
    """Returns what a job would iterate: streaming packs as chunks."""
    ds = grain.MapDataset.source(source).to_iter_dataset(READ_IN_PLACE)
    ds = ds.pipe(
        bcl.BatchCostLookaheadIterDataset,
        pack_size=PACK_SIZE,
        lookahead=LOOKAHEAD,
        policy="streaming",
        cost_fn=bcl.TransformerCost(1.0, 1 / 30_000),
    )
    return ds.map(bcl.RowPackedLayout(length=LENGTH, rows_per_chunk=2, heights=(1,)))


def stream(records: int, state_file: str) -> dict[str, float]:
    """Passes all records through, leaves a state from near the end, and tells of the process's memory."""
    iterator = iter(pipeline(Source(records)))
    packs = tokens = 0
    last = (records - 3 * PACK_SIZE * LOOKAHEAD // 2) // PACK_SIZE
    begin = time.perf_counter()
    for chunks in iterator:
        packs += 1
        tokens += sum(int((chunk["tokens_segment_ids"] > 0).sum()) for chunk in chunks)
        if packs == last:
            pathlib.Path(state_file).write_text(json.dumps(iterator.get_state()))
    seconds = time.perf_counter() - begin
    assert packs == records // PACK_SIZE
    return {
        "records": records,
        "tokens": tokens,
        "records_per_second": records / seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def restore(records: int, state_file: str) -> dict[str, float]:
    """Restores the state that `stream` left; returns what that took."""
    state = json.loads(pathlib.Path(state_file).read_text())
    source = Source(records, mark=state["read"])
    iterator = iter(pipeline(source))
    begin = time.perf_counter()
    iterator.set_state(state)
    reads_before_next = source.reads
    next(iterator)
    seconds = time.perf_counter() - begin
    config = PlannerConfig(pack_size=PACK_SIZE, lookahead=LOOKAHEAD, policy="streaming")
    return {
        "at_record": state["read"],
        "seconds_to_next_pack": seconds,
        "reads_before_next": reads_before_next,
        "records_read_again": source.reads_below_mark,
        "at_most": config.pool_records + config.max_age * cycle_records(config),
        "state_bytes": len(json.dumps(state)),
    }


def cycles(records: int, times: int) -> dict[str, Any]:
    """Saves and restores `times` times, each time some packs on; half of them into a new iterator."""
    dataset = pipeline(Source(records))
    expected = _checksums(iter(dataset), times)
    iterator = iter(dataset)
    for turn in range(times):
        state = json.loads(json.dumps(iterator.get_state()))
        if turn == times // 10:  # allocators have settled by then
            iterator.close()
            del iterator
            before = _held()
            iterator = iter(dataset)
        elif turn % 2:
            iterator.close()
            iterator = iter(dataset)
        iterator.set_state(state)
        assert _checksums(iterator, 1) == expected[turn : turn + 1]
    iterator.close()
    del iterator
    return {"times": times, "before": before, "after": _held()}


def several(records: int, count: int) -> dict[str, Any]:
    """Runs `count` iterators over one dataset in turn, with a prefetching thread each, and closes them."""
    plain = pipeline(Source(records))
    dataset = grain.experimental.ThreadPrefetchIterDataset(plain, prefetch_buffer_size=2)
    packs = records // PACK_SIZE
    expected = _checksums(iter(plain), packs)
    for round_number in range(3):
        if round_number == 1:
            before = _held()
        iterators = [iter(dataset) for _ in range(count)]
        got = [[_checksums(iterator, 1)[0] for iterator in iterators] for _ in range(packs)]
        assert got == [[checksum] * count for checksum in expected]
        for iterator in iterators:
            iterator.close()
        del iterators, iterator
    return {"iterators": count, "before": before, "after": _held()}


def _checksums(iterator: Any, packs: int) -> list[int]:
    """Returns a checksum of each of the next packs' shapes and segments."""
    result = []
    for _, chunks in zip(range(packs), iterator, strict=False):
        digest = 0
        for chunk in chunks:
            digest = zlib.crc32(np.ascontiguousarray(chunk["tokens_segment_ids"]).tobytes(), digest)
        result.append(digest)
    return result


def _held() -> dict[str, float]:
    """Returns what this process holds now, but for Grain's weak reference to every iterator that ever was."""
    gc.collect()
    weak = ("HashableWeakRef", "ReferenceType")
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "objects": sum(type(thing).__name__ not in weak for thing in gc.get_objects()),
        "handles": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def _in_process(part: str, *arguments: object) -> Any:
    """Runs one part in a process of its own, so that its memory is its own."""
    command = [sys.executable, "-m", "benchmarks.load", f"--part={part}", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def measure(*, records: int, small: int, times: int, count: int) -> dict[str, Any]:
    """Returns the figures of all parts."""
    with tempfile.TemporaryDirectory() as directory:
        state_file = os.path.join(directory, "state.json")
        streams = []
        for n in (small, records):
            streams.append(_in_process("stream", n, state_file))
            print(f"stream: {streams[-1]}", flush=True)
        figures = {
            "streams": streams,
            "peak_ratio": streams[1]["peak_mib"] / streams[0]["peak_mib"],
            "restore": _in_process("restore", records, state_file),
        }
    print(f"restore: {figures['restore']}", flush=True)
    figures["cycles"] = _in_process("cycles", small, times)
    figures["several"] = _in_process("several", small // 4, count)
    print(f"cycles: {figures['cycles']}\nseveral: {figures['several']}", flush=True)
    return figures


def main() -> None:
    """Runs everything and writes load.json, or runs one part and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, and no file")
    parser.add_argument("--part", choices=("stream", "restore", "cycles", "several"), help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    numbers = [int(value) if value.isdigit() else value for value in args.arguments]
    if args.part:
        parts: dict[str, Any] = {"stream": stream, "restore": restore, "cycles": cycles, "several": several}
        print(json.dumps(parts[args.part](*numbers)))
    elif args.quick:
        measure(records=40_000, small=10_000, times=40, count=3)
    else:
        write_result("load", measure(records=10_000_000, small=100_000, times=1000, count=8))


if __name__ == "__main__":
    main()
