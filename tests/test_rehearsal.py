"""A job of one shape is planned before it begins: what it will need is what it then needs."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bcl_grain.cost_table import CostTable, TableCost, write_cost_table
from bcl_grain.costs import TransformerCost
from bcl_grain.layouts import RowPackedLayout, RowPackedOneShapeLayout
from tests.tiny_run import tiny_config, tiny_run, write_corpus
from train.config import BalanceConfig
from train.data import LayOut, cost_prior, job_size, train_dataset
from train.prepare import prepare
from train.rehearsal import rows_that_fit
from train.report import compare_all
from train.token_table import TokenTable
from train.topology import Topology

COST = TransformerCost(1.0, 0.01)


def corpus(seed: int, sigma: float, count: int = 240) -> TokenTable:
    sizes = np.clip(np.random.default_rng(seed).lognormal(2.5, sigma, count), 2, 64).astype(int)
    return TokenTable.of(
        {"tokens": np.full(n, i, np.int32), "loss_mask": np.ones(n, np.float32)} for i, n in enumerate(sizes)
    )


@pytest.mark.parametrize("packs_per_step", [1, 2])
@pytest.mark.parametrize("policy", ["streaming", "windowed"])
def test_a_rehearsed_job_runs_to_its_end_and_needs_the_rows_that_were_named(policy: Any, packs_per_step: int) -> None:
    """With a row less the job breaks off somewhere."""
    for seed, sigma in itertools.product(range(4), (0.5, 1.2)):
        records = corpus(seed, sigma)
        balance = BalanceConfig(pack_size=6, lookahead=4, policy=policy, lanes=2, packs_per_step=packs_per_step)
        job = job_size(len(records), pack_size=6, ranks=2 * packs_per_step, steps=None, epochs=1)
        # Of short records: it errs, which the first packs show.
        prior = cost_prior(records.select(records.sizes < 12), balance, COST, seed=seed)
        settings: dict[str, Any] = {"balance": balance, "prior": prior, "seed": seed}

        def run(rows: int) -> int:
            lay_out = LayOut(RowPackedOneShapeLayout(rows=rows, length=64), COST)
            steps = train_dataset(records, job, lay_out=lay_out, capacity=(rows, 64), **settings)  # noqa: B023
            return sum(pack.records for packs in steps for pack in packs)

        rows = rows_that_fit(records.sizes, job, rows=1, length=64, fixed=False, cost=COST, **settings)
        assert rows > 1
        assert run(rows) == job.steps * job.global_batch
        with pytest.raises(ValueError, match="is over the capacity"):
            run(rows - 1)
        more = rows_that_fit(records.sizes, job, rows=rows + 1, length=64, fixed=False, cost=COST, **settings)
        assert more == rows + 1


def test_rows_that_are_named_and_too_few_are_refused_with_the_number_that_does(tmp_path: Path) -> None:
    balance = BalanceConfig(pack_size=6, lookahead=3, lanes=1, packs_per_step=2)
    settings: dict[str, Any] = {"step": "spmd", "balance": balance}
    with pytest.raises(
        ValueError, match=r"a pack of step \d+ of 18 needs (\d+) rows of 64 .* set layout\.rows=\d+"
    ) as error:
        tiny_run(tmp_path, layout=RowPackedOneShapeLayout(rows=1, length=64), **settings)
    rows = int(str(error.value).split("layout.rows=")[1].split(",")[0])
    assert tiny_run(tmp_path, layout=RowPackedOneShapeLayout(rows=rows, length=64), **settings).one_shape == (rows, 64)
    lines: list[str] = []
    config = tiny_config(
        write_corpus(tmp_path / "pairs.jsonl"), layout=RowPackedLayout(length=64, rows_per_chunk=1), **settings
    )
    chosen = prepare(config, Topology(process_index=0, process_count=1, local_devices=1), say=lines.append)
    assert chosen.one_shape is not None
    assert chosen.one_shape[0] <= rows
    assert f"layout: chunks of {chosen.one_shape[0]} x 64 tokens, chosen for these records" in lines


def test_times_are_wanted_for_the_shape_that_is_rehearsed_and_not_for_the_one_tried_first(tmp_path: Path) -> None:
    """A table that `train.calibrate` made for the run has no others."""
    settings: dict[str, Any] = {"step": "spmd", "steps": None, "layout": RowPackedLayout(length=64, rows_per_chunk=1)}
    balance = BalanceConfig(pack_size=6, lookahead=1, lanes=1, packs_per_step=1)
    first = tiny_run(tmp_path, balance=balance, **settings)
    assert first.one_shape is not None
    table = tmp_path / "table.json"
    about = {"model": json.loads(json.dumps(dataclasses.asdict(first.model)))}
    cost = TableCost.from_timings([(first.one_shape, 0.1), ((1, 64), 0.03)])
    write_cost_table(CostTable(cost, about), table)
    with_table = dataclasses.replace(balance, cost_table=str(table))
    run = tiny_run(tmp_path, balance=with_table, **settings)
    assert run.one_shape == first.one_shape
    assert run.lay_out.cost == cost
    write_cost_table(CostTable(TableCost.from_timings([((1, 64), 0.03)]), about), table)
    with pytest.raises(ValueError, match=r"has no time for chunks of shape \[\(4, 64\)\]: calibrate anew"):
        tiny_run(tmp_path, balance=with_table, **settings)


@pytest.mark.parametrize("steps", [3, None])
def test_policies_are_compared_on_packs_that_the_one_shape_does_not_hold(steps: int | None, tmp_path: Path) -> None:
    """Those of other ranks and other policies: a pack that does not fit is charged a second chunk."""
    balance = BalanceConfig(pack_size=6, lookahead=8, lanes=1, packs_per_step=1)
    layout = RowPackedLayout(length=64, rows_per_chunk=1)
    run = tiny_run(tmp_path, step="spmd", steps=steps, balance=balance, layout=layout)
    assert run.one_shape is not None
    chunk = run.lay_out.cost.of_chunk(*run.one_shape)
    most = 0.0
    for simulation in compare_all(run).simulations.values():
        assert simulation.executed is not None
        chunks = simulation.executed / chunk
        np.testing.assert_allclose(chunks, chunks.round())
        most = max(most, float(chunks.max()))
    assert most > 1.5


def test_a_decoupled_job_of_one_shape_is_rehearsed_too(tmp_path: Path) -> None:
    layout = RowPackedOneShapeLayout(rows=1, length=64)
    with pytest.raises(ValueError, match=r"set layout\.rows="):
        tiny_run(tmp_path, layout=layout)
    enough = tiny_run(tmp_path, layout=dataclasses.replace(layout, rows=6))
    assert (enough.one_shape, enough.spmd_packs) == ((6, 64), None)
