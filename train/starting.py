"""Where a run starts: fresh parameters, or a model's that others trained; what of them is trained and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from train.lora import FROZEN_DTYPE
from train.model import Params
from train.peft_adapters import load_adapters
from train.prepare import Prepared
from train.pretrained import load_params, on_devices
from train.processes import main_first, together
from train.programs import Programs, shardings
from train.run_directory import claim_run_dir, wait_until_seen
from train.samples import Sampler, compile_sampler
from train.state import TrainState
from train.step import begin_with, init_state


class StartError(ValueError):
    """A model, adapters or questions to start with can't be used; the message says why."""


class Start(NamedTuple):
    """What a run begins with.

    Attributes:
        state: Before the first update.
        frozen: The parameters beside the adapters, None if there are no adapters.
        sampler: Asks the model, on the main process; None if nothing is to be asked.
    """

    state: TrainState
    frozen: Params | None
    sampler: Sampler | None


def start(prepared: Prepared, programs: Programs) -> Start:
    """Loads what a run begins with. All processes call it together, and leave together, however fast their disks.

    Raises:
        StartError: On every process, if anything can't be read or does not fit on one.
    """

    def load() -> Start:
        try:
            return Start(
                first_state(prepared, programs), frozen_params(prepared, programs), compile_sampler(prepared, programs)
            )
        except OSError as error:
            raise ValueError(f"the model can't be read: {error}") from error

    try:
        return together(load)
    except ValueError as error:
        raise StartError(str(error)) from error


def claim(prepared: Prepared, run_dir: Path) -> None:
    """Makes a directory the run's. All processes call it together, and see it then.

    Raises:
        StartError: On every process, if one does not see the directory.
    """
    with main_first("the run's directory is claimed"):
        if prepared.topology.is_main:
            claim_run_dir(run_dir, prepared.identity)
    try:
        together(lambda: wait_until_seen(run_dir, prepared.identity))
    except ValueError as error:
        raise StartError(str(error)) from error


def first_state(prepared: Prepared, programs: Programs) -> TrainState:
    """Returns the state before the first update: of the model's parameters, or of fresh ones or fresh adapters."""
    everywhere, _ = shardings(programs.mesh)
    if prepared.config.adapters is not None:
        adapters = jax.tree.map(np.asarray, load_adapters(prepared.config.adapters, prepared.model))
        return begin_with(programs, jax.tree.map(lambda x: on_devices(x, everywhere), adapters))
    if prepared.pretrained is None or prepared.model.lora is not None:
        return init_state(programs, seed=prepared.config.seed)
    return begin_with(programs, load_params(prepared.pretrained, sharding=everywhere))


def frozen_params(prepared: Prepared, programs: Programs) -> Params | None:
    """Returns the parameters beside the adapters, None if there are no adapters."""
    if programs.abstract_frozen is None:
        return None
    assert prepared.pretrained is not None  # adapters of a model that nobody trained are refused by the config
    everywhere, _ = shardings(programs.mesh)
    return load_params(prepared.pretrained, dtype=FROZEN_DTYPE, sharding=everywhere)
