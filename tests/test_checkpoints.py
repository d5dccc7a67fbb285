"""A run's checkpoints: damaged, foreign and older ones are refused, a full disk and a kill leave the last good one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.full_disk import largest_file
from tests.lane_hosts import host_dataset
from train.checkpoints import CheckpointError, Checkpoints, SaveError, load_params
from train.state import TrainState

# Futures of Orbax's reads and writes report to an event loop that its error has closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

ROOT = Path(__file__).parent.parent
STEPS = 3
KILLS = int(os.environ.get("BCL_KILLS", "2"))
FINGERPRINT = "3f"


def state(step: int) -> TrainState:
    return TrainState(
        params={"a": jnp.arange(600, dtype=jnp.float32) * step, "b": jnp.full((3, 4), step)},
        opt_state=(jnp.full(600, step),),
        step=jnp.int32(step),
    )


def abstract(tree: Any) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)  # type: ignore[no-untyped-call]


def data() -> Any:
    return iter(host_dataset(1600, host=0, num_hosts=1))


@contextlib.contextmanager
def opened(run_dir: Path, *, keep: int = 9, fingerprint: str = FINGERPRINT) -> Iterator[Checkpoints]:
    checkpoints = Checkpoints(run_dir, fingerprint=fingerprint, keep=keep)
    try:
        yield checkpoints
    finally:
        checkpoints.close()


def train(run_dir: Path, last: int = STEPS) -> None:
    """Goes on and saves after each step; the parameters tell the step, and so do the records."""
    iterator, first = data(), 0
    with opened(run_dir) as checkpoints:
        if checkpoints.latest_step is not None:
            first = int(checkpoints.restore(abstract(state(1)), iterator).step)
        for step in range(first + 1, last + 1):
            next(iterator)
            checkpoints.save(state(step), iterator)
            print(step, flush=True)


def restored_step(run_dir: Path) -> int:
    """Restores the latest checkpoint, and makes sure that all of it is of one step."""
    iterator, expected = data(), data()
    with opened(run_dir) as checkpoints:
        restored = checkpoints.restore(abstract(state(1)), iterator)
    step = int(restored.step)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state(step)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for _ in range(step):
        next(expected)
    assert iterator.get_state() == expected.get_state()
    return step


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("good")
    train(run_dir)
    return run_dir


@pytest.fixture
def run_dir(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "run")
    return tmp_path / "run"


def files(run_dir: Path, step: int = STEPS) -> list[Path]:
    return sorted(path for path in (run_dir / "checkpoints" / f"{step}").rglob("*") if path.is_file())


def test_what_was_saved_comes_back(run_dir: Path) -> None:
    assert restored_step(run_dir) == STEPS
    restored = load_params(run_dir, abstract(state(1).params))
    np.testing.assert_array_equal(restored["a"], state(STEPS).params["a"])


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink], ids=["truncated", "flipped bit", "missing"])
def test_a_damaged_checkpoint_is_refused_and_the_last_good_one_named(damage: Any, run_dir: Path) -> None:
    for path in files(run_dir):
        content = path.read_bytes()
        damage(path)
        with pytest.raises(CheckpointError) as refusal:
            restored_step(run_dir)
        name = path.relative_to(run_dir / "checkpoints" / f"{STEPS}")
        assert f"checkpoint {STEPS} is damaged: {name}" in str(refusal.value)
        assert f"The last good one is that of step {STEPS - 1}: to go on from there, remove" in str(refusal.value)
        with pytest.raises(CheckpointError, match=f"checkpoint {STEPS} is damaged"):
            load_params(run_dir, abstract(state(1).params))
        path.write_bytes(content)
    assert restored_step(run_dir) == STEPS  # nothing was touched
    damage(files(run_dir)[-1])
    shutil.rmtree(run_dir / "checkpoints" / f"{STEPS}")
    assert restored_step(run_dir) == STEPS - 1


def test_only_a_good_checkpoint_is_named(run_dir: Path) -> None:
    for step in (STEPS, STEPS - 1):
        _flip(files(run_dir, step)[-1])
    with pytest.raises(CheckpointError, match="The last good one is that of step 1"):
        restored_step(run_dir)
    _truncate(run_dir / "checksums" / "1.json")
    with pytest.raises(CheckpointError, match="There is no good one before it: start a new run in another --run_dir"):
        restored_step(run_dir)


@pytest.mark.parametrize("name", ["meta/metadata", "params/manifest.ocdbt", "data/lane_2-of-4.json"])
def test_damage_that_no_checksum_tells_is_refused_too(name: str, run_dir: Path) -> None:
    """A run that was killed between a checkpoint and its checksums."""
    (run_dir / "checksums" / f"{STEPS}.json").unlink()
    assert restored_step(run_dir) == STEPS
    (run_dir / "checkpoints" / f"{STEPS}" / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"checkpoint {STEPS} can't be read.*last good one is that of step 2"):
        restored_step(run_dir)


@pytest.mark.parametrize("content", [{}, {"print": FINGERPRINT}, [FINGERPRINT], None])
def test_a_checkpoint_of_another_release_is_refused(content: Any, run_dir: Path) -> None:
    (run_dir / "checksums" / f"{STEPS}.json").unlink()
    (run_dir / "checkpoints" / f"{STEPS}" / "meta" / "metadata").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"checkpoint {STEPS} can't be read.*not written by this release"):
        restored_step(run_dir)


def test_a_checkpoint_of_another_form_is_refused(run_dir: Path) -> None:
    other = TrainState(params={"c": jnp.ones(3)}, opt_state=(), step=jnp.int32(1))
    with opened(run_dir) as checkpoints, pytest.raises(CheckpointError, match=rf"checkpoint {STEPS} can't be read"):
        checkpoints.restore(abstract(other), data())


def test_a_checkpoint_of_another_run_is_refused(run_dir: Path) -> None:
    with opened(run_dir, fingerprint="b4") as checkpoints, pytest.raises(CheckpointError, match="is 3f, this run's is"):
        checkpoints.restore(abstract(state(1)), data())


def test_checksums_go_with_their_checkpoints(tmp_path: Path) -> None:
    iterator = data()
    with opened(tmp_path, keep=2) as checkpoints:
        for step in range(1, 6):
            next(iterator)
            checkpoints.save(state(step), iterator)
    assert sorted(path.name for path in (tmp_path / "checksums").iterdir()) == ["4.json", "5.json"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "5"]


@pytest.mark.parametrize("num_bytes", [0, 100, 300, 1000])
def test_a_full_disk_is_told_and_leaves_the_checkpoint_before(num_bytes: int, run_dir: Path) -> None:
    iterator = data()
    for _ in range(STEPS + 1):
        next(iterator)
    with opened(run_dir) as checkpoints, largest_file(num_bytes), pytest.raises(SaveError) as failure:
        checkpoints.save(state(STEPS + 1), iterator)
    assert f"can't write the checkpoint of step {STEPS + 1}" in str(failure.value)
    assert f"The one of step {STEPS} is still there: make room, then go on with --resume" in str(failure.value)
    assert "\n" not in str(failure.value)
    assert restored_step(run_dir) == STEPS
    with opened(run_dir) as checkpoints:
        checkpoints.save(state(STEPS + 1), iterator)
    assert restored_step(run_dir) == STEPS + 1


def test_a_kill_at_any_moment_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """BCL_KILLS=20 kills as often; nearly all the time is spent in writing."""
    code = f"from pathlib import Path\nfrom tests.test_checkpoints import train\ntrain(Path({str(tmp_path)!r}), 190)"
    saved = 0
    for _ in range(KILLS):
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert int(process.stdout.readline()) == saved + 1
        time.sleep(random.SystemRandom().uniform(0, 0.3))
        process.kill()
        printed = process.communicate()[0].split()
        told = int(printed[-1]) if printed else saved + 1
        saved = restored_step(tmp_path)
        assert saved in (told, told + 1)
