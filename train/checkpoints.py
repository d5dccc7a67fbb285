"""Checkpoints: model, optimizer and input pipeline as of one step, and whose they are.

Each carries the fingerprint of its run's identity, so that one that was copied from elsewhere is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grain
import jax
import orbax.checkpoint as ocp

from train.checksums import find_damage, remove_others, write_checksums
from train.lane_checkpoint import LaneHandler, LanesRestore, LanesSave
from train.model import Params
from train.run_directory import find_differences
from train.state import TrainState

CHECKPOINT_DIR = "checkpoints"
CHECKSUM_DIR = "checksums"


class CheckpointError(ValueError):
    """A checkpoint can't be used; the message says why."""


class SaveError(Exception):
    """A checkpoint can't be written; the message says why, and which one stays."""


class Checkpoints:
    """The checkpoints of one run.

    A save is over when it returns, and a checkpoint appears in whole or not at all: killing the process at any
    moment leaves the last one. Not asynchronous, because the next update reuses the memory of the arrays being saved.

    Args:
        run_dir: The run's directory.
        fingerprint: Of the run's identity.
        keep: Checkpoints that stay; older ones are deleted.
    """

    def __init__(self, run_dir: Path, *, fingerprint: str, keep: int) -> None:
        self._run_dir = run_dir
        self._fingerprint = fingerprint
        self._manager = _manager(run_dir, max_to_keep=keep, cleanup_tmp_directories=True)

    @property
    def latest_step(self) -> int | None:
        """Updates done at the latest checkpoint, or None without one."""
        step: int | None = self._manager.latest_step()
        return step

    def save(self, state: TrainState, iterator: grain.DatasetIterator) -> None:
        """Saves everything as of `state.step` updates; the iterator stands behind the packs of the last of them.

        Raises:
            SaveError: If it can't be written; those before it are still there.
        """
        step, before = int(state.step), self.latest_step
        if step == before:
            return
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.PyTreeSave(state.params),
                    optimizer=ocp.args.PyTreeSave({"step": state.step, "opt_state": state.opt_state}),
                    data=LanesSave(iterator),
                    meta=ocp.args.JsonSave({"fingerprint": self._fingerprint}),
                ),
            )
            if jax.process_index() == 0:
                write_checksums(_step_dir(self._run_dir, step), _checksums_of(self._run_dir, step))
                remove_others(self._run_dir / CHECKSUM_DIR, self._manager.all_steps())
        except Exception as error:  # Orbax raises what its C++ side made of a full disk
            stays = "There is none before it" if before is None else f"The one of step {before} is still there"
            remedy = "make room" if jax.process_count() == 1 else "make room, or see which other process has died"
            raise SaveError(
                f"can't write the checkpoint of step {step} to {str(self._run_dir)!r} ({_first_line(error)}). {stays}: "
                f"{remedy}, then go on with --resume"
            ) from error

    def restore(self, abstract_state: TrainState, iterator: grain.DatasetIterator) -> TrainState:
        """Restores the latest checkpoint: returns its state and sets the iterator in place.

        Args:
            abstract_state: Shapes, types and shardings.
            iterator: A fresh iterator of the run's pipeline.

        Raises:
            CheckpointError: If the checkpoint is damaged or of another form, which names the last good one, or belongs
                to another run.
        """
        step = self.latest_step
        assert step is not None
        check_undamaged(self._run_dir, step)
        try:
            saved = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
            fingerprint = saved["fingerprint"]
        except Exception as error:
            raise _unreadable(self._run_dir, step, error) from error
        if fingerprint != self._fingerprint:
            raise CheckpointError(
                f"checkpoint {step} belongs to another run: its fingerprint is {fingerprint}, this run's is "
                f"{self._fingerprint}. Remove it, or resume the run it comes from"
            )
        optimizer = {"step": abstract_state.step, "opt_state": abstract_state.opt_state}
        try:
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    params=_restore_args(abstract_state.params),
                    optimizer=_restore_args(optimizer),
                    data=LanesRestore(iterator),
                ),
            )
        except Exception as error:
            raise _unreadable(self._run_dir, step, error) from error
        return TrainState(params=restored["params"], **restored["optimizer"])

    def close(self) -> None:
        """Frees the manager's threads."""
        self._manager.close()


def check_undamaged(run_dir: Path, step: int) -> None:
    """Makes sure that a checkpoint's files are what was written.

    Raises:
        CheckpointError: If they are not; the message names the last checkpoint that is good.
    """
    damage = find_damage(_step_dir(run_dir, step), _checksums_of(run_dir, step))
    if damage is not None:
        raise CheckpointError(f"checkpoint {step} is damaged: {damage}. {_way_back(run_dir, step)}")


def _unreadable(run_dir: Path, step: int, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {step} can't be read, it is damaged or was not written by this release ({_first_line(error)}). "
        f"{_way_back(run_dir, step)}"
    )


def _way_back(run_dir: Path, step: int) -> str:
    """Returns what the user can do without a checkpoint; nothing is removed without being asked."""
    directory = _step_dir(run_dir, step)
    for good in reversed([number for number in saved_steps(run_dir) if number < step]):
        if find_damage(_step_dir(run_dir, good), _checksums_of(run_dir, good)) is None:
            return f"The last good one is that of step {good}: to go on from there, remove {str(directory)!r}"
    return "There is no good one before it: start a new run in another --run_dir"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def _step_dir(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINT_DIR / str(step)


def _checksums_of(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKSUM_DIR / f"{step}.json"


def saved_steps(run_dir: Path) -> list[int]:
    """Returns the steps of a run's checkpoints in order; what a kill has left of a write is none."""
    return sorted(int(path.name) for path in (run_dir / CHECKPOINT_DIR).glob("*") if path.name.isdecimal())


def latest_step(run_dir: Path) -> int:
    """Returns the step of a run's latest checkpoint.

    Raises:
        CheckpointError: If there is none.
    """
    if not (run_dir / CHECKPOINT_DIR).is_dir():
        raise CheckpointError(f"there is no run with checkpoints in {str(run_dir)!r}: --init takes a run directory")
    with _manager(run_dir, create=False) as manager:
        step: int | None = manager.latest_step()
    if step is None:
        raise CheckpointError(f"the run in {str(run_dir)!r} has no checkpoint yet: wait for one")
    return step


def load_params(run_dir: Path, abstract_params: Params) -> Params:
    """Returns the parameters of another run's latest checkpoint, to start a new run from.

    Args:
        run_dir: The other run's directory.
        abstract_params: Shapes, types and shardings.

    Raises:
        CheckpointError: If there is no checkpoint, or its model has other dimensions.
    """
    step = latest_step(run_dir)
    check_undamaged(run_dir, step)
    with _manager(run_dir, create=False) as manager:
        saved = manager.item_metadata(step)["params"].tree
        differences = find_differences(_shapes(saved), _shapes(abstract_params))
        if differences:
            raise CheckpointError(
                f"the model in {str(run_dir)!r} has other dimensions: "
                + "; ".join(f"{name} has shape {theirs}, wanted {ours}" for name, theirs, ours in differences)
            )
        params: Params = manager.restore(step, args=ocp.args.Composite(params=_restore_args(abstract_params)))["params"]
    return params


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: [*x.shape], tree)


def _manager(run_dir: Path, **options: Any) -> ocp.CheckpointManager:
    handlers = {
        "params": _array_handler(),
        "optimizer": _array_handler(),
        "data": LaneHandler(),
        "meta": ocp.JsonCheckpointHandler(),
    }
    return ocp.CheckpointManager(
        (run_dir / CHECKPOINT_DIR).absolute(),
        item_handlers=handlers,
        options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False, **options),
    )


def _array_handler() -> ocp.PyTreeCheckpointHandler:
    # By default each device writes a slice of what all of them hold, and cutting it compiles programs in mid-run.
    whole = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, whole))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _restore_args(abstract: Any) -> ocp.args.PyTreeRestore:
    return ocp.args.PyTreeRestore(item=abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract))
