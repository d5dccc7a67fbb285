"""A pipeline written out as a Python program."""

from __future__ import annotations

import dataclasses

from bcl_grain.costs import TransformerCost
from bcl_grain.layouts import Layout
from bcl_grain.planner import PlannerConfig


def make_snippet(
    config: PlannerConfig, layout: Layout, cost: TransformerCost, *, source: str, streams: int, cap: int | None
) -> str:
    """Returns a Grain pipeline as a program that runs as it is, over stand-ins for the user's records.

    Args:
        config: The planner's settings.
        layout: Packs to chunks.
        cost: Cost of a record.
        source: Python expression for the corpus's lengths.
        streams: Hosts that share the corpus.
        cap: Longest record, or None.
    """
    return _SNIPPET.format(
        source=source,
        streams=streams,
        cap="" if cap is None else _CAP.format(cap=cap),
        report="" if cap is None else "\ncapped = bcl.CapReport()",
        per_token=cost.per_token,
        per_token_squared=cost.per_token_squared,
        pack_size=config.pack_size,
        packs_per_step=config.packs_per_step,
        lookahead=config.lookahead,
        policy=config.policy,
        num_packs=config.num_packs,
        layout=_expression(layout),
    )


def _expression(layout: Layout) -> str:
    """Returns the Python call that makes a layout, without the arguments that have their default."""
    given = {
        field.name: getattr(layout, field.name)
        for field in dataclasses.fields(layout)
        if getattr(layout, field.name) != field.default
    }
    return f"bcl.{type(layout).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


_CAP = """
    .pipe(bcl.cap_oversize, max_size={cap}, on_oversize="truncate", report=capped)"""

_SNIPPET = """\
import grain
import numpy as np

import bcl_grain as bcl
from bcl_grain.inputs import read_lengths

# Put your own records here: dicts of arrays of equal length. These only have the lengths of the corpus.
lengths = {source}
records = [{{"tokens": np.zeros(n, np.int32), "loss_mask": np.ones(n, np.float32)}} for n in lengths]
host, num_hosts = 0, {streams}  # jax.process_index(), jax.process_count(){report}

ds = (
    grain.MapDataset.source(records)
    .shuffle(seed=0)[host::num_hosts]
    .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)){cap}
    .pipe(
        bcl.BatchCostLookaheadIterDataset,
        pack_size={pack_size},
        packs_per_step={packs_per_step},
        lookahead={lookahead},
        policy="{policy}",
        num_packs={num_packs},  # alike on all hosts
        cost_fn=bcl.TransformerCost(per_token={per_token:.6g}, per_token_squared={per_token_squared:.6g}),
    )
    .map({layout})
)
for chunks in ds:  # {packs_per_step} a step, one for each local device
    pass
"""
