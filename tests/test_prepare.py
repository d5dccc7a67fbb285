"""What follows from a config and a corpus before anything is compiled."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import train.prepare
from bcl_grain.layouts import Layout, RowPackedLayout
from bcl_grain.shapes import fit_rows
from tests.tiny_run import tiny_config, tiny_run, write_corpus
from train.bigram import fit_bigram
from train.config import FitRows
from train.prepare import Prepared, prepare
from train.topology import Topology


def executed(prepared: Prepared, layout: Layout) -> float:
    """The cost of chunks for the records in random packs."""
    rng = np.random.default_rng(0)
    packs = rng.permutation(prepared.train.sizes)[: len(prepared.train) // 6 * 6].reshape(-1, 6)
    return sum(layout.executed_cost(pack, prepared.lay_out.cost) for pack in packs)


def test_rows_are_fitted_to_the_records_and_hold_the_longest_that_may_come(tmp_path: Path) -> None:
    fitted = tiny_run(tmp_path, layout=FitRows(most_shapes=3, multiple_of=8))
    layout = fitted.lay_out.layout
    assert isinstance(layout, RowPackedLayout)
    # What the library proposes itself, the model's own FLOPs given.
    assert (
        layout.shapes
        == fit_rows(
            fitted.train.sizes, pack_size=6, cost=fitted.model.cost(), max_length=64, most_shapes=3, multiple_of=8
        ).shapes
    )
    assert len(layout.shapes) == 3
    assert layout.shapes[-1] == (1, 64)
    assert layout.pad_id == fitted.tokenizer.pad_id
    assert executed(fitted, layout) < 0.9 * executed(fitted, RowPackedLayout(length=64, rows_per_chunk=1))
    assert fitted.identity["chunk_shapes"] == [list(shape) for shape in layout.shapes]


def test_a_cap_far_above_all_records_makes_no_row_of_its_length(tmp_path: Path) -> None:
    """Of one shape it would be the row of every pack. The longest record may be learnt from or held out."""
    corpus = tmp_path / "pairs.jsonl"
    lines = write_corpus(corpus).read_text().splitlines()
    config = tiny_config(corpus, layout=FitRows(most_shapes=1, multiple_of=8))
    config = dataclasses.replace(config, corpus=dataclasses.replace(config.corpus, max_tokens=10**6))
    longest_is_held_out = set()
    for row in range(8):
        corpus.write_text(
            "\n".join([*lines[:row], json.dumps({"prompt": "", "response": "a" * 98}), *lines[row + 1 :]])
        )
        run = prepare(config, Topology(process_index=0, process_count=1, local_devices=1), say=lambda _: None)
        ((_, length),) = run.lay_out.layout.shapes
        assert max(run.train.sizes.max(), run.evaluation.sizes.max()) <= length < 200
        longest_is_held_out.add(bool(run.evaluation.sizes.max() > run.train.sizes.max()))
    assert longest_is_held_out == {False, True}


def test_fitted_rows_are_said(tmp_path: Path) -> None:
    lines: list[str] = []
    config = tiny_config(write_corpus(tmp_path / "pairs.jsonl"), layout=FitRows(most_shapes=1, multiple_of=8))
    prepare(config, Topology(process_index=0, process_count=1, local_devices=1), say=lines.append)
    assert "layout: chunks of 1 x 64 tokens, chosen for these records" in lines


@pytest.mark.parametrize("field", ["most_shapes", "multiple_of"])
def test_settings_of_fitted_rows_are_checked(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be an integer of at least 1, got 0"):
        FitRows(**{field: 0})


def test_packs_of_one_shape_can_not_have_fitted_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step 'spmd' needs packs of one shape, which FitRows does not give"):
        tiny_config(tmp_path / "pairs.jsonl", layout=FitRows(), step="spmd")


def test_the_baseline_sees_every_nth_record_of_a_large_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_run(tmp_path)
    tokens = int(whole.train.loss_tokens.sum())
    monkeypatch.setattr(train.prepare, "BIGRAM_TOKENS", tokens // 2 - 1)
    lines: list[str] = []
    config = tiny_config(tmp_path / "pairs.jsonl")
    sampled = prepare(config, Topology(process_index=0, process_count=1, local_devices=1), say=lines.append)
    assert [line for line in lines if "bigram" in line] == ["bigram model: one of 3 training records"]
    vocabulary = whole.model.vocab_size
    third = [whole.train[i] for i in range(0, len(whole.train), 3)]
    assert sampled.bigram_loss == fit_bigram(third, vocabulary).nats_per_token(list(whole.evaluation))
    assert whole.bigram_loss == fit_bigram(list(whole.train), vocabulary).nats_per_token(list(whole.evaluation))
    assert sampled.bigram_loss != whole.bigram_loss
