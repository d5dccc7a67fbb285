"""The transformation among Grain's own: repeated, mixed, prefetched by threads and by processes, checkpointed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import pytest
from absl import flags

from tests.pipelines import DIRECT, Numbers, chain, ids, pipeline, through_json
from tests.policies import EACH_POLICY, EACH_TAIL, POLICIES, PolicyCase

assert_checkpoints = grain.experimental.assert_equal_output_after_checkpoint


@pytest.fixture
def parsed_flags() -> Iterator[None]:
    """Grain's worker processes ask absl for flags, which only `absl.app.run` would have parsed."""
    parsed = flags.FLAGS.is_parsed()
    flags.FLAGS.mark_as_parsed()
    yield
    if not parsed:
        flags.FLAGS.unparse_flags()


def halves(num_records: int, **settings: Any) -> list[Any]:
    """Two streams, of even and of odd numbers, each with its own pool."""
    numbers = grain.MapDataset.range(num_records)
    return [chain(numbers[start::2].to_iter_dataset(DIRECT), **settings) for start in (0, 1)]


@EACH_POLICY
@EACH_TAIL
def test_repeated_downstream(policy: PolicyCase, tail: str) -> None:
    """Every epoch begins anew, so it works after exhaustion; a tail in each."""
    dataset = pipeline(23, tail=tail, **policy.settings)
    one = ids(dataset)
    repeated = grain.experimental.RepeatIterDataset(dataset, num_epochs=3)
    assert ids(repeated) == one * 3
    assert_checkpoints(repeated)


@EACH_POLICY
def test_repeated_upstream(policy: PolicyCase) -> None:
    """Records cross the epoch, and only the end of the job has a tail."""
    source = grain.MapDataset.range(23).repeat(3).to_iter_dataset(DIRECT)
    dataset = chain(source, tail="keep", **policy.settings)
    packs = ids(dataset)
    assert [len(pack) for pack in packs] == [2] * 34 + [1]
    assert Counter(record for pack in packs for record in pack) == dict.fromkeys(range(23), 3)
    assert_checkpoints(dataset)


@EACH_POLICY
def test_shuffled_and_sharded_upstream(policy: PolicyCase) -> None:
    shards = [
        chain(grain.MapDataset.range(48).shuffle(seed=3)[host::2].to_iter_dataset(DIRECT), **policy.settings)
        for host in range(2)
    ]
    assert sorted(record for shard in shards for pack in ids(shard) for record in pack) == list(range(48))
    for shard in shards:
        assert_checkpoints(shard)


@EACH_POLICY
def test_filtered_upstream(policy: PolicyCase) -> None:
    dataset = chain(grain.MapDataset.range(60).to_iter_dataset(DIRECT).filter(lambda n: n % 3 > 0), **policy.settings)
    assert sorted(record for pack in ids(dataset) for record in pack) == [n for n in range(60) if n % 3]
    assert_checkpoints(dataset)


@EACH_POLICY
def test_mixed(policy: PolicyCase) -> None:
    """Packs of two streams take turns, and each keeps its own order."""
    streams = halves(48, **policy.settings)
    mixed = grain.IterDataset.mix(streams)
    packs = ids(mixed)
    for parity, stream in enumerate(streams):
        assert [pack for pack in packs if pack[0] % 2 == parity] == ids(stream)
    assert_checkpoints(mixed)


@EACH_POLICY
def test_mixed_upstream(policy: PolicyCase) -> None:
    numbers = grain.MapDataset.range(48)
    mixed = grain.IterDataset.mix([numbers[:24].to_iter_dataset(DIRECT), numbers[24:].to_iter_dataset(DIRECT)])
    dataset = chain(mixed, **policy.settings)
    assert sorted(record for pack in ids(dataset) for record in pack) == list(range(48))
    assert_checkpoints(dataset)


@EACH_POLICY
@pytest.mark.parametrize("below", [False, True])
def test_thread_prefetch(policy: PolicyCase, below: bool) -> None:
    """Prefetch of packs, or of the records that go into them."""
    plain = pipeline(40, **policy.settings)
    if below:
        source = grain.MapDataset.range(40).to_iter_dataset(DIRECT)
        dataset = chain(grain.experimental.ThreadPrefetchIterDataset(source, prefetch_buffer_size=5), **policy.settings)
    else:
        dataset = grain.experimental.ThreadPrefetchIterDataset(plain, prefetch_buffer_size=5)
    assert ids(dataset) == ids(plain)
    assert_checkpoints(dataset)


def test_read_ahead_of_the_source() -> None:
    source = grain.MapDataset.range(40).to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=7))
    assert ids(chain(source)) == ids(pipeline(40))
    assert_checkpoints(chain(source))


def test_a_map_dataset_can_be_the_parent() -> None:
    assert ids(chain(grain.MapDataset.range(40))) == ids(pipeline(40))


def test_a_state_can_be_asked_for_from_another_thread() -> None:
    """A checkpoint manager may do so, while the training loop waits for it."""
    iterator = iter(pipeline(40))
    next(iterator)
    states: list[Any] = []
    thread = threading.Thread(target=lambda: states.append(iterator.get_state()))
    thread.start()
    thread.join()
    assert states == [iterator.get_state()]


def test_grains_checkpoint_files(tmp_path: Any) -> None:
    """The state passes through the file that Grain's own handler writes."""
    dataset = pipeline(40)
    iterator = iter(dataset)
    for _ in range(5):  # cycles of 2 packs
        next(iterator)
    handler = grain.checkpoint.CheckpointHandler()
    handler.save(tmp_path, iterator)
    rest = ids(iterator)
    restored = iter(dataset)
    handler.restore(tmp_path, restored)
    assert ids(restored) == rest
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["next_pack"] == 1


@pytest.mark.usefixtures("parsed_flags")
def test_worker_processes() -> None:
    """Two workers: each has its slice of the records and its own pool; packs take turns; the state is of both."""
    settings = {"pack_size": 3, "tail": "keep", **POLICIES["windowed"].settings}
    streams = [ids(stream) for stream in halves(62, **settings)]
    options = grain.MultiprocessingOptions(num_workers=2, per_worker_buffer_size=2)
    iterator = iter(pipeline(62, **settings).mp_prefetch(options))
    first = ids([next(iterator) for _ in range(9)])
    state = through_json(iterator.get_state())
    again = ids([next(iterator) for _ in range(4)])
    iterator.set_state(state)
    rest = ids(iterator)
    iterator.close()
    assert rest[:4] == again
    packs = first + rest
    assert len(packs) == sum(map(len, streams))
    for parity, stream in enumerate(streams):
        assert [pack for pack in packs if pack[0] % 2 == parity] == stream


def test_a_killed_worker_is_told_and_a_new_iterator_goes_on(tmp_path: Path) -> None:
    """Neither silence nor a gap. In a process of its own: a worker that dies while it writes can block its reader."""
    script = tmp_path / "main.py"
    script.write_text(
        "import json, multiprocessing, os, sys, time\n"
        "import grain\n"
        "from absl import flags\n"
        "from tests.pipelines import ids, pipeline, through_json\n"
        "if __name__ == '__main__':\n"
        "    flags.FLAGS.mark_as_parsed()\n"
        "    options = grain.MultiprocessingOptions(num_workers=2, per_worker_buffer_size=1)\n"
        "    dataset = pipeline(200, policy='windowed').mp_prefetch(options)\n"
        "    iterator = iter(dataset)\n"
        "    packs = ids([next(iterator) for _ in range(6)])\n"
        "    state = through_json(iterator.get_state())\n"
        "    time.sleep(1.0)  # now they wait with full buffers\n"
        "    multiprocessing.active_children()[0].kill()\n"
        "    try:\n"
        "        error = f'no error, {len(list(iterator))} packs'\n"
        "    except RuntimeError as failure:\n"
        "        error = str(failure)\n"
        "    other = iter(dataset)\n"
        "    other.set_state(state)\n"
        "    print(json.dumps([error, packs + ids(other)]), flush=True)\n"
        "    for worker in multiprocessing.active_children():\n"
        "        worker.kill()\n"
        "    os._exit(0)\n"
    )
    with (tmp_path / "output").open("w+") as output:  # not a pipe, which orphaned workers would keep open
        command = [sys.executable, str(script)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, env=environment, timeout=120, check=True)
        output.seek(0)
        error, packs = json.load(output)
    assert "Worker process was terminated unexpectedly with exit code -9" in error
    assert sorted(record for pack in packs for record in pack) == list(range(200))


@pytest.mark.usefixtures("parsed_flags")
def test_the_main_process_reads_nothing_for_its_workers() -> None:
    source = Numbers(40)
    iterator = iter(pipeline(source).mp_prefetch(grain.MultiprocessingOptions(num_workers=1)))
    iterator.get_state()
    iterator.close()
    assert source.reads == 0
