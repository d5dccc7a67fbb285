"""What users of data loaders lost elsewhere and must not lose here, where no other test says it; the table of all."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bcl_grain as bcl
from bcl_grain.layouts import RowPackedLayout
from tests.pipelines import DIRECT, PAD, chain, ids
from train.data import cap_records
from train.token_table import TokenTable

ROOT = Path(__file__).parents[1]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 10**6), min_size=1, max_size=60),
    ranks=st.integers(1, 5),
    pack_size=st.integers(1, 4),
    policy=st.sampled_from(["arrival", "windowed", "streaming"]),
    tail=st.sampled_from(["drop", "keep", "pad"]),
)
def test_every_rank_has_the_same_number_of_steps_on_any_data(
    lengths: list[int], ranks: int, pack_size: int, policy: str, tail: Any
) -> None:
    """Nine records on four ranks, a batch smaller than the ranks, one record longer than all others: nobody waits."""
    options: dict[str, Any] = {"pack_size": pack_size, "tail": tail}
    if tail == "drop" and len(lengths) < ranks * pack_size:
        with pytest.raises(ValueError, match="don't fill one step"):
            bcl.plan_lanes(len(lengths), num_lanes=ranks, **options)
        return
    plan = bcl.plan_lanes(len(lengths), num_lanes=ranks, **options)
    records = grain.MapDataset.range(len(lengths))
    streams = [
        ids(
            chain(
                records[rank::ranks].to_iter_dataset(DIRECT),
                num_packs=plan.num_packs,
                policy=policy,
                cost_fn=lambda record: lengths[int(record)],
                **options,
            )
        )
        for rank in range(ranks)
    ]
    assert {len(packs) for packs in streams} == {plan.steps}
    out = [record for packs in streams for pack in packs for record in pack if record != PAD]
    assert len(out) == len(set(out)) == len(lengths) - plan.num_unused


@pytest.mark.parametrize("on_oversize", ["truncate", "drop"])
def test_the_cost_is_that_of_what_is_left_after_the_cap_and_one_long_record_ends_nothing(on_oversize: Any) -> None:
    records = [{"tokens": np.ones(n, np.int32)} for n in (3, 4, 10**6, 5, 2, 6, 1)]
    seen: list[int] = []

    def cost_fn(record: Any) -> float:
        seen.append(len(record["tokens"]))
        return float(seen[-1])

    report = bcl.CapReport()
    capped = bcl.cap_oversize(grain.MapDataset.source(records), max_size=6, on_oversize=on_oversize, report=report)
    packs = list(chain(capped.to_iter_dataset(DIRECT), cost_fn=cost_fn, tail="keep"))
    assert max(seen) == 6
    assert report.records == 1
    assert sum(map(len, packs)) == (7 if on_oversize == "truncate" else 6)


def test_a_corpus_of_oversize_records_alone_is_an_error_before_anything_is_trained() -> None:
    records = TokenTable.of([{"tokens": np.ones(9, np.int32), "loss_mask": np.ones(9, np.float32)}] * 4)
    with pytest.raises(ValueError, match="no record of 4 is left after the cap of 5 tokens: raise max_tokens"):
        cap_records(records, max_tokens=5, on_oversize="drop")


@settings(max_examples=40)
@given(st.lists(st.integers(1, 16), min_size=2, max_size=30))
def test_no_conversation_is_cut_or_joined_with_another(sizes: list[int]) -> None:
    """A segment is one whole record, its tokens in order, and nothing of any other."""
    records = [{"tokens": 100 * i + np.arange(n), "loss_mask": np.ones(n)} for i, n in enumerate(sizes, start=1)]
    dataset = chain(
        grain.MapDataset.source(records).to_iter_dataset(DIRECT), cost_fn=bcl.token_cost(), tail="keep", pack_size=4
    ).map(RowPackedLayout(length=16, rows_per_chunk=2, heights=(1,)))
    found = []
    for chunks in dataset:
        for chunk in chunks:
            for tokens, segments in zip(chunk["tokens"], chunk["tokens_segment_ids"], strict=True):
                found += [tokens[segments == segment].tolist() for segment in range(1, segments.max() + 1)]
    assert sorted(found) == sorted(record["tokens"].tolist() for record in records)


def test_the_table_of_promises_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    named = re.findall(r"`(test_\w+)\.(test_\w+)`", page)
    assert len(named) > 40
    for module, name in named:
        tree = ast.parse((ROOT / "tests" / f"{module}.py").read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in names, f"{module}.{name}"
