from __future__ import annotations

import pickle
from typing import Any

import grain
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcl_grain.chunks import Chunk, Record
from bcl_grain.costs import TransformerCost
from bcl_grain.dataset import BatchCostLookaheadIterDataset
from bcl_grain.layouts import (
    BucketedLayout,
    Layout,
    PaddedLayout,
    RowPackedLayout,
    RowPackedOneShapeLayout,
)

LENGTH = 16  # the longest record that every layout here holds
PACK_SIZE = 12
LAYOUTS: dict[str, Layout] = {
    "row_packed": RowPackedLayout(length=LENGTH, rows_per_chunk=2),
    "row_packed_ladder": RowPackedLayout(length=LENGTH, rows_per_chunk=4, heights=(1, 2)),
    "row_packed_overhead": RowPackedLayout(length=LENGTH, rows_per_chunk=3, heights=(2,), chunk_overhead_rows=1.5),
    "row_packed_lengths": RowPackedLayout(length=8, rows_per_chunk=2, heights=(1,), lengths=(2, 4, LENGTH)),
    "one_shape": RowPackedOneShapeLayout(rows=PACK_SIZE, length=LENGTH),
    "bucketed": BucketedLayout(lengths=(2, 8, LENGTH), tokens_per_chunk=32),
    "padded": PaddedLayout(pack_size=PACK_SIZE, length=LENGTH),
}
EACH_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())

sizes_lists = st.lists(st.integers(1, LENGTH), min_size=1, max_size=PACK_SIZE)


def make_pack(sizes: list[int]) -> list[dict[str, npt.NDArray[Any]]]:
    """Records in which every value of every feature is unlike any other, and none is 0."""
    starts = np.cumsum([1, *sizes])
    tokens = [np.arange(start, start + size, dtype=np.int32) for start, size in zip(starts, sizes, strict=False)]
    return [{"tokens": x, "loss_mask": x.astype(np.float32) + 0.5, "advantage": -x.astype(np.int16)} for x in tokens]


def read_chunks(chunks: list[Chunk], pad_id: int = 0) -> list[dict[str, npt.NDArray[Any]]]:
    """Reads records back from nothing but segment ids, and checks everything that a reader relies on."""
    records = []
    for chunk in chunks:
        segment_ids, positions = chunk["tokens_segment_ids"], chunk["tokens_positions"]
        assert segment_ids.dtype == positions.dtype == np.int32
        assert len({values.shape for values in chunk.values()}) == 1
        features = sorted(set(chunk) - {"tokens_segment_ids", "tokens_positions"})
        for row in range(segment_ids.shape[0]):
            ids = segment_ids[row].tolist()
            at = 0
            for segment in range(1, max(ids) + 1):
                n = ids.count(segment)
                assert ids[at : at + n] == [segment] * n, "segments are in order and in one piece"
                assert n > 0
                assert positions[row, at : at + n].tolist() == list(range(n))
                records.append({name: chunk[name][row, at : at + n] for name in features})
                at += n
            assert not any(ids[at:])
            assert not positions[row, at:].any()
            for name in features:
                assert (chunk[name][row, at:] == (pad_id if name == "tokens" else 0)).all()
    return records


def assert_same_records(got: list[Any], expected: list[Any]) -> None:
    def key(record: Record) -> int:
        return int(record["tokens"][0])

    assert len(got) == len(expected)
    for a, b in zip(sorted(got, key=key), sorted(expected, key=key), strict=True):
        assert a.keys() == b.keys()
        for name in b:
            np.testing.assert_array_equal(a[name], b[name], strict=True)


@EACH_LAYOUT
@settings(deadline=None, max_examples=60)
@given(sizes=sizes_lists)
def test_every_record_comes_back_once_whole_and_in_one_piece(layout: Layout, sizes: list[int]) -> None:
    pack = make_pack(sizes)
    assert_same_records(read_chunks(layout(pack)), pack)


@EACH_LAYOUT
@settings(deadline=None, max_examples=60)
@given(sizes=sizes_lists)
def test_shapes_are_known_from_sizes_alone(layout: Layout, sizes: list[int]) -> None:
    shapes = [chunk["tokens"].shape for chunk in layout(make_pack(sizes))]
    assert shapes == layout.chunk_shapes(sizes) == layout.chunk_shapes(np.array(sizes))
    assert set(shapes) <= set(layout.shapes)
    cost = TransformerCost(per_token=3.0, per_token_squared=0.25, per_chunk=7.0)
    by_hand = sum(7.0 + rows * (3.0 * length + 0.25 * length**2) for rows, length in shapes)
    assert layout.executed_cost(sizes, cost) == pytest.approx(by_hand, rel=1e-12)


@EACH_LAYOUT
def test_empty_pack_is_the_smallest_chunk_of_padding(layout: Layout) -> None:
    (chunk,) = layout([])
    assert layout.chunk_shapes([]) == [chunk["tokens"].shape]
    rows, length = chunk["tokens"].shape
    assert (rows * length, length) == min((r * n, n) for r, n in layout.shapes)
    assert {name: values.dtype for name, values in chunk.items()} == {
        "tokens": np.int32,
        "loss_mask": np.float32,
        "tokens_segment_ids": np.int32,
        "tokens_positions": np.int32,
    }
    assert not any(values.any() for values in chunk.values())


def test_empty_pack_takes_its_features_from_the_option() -> None:
    layout = PaddedLayout(
        pack_size=2, length=4, size_feature="ids", pad_id=9, empty_features=(("ids", "int64"), ("weight", "float16"))
    )
    (chunk,) = layout([])
    assert chunk.keys() == {"ids", "ids_segment_ids", "ids_positions", "weight"}
    assert chunk["ids"].dtype == np.int64
    assert chunk["weight"].dtype == np.float16
    assert (chunk["ids"] == 9).all()
    with pytest.raises(ValueError, match=r"must name the size_feature 'tokens'"):
        PaddedLayout(pack_size=2, length=4, empty_features=(("ids", "int64"),))


@EACH_LAYOUT
def test_is_deterministic_and_survives_pickling(layout: Layout) -> None:
    pack = make_pack([3, 16, 3, 7, 1, 9])
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout
    assert hash(copy) == hash(layout)
    np.testing.assert_equal(copy(pack), layout(pack))


@EACH_LAYOUT
def test_chunks_own_their_data(layout: Layout) -> None:
    pack = make_pack([5, 5])
    first, again = layout(pack), layout(pack)
    for chunk in first:
        for values in chunk.values():
            values[...] = 77
    assert_same_records(read_chunks(again), make_pack([5, 5]))
    assert_same_records(pack, make_pack([5, 5]))


@EACH_LAYOUT
@pytest.mark.parametrize("prefetch", [False, True])
def test_checkpoints_exactly_in_a_pipeline(layout: Layout, prefetch: bool) -> None:
    sizes = np.random.default_rng(0).integers(1, LENGTH + 1, 40).tolist()
    ds = (
        grain.MapDataset.source(make_pack(sizes))
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        .pipe(
            BatchCostLookaheadIterDataset,
            pack_size=5,
            lookahead=2,
            cost_fn=TransformerCost(1.0),
            policy="windowed",
            seed=0,
        )
        .map(layout)
    )
    if prefetch:
        ds = grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2)
    grain.experimental.assert_equal_output_after_checkpoint(ds)
    assert_same_records([record for chunks in ds for record in read_chunks(chunks)], make_pack(sizes))


def test_pad_id_fills_the_tokens_only() -> None:
    layout = RowPackedLayout(length=8, rows_per_chunk=2, pad_id=-1)
    pack = make_pack([3, 8, 2])
    chunks = layout(pack)
    assert_same_records(read_chunks(chunks, pad_id=-1), pack)
    assert (chunks[0]["tokens"] == -1).sum() == 3


def test_lists_and_another_size_feature() -> None:
    pack = [{"ids": [1, 2, 3], "weight": [0.5, 0.5, 1.0]}, {"ids": [4], "weight": [2.0]}]
    (chunk,) = RowPackedLayout(length=4, rows_per_chunk=1, size_feature="ids")(pack)
    assert {name: values.tolist() for name, values in chunk.items()} == {
        "ids": [[1, 2, 3, 4]],
        "ids_segment_ids": [[1, 1, 1, 2]],
        "ids_positions": [[0, 1, 2, 0]],
        "weight": [[0.5, 0.5, 1.0, 2.0]],
    }


@settings(deadline=None, max_examples=60)
@given(sizes=sizes_lists)
def test_a_ladder_down_to_one_leaves_no_row_empty(sizes: list[int]) -> None:
    chunks = RowPackedLayout(length=LENGTH, rows_per_chunk=4, heights=(1, 2))(make_pack(sizes))
    assert all((chunk["tokens_segment_ids"][:, 0] == 1).all() for chunk in chunks)


def test_ladder_trades_rows_against_chunks() -> None:
    sizes = [8] * 7  # seven full rows
    assert RowPackedLayout(length=8, rows_per_chunk=4).chunk_shapes(sizes) == [(4, 8)] * 2
    ladder = RowPackedLayout(length=8, rows_per_chunk=4, heights=(1, 2))
    assert ladder.chunk_shapes(sizes) == [(4, 8), (2, 8), (1, 8)]
    dear_chunks = RowPackedLayout(length=8, rows_per_chunk=4, heights=(1, 2), chunk_overhead_rows=1.01)
    assert dear_chunks.chunk_shapes(sizes) == [(4, 8)] * 2


def test_rows_are_no_longer_than_they_need_to_be() -> None:
    layout = RowPackedLayout(length=8, rows_per_chunk=2, heights=(1,), lengths=(2, 4, 12))
    assert layout.shapes == ((1, 2), (1, 4), (1, 8), (1, 12), (2, 8))
    # 11 and 1 fill a long row, 8 and 5 + 3 two rows, 3 a short one.
    assert layout.chunk_shapes([3, 11, 5, 1, 8, 3]) == [(1, 12), (2, 8), (1, 4)]
    assert layout.chunk_shapes([1]) == [(1, 2)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=20))
def test_further_lengths_never_lay_out_more(sizes: list[int]) -> None:
    """Against one length that holds every record, and against the rows of which theirs are cut."""

    def tokens(layout: Layout) -> int:
        return sum(rows * length for rows, length in layout.chunk_shapes(sizes))

    cut = RowPackedLayout(length=12, rows_per_chunk=1, lengths=(3, 6))
    assert tokens(cut) <= tokens(RowPackedLayout(length=12, rows_per_chunk=1))
    finest = RowPackedLayout(length=12, rows_per_chunk=1, lengths=tuple(range(1, 12)))
    assert tokens(finest) == sum(sizes)


def test_bucketed_uses_the_shortest_bucket_and_keeps_the_order() -> None:
    layout = BucketedLayout(lengths=(2, 4, 8), tokens_per_chunk=8)
    chunks = layout(make_pack([4, 1, 8, 3, 2]))  # tokens 1-4, 5, 6-13, 14-16, 17-18
    assert [chunk["tokens"].tolist() for chunk in chunks] == [
        [[5, 0], [17, 18], [0, 0], [0, 0]],
        [[1, 2, 3, 4], [14, 15, 16, 0]],
        [[6, 7, 8, 9, 10, 11, 12, 13]],
    ]


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(0, 10), max_size=8))
def test_fits_says_whether_the_call_succeeds(sizes: list[int]) -> None:
    layout = RowPackedOneShapeLayout(rows=3, length=8)
    if layout.fits(sizes):
        assert layout.chunk_shapes(sizes) == [(3, 8)]
    else:
        with pytest.raises(ValueError, match=r"^(record|pack)"):
            layout.chunk_shapes(sizes)


def test_one_shape_says_what_does_not_fit_even_where_the_sum_would() -> None:
    layout = RowPackedOneShapeLayout(rows=2, length=8)
    with pytest.raises(
        ValueError, match=r"pack of 3 records with 15 tokens, the longest 5, needs 3 rows of 8.*raise rows"
    ):
        layout(make_pack([5, 5, 5]))


@EACH_LAYOUT
def test_record_too_long_is_named_with_the_remedy(layout: Layout) -> None:
    with pytest.raises(ValueError, match=r"record 1 of the pack has length 17, longer than .* 16: .*cap_oversize"):
        layout(make_pack([3, 17, 20]))


@EACH_LAYOUT
def test_empty_record_is_named(layout: Layout) -> None:
    with pytest.raises(ValueError, match=r"record 2 of the pack has length 0: .*ds.filter"):
        layout(make_pack([3, 4, 0]))


def test_padded_says_when_the_pack_is_too_large() -> None:
    with pytest.raises(ValueError, match=r"pack of 3 records does not fit pack_size 2"):
        PaddedLayout(pack_size=2, length=4)(make_pack([1, 1, 1]))


A, B = np.ones(2, np.int32), np.ones(3, np.int32)


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (
            [{"tokens": A}, {"tokens": A, "x": A}],
            r"record 1 of the pack has the features \['tokens', 'x'\], but record 0",
        ),
        ([{"tokens": A}, {"x": A}], r"record 1 of the pack has no feature 'tokens', only \['x'\]: pass size_feature="),
        (
            [{"tokens": A, "x": A}, {"tokens": A, "x": B}],
            r"record 1 of the pack has 3 values in 'x', but 2 in 'tokens'",
        ),
        (
            [{"tokens": A}, {"tokens": A.astype(np.int64)}],
            r"'tokens' of record 1 of the pack has dtype int64, but int32",
        ),
        ([{"tokens": A, "id": 7}], r"'id' of record 0 of the pack has shape \(\), but only 1-D"),
        ([{"tokens": A}, A], r"record 1 of the pack is a ndarray, not a dict"),
        ([{"tokens": A, "tokens_positions": A}], r"have a feature 'tokens_positions', which the layout makes"),
    ],
)
def test_odd_records_are_named(pack: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowPackedLayout(length=8, rows_per_chunk=1)(pack)


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (RowPackedLayout, {"length": 0, "rows_per_chunk": 1}, "length must be an integer of at least 1, got 0"),
        (
            RowPackedLayout,
            {"length": 8, "rows_per_chunk": 1, "lengths": (4, 0)},
            r"each of lengths must be an integer of at least 1, got 0",
        ),
        (RowPackedLayout, {"length": 8, "rows_per_chunk": 0}, "rows_per_chunk must be an integer of at least 1, got 0"),
        (
            RowPackedLayout,
            {"length": 8, "rows_per_chunk": 2, "heights": (0,)},
            r"each of heights must be an integer of at least 1, got 0",
        ),
        (
            RowPackedLayout,
            {"length": 8, "rows_per_chunk": 2, "chunk_overhead_rows": float("nan")},
            "chunk_overhead_rows must be finite and at least 0, got nan",
        ),
        (RowPackedOneShapeLayout, {"length": 8, "rows": 0}, "rows must be an integer of at least 1"),
        (BucketedLayout, {"lengths": (), "tokens_per_chunk": 8}, r"lengths must be .* got \(\)"),
        (BucketedLayout, {"lengths": (4, 2), "tokens_per_chunk": 8}, "strictly ascending"),
        (BucketedLayout, {"lengths": (2, 3), "tokens_per_chunk": 8}, "8 is not a positive multiple of the length 3"),
        (PaddedLayout, {"length": 8, "pack_size": 0}, "pack_size must be an integer of at least 1"),
    ],
)
def test_options_out_of_range_are_refused(layout: type[Layout], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout(**options)
