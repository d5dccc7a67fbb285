"""Which chunks a run's packs become: the config's layout, or one that follows from the records."""

from __future__ import annotations

import dataclasses

from bcl_grain.cost_prior import CostPrior
from bcl_grain.costs import TransformerCost
from bcl_grain.layouts import Layout, RowPackedLayout, RowPackedOneShapeLayout
from bcl_grain.shapes import fit_rows, fit_shape
from train.config import FitRows, TrainConfig
from train.data import JobSize
from train.model import ModelConfig
from train.rehearsal import rows_that_fit
from train.tokenizers import IntArray
from train.topology import Topology, packs_per_step


def choose_layout(
    config: TrainConfig, sizes: IntArray, model: ModelConfig, topology: Topology, *, longest: int
) -> Layout:
    """Returns the layout that a config names, or one that follows from the records and the model.

    Args:
        config: The run; its lanes are settled.
        sizes: int32 [records], tokens of each training record.
        model: The model, for what chunks cost.
        topology: Who takes part.
        longest: Tokens of the longest record, be it one to evaluate: the cap may be far above it.

    Raises:
        ValueError: If a step that is one program can't be shared evenly by the devices.
    """
    if config.step == "spmd":
        return _one_shape(config, sizes, topology)
    if not isinstance(config.layout, FitRows):
        return config.layout
    return fit_rows(
        sizes,
        pack_size=config.balance.pack_size,
        cost=model.cost(),
        max_length=longest,
        most_shapes=config.layout.most_shapes,
        multiple_of=config.layout.multiple_of,
    )


def _one_shape(config: TrainConfig, sizes: IntArray, topology: Topology) -> Layout:
    packs = packs_per_step(config.balance)
    if packs % topology.ranks:
        raise ValueError(
            f"step 'spmd' gives every device as many packs, but {packs} packs a step ({config.balance.lanes} lanes of "
            f"{config.balance.packs_per_step}) can't be shared by {topology.ranks} devices: use step='decoupled'"
        )
    if isinstance(config.layout, RowPackedOneShapeLayout):
        return config.layout
    assert isinstance(config.layout, RowPackedLayout)
    rows, length = fit_shape(
        sizes,
        max_length=config.layout.length,
        pack_size=config.balance.pack_size,
        multiple_of=config.layout.length,
    )
    return RowPackedOneShapeLayout(rows=rows, length=length)


def rehearse(
    config: TrainConfig,
    layout: RowPackedOneShapeLayout,
    sizes: IntArray,
    job: JobSize,
    *,
    cost: TransformerCost,
    prior: CostPrior | None,
    progress: bool = False,
) -> RowPackedOneShapeLayout:
    """Returns a layout of one shape that every pack of the run fits, from a plan of all of it.

    Raises:
        ValueError: If the config names the rows, and a pack needs more.
    """
    rows = rows_that_fit(
        sizes,
        job,
        rows=layout.rows,
        length=layout.length,
        fixed=layout is config.layout,
        cost=cost,
        balance=config.balance,
        prior=prior,
        seed=config.seed,
        progress=progress,
    )
    return layout if rows == layout.rows else dataclasses.replace(layout, rows=rows)
