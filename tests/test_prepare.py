"""What follows from a config and a corpus before anything is compiled."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import train.prepare
from bcl_grain.layouts import BucketedLayout, Layout, RowPackedLayout, RowPackedOneShapeLayout
from bcl_grain.shapes import fit_rows
from tests.tiny_run import loss_tokens, quiet, tiny_config, tiny_run, write_corpus
from train.bigram import fit_bigram
from train.config import BalanceConfig, FitRows
from train.prepare import Prepared, prepare
from train.run_directory import find_differences
from train.topology import Topology


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return tiny_run(tmp_path_factory.mktemp("corpus"))


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


def test_a_corpus_smaller_than_a_step_is_an_error(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "few.jsonl", num_pairs=12)
    topology = Topology(process_index=0, process_count=2, local_devices=4)
    with pytest.raises(
        ValueError, match=r"the corpus has \d+ records, but one step takes 48 \(8 ranks of pack_size 6\)"
    ):
        prepare(tiny_config(corpus), topology, say=quiet)


def test_the_identity_depends_on_the_data(tmp_path: Path, prepared: Prepared) -> None:
    again = tiny_run(tmp_path)
    assert again.identity == prepared.identity, "not where the data lie"
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()
    record = json.loads(lines[7])
    lines[7] = json.dumps({**record, "response": record["response"] + "c"})
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    changed = prepare(again.config, again.topology, say=quiet)
    assert {name.split(".")[0] for name, _, _ in find_differences(again.identity, changed.identity)} - {"config"} == {
        "data"
    }


def test_a_constant_denominator_is_the_expected_number_of_tokens(prepared: Prepared) -> None:
    assert prepared.expected_tokens is None
    config = dataclasses.replace(prepared.config, constant_denominator=True)
    per_record = loss_tokens(dataclasses.replace(prepared, evaluation=prepared.train)) / len(prepared.train)
    assert dataclasses.replace(prepared, config=config).expected_tokens == pytest.approx(6 * per_record)


def test_a_step_that_is_one_program_needs_packs_of_one_shape_and_as_many_on_each_device(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "pairs.jsonl")
    bucketed = BucketedLayout(lengths=(32, 64), tokens_per_chunk=64)
    with pytest.raises(ValueError, match="step 'spmd' needs packs of one shape, which BucketedLayout does not give"):
        tiny_config(corpus, step="spmd", layout=bucketed)
    with pytest.raises(ValueError, match="step must be 'decoupled' or 'spmd', got 'both'"):
        tiny_config(corpus, step="both")
    balance = BalanceConfig(pack_size=2, lookahead=3, lanes=4, packs_per_step=1)
    topology = Topology(process_index=0, process_count=2, local_devices=3)
    with pytest.raises(ValueError, match=r"but 4 packs a step \(4 lanes of 1\) can't be shared by 6 devices"):
        prepare(tiny_config(corpus, step="spmd", balance=balance), topology, say=quiet)
    fixed = tiny_config(corpus, step="spmd", layout=RowPackedOneShapeLayout(rows=5, length=64))
    topology = Topology(process_index=0, process_count=1, local_devices=1)
    assert prepare(fixed, topology, say=quiet).one_shape == (5, 64)
