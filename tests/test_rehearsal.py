"""A job of one shape is planned before it begins: what it will need is what it then needs."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bcl_grain.costs import TransformerCost
from bcl_grain.layouts import RowPackedLayout, RowPackedOneShapeLayout
from tests.tiny_run import tiny_config, tiny_run, write_corpus
from train.config import BalanceConfig
from train.data import LayOut, job_size, train_dataset
from train.prepare import prepare
from train.rehearsal import rows_that_fit
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
        settings: dict[str, Any] = {"balance": balance, "prior": None, "seed": seed}

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


def test_a_decoupled_job_of_one_shape_is_rehearsed_too(tmp_path: Path) -> None:
    layout = RowPackedOneShapeLayout(rows=1, length=64)
    with pytest.raises(ValueError, match=r"set layout\.rows="):
        tiny_run(tmp_path, layout=layout)
    enough = tiny_run(tmp_path, layout=dataclasses.replace(layout, rows=6))
    assert (enough.one_shape, enough.spmd_packs) == ((6, 64), None)
