"""A table of records gives back what was put in, says how long it is without reading, and notices damage."""

from __future__ import annotations

import pathlib
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bcl_grain as bcl
from train.data import READ_IN_PLACE, cap_records
from train.token_table import DamagedRecordError, TokenTable, encoded
from train.tokenizers import Record


@st.composite
def any_record(draw: Any) -> Record:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12))
    mask = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(tokens), max_size=len(tokens)))
    return {"tokens": np.array(tokens, np.int32), "loss_mask": np.array(mask, np.float32)}


RECORDS = st.lists(any_record(), min_size=1, max_size=12)


def assert_same(found: Record, expected: Record) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)


@given(RECORDS)
def test_records_come_back_as_they_were(records: list[Record]) -> None:
    table = TokenTable.of(records)
    assert len(table) == len(records)
    for index, (found, expected) in enumerate(zip(table, records, strict=True)):
        assert_same(found, expected)
        assert_same(table[index - len(records)], expected)
    assert table.sizes.tolist() == [len(record["tokens"]) for record in records]
    assert table.loss_tokens.tolist() == [int(record["loss_mask"][1:].sum()) for record in records]
    with pytest.raises(IndexError):
        table[len(records)]


@given(RECORDS, RECORDS, st.data())
def test_parts_and_unions_are_those_of_lists(first: list[Record], second: list[Record], data: Any) -> None:
    both = TokenTable.joined([TokenTable.of(first), TokenTable.of(second)])
    records = first + second
    part = data.draw(st.slices(len(records)))
    rows = data.draw(st.lists(st.integers(0, len(records) - 1)))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(records), max_size=len(records))))
    for found, expected in (
        (both[part], records[part]),
        (both.select(np.array(rows, int)), [records[row] for row in rows]),
        (both.select(mask), [record for record, keep in zip(records, mask, strict=True) if keep]),
        (TokenTable.joined([]), []),
    ):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


@given(RECORDS, st.integers(1, 13), st.sampled_from(["truncate", "drop"]))
def test_the_cap_is_that_of_the_library(records: list[Record], max_tokens: int, on_oversize: Any) -> None:
    report = bcl.CapReport()
    ds = bcl.cap_oversize(grain.MapDataset.source(records), max_size=max_tokens, on_oversize=on_oversize, report=report)
    expected = list(ds.to_iter_dataset(READ_IN_PLACE))
    learnable = [record for record in expected if record["loss_mask"][1:].any()]
    if not learnable:
        with pytest.raises(ValueError, match="is left after the cap"):
            cap_records(TokenTable.of(records), max_tokens=max_tokens, on_oversize=on_oversize)
        return
    capped = cap_records(TokenTable.of(records), max_tokens=max_tokens, on_oversize=on_oversize)
    for found, record in zip(capped.records, learnable, strict=True):
        assert_same(found, record)
    assert capped.records.loss_tokens.tolist() == [int(record["loss_mask"][1:].sum()) for record in learnable]
    assert (capped.num_oversize, capped.tokens_removed) == (report.records, report.size_removed)
    assert capped.num_unlearnable == len(expected) - len(learnable)


def three() -> list[Record]:
    return [
        {"tokens": np.arange(n, dtype=np.int32), "loss_mask": (np.arange(n) > 1) * np.float32(1)} for n in (4, 6, 3)
    ]


def test_the_checksum_tells_corpora_apart() -> None:
    other_token, other_mask = three(), three()
    other_token[1]["tokens"][2] += 1
    other_mask[1]["loss_mask"][-1] = 0
    # The same tokens in all, cut otherwise.
    joined = [{name: np.concatenate([r[name] for r in three()[:2]]) for name in ("tokens", "loss_mask")}, three()[2]]
    tables = [TokenTable.of(r) for r in (three(), other_token, other_mask, three()[::-1], three()[:-1], joined)]
    tables += [tables[0].cut(5)]
    assert len({table.checksum for table in tables}) == len(tables)
    assert TokenTable.of(three()).checksum == tables[0].checksum
    assert TokenTable.joined([tables[0][:1], tables[0][1:]]).checksum == tables[0].checksum


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"tokens": np.array([1, -1]), "loss_mask": np.ones(2)}, "record 1: want tokens of at least 0"),
        ({"tokens": np.array([1, 1]), "loss_mask": np.ones(3)}, "record 1: .* a mask of shape"),
        ({"tokens": np.array([1, 1]), "loss_mask": np.array([0, 0.5])}, "record 1: a loss mask holds 0 and 1 only"),
        ({"tokens": np.array([1, 1]), "loss_mask": np.array([0, np.nan])}, "record 1: a loss mask holds 0 and 1 only"),
    ],
)
def test_what_can_not_be_kept_is_refused(record: Record, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        encoded([three()[0], record])


def test_a_flipped_bit_in_a_file_is_noticed(tmp_path: pathlib.Path) -> None:
    values, entries = encoded(three())
    path = tmp_path / "tokens.bin"
    values[5] ^= 1 << 3
    path.write_bytes(values.tobytes())
    table = TokenTable((np.memmap(path, np.int32, mode="r"),), entries)
    assert_same(table[0], three()[0])
    assert_same(table[2], three()[2])
    with pytest.raises(DamagedRecordError, match=r"tokens at token 4 of '.*tokens\.bin' is not what was written"):
        table[1]
