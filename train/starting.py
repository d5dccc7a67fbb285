"""Where a run starts: fresh parameters, or a model's that others trained; what of them is trained and what is not."""

from __future__ import annotations

import jax
import numpy as np

from train.lora import FROZEN_DTYPE
from train.model import Params
from train.peft_adapters import load_adapters
from train.prepare import Prepared
from train.pretrained import load_params, on_devices
from train.programs import Programs, shardings
from train.state import TrainState
from train.step import begin_with, init_state


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
