from __future__ import annotations

import copy
import pickle
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcl_grain.caps import CapReport, cap_oversize, fit_cap

READ_OPTIONS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
MAX_SIZE = 10
SIZES = [3, 12, 10, 31, 1, 11]


def make_records(sizes: list[int]) -> list[dict[str, Any]]:
    return [
        {"tokens": np.arange(100 * i, 100 * i + n), "loss_mask": np.arange(n, dtype=np.float32), "id": i}
        for i, n in enumerate(sizes)
    ]


def halves(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Splits into pieces of MAX_SIZE, the last the shortest."""
    n = len(record["tokens"])
    return [
        {name: record[name][i : i + MAX_SIZE] for name in ("tokens", "loss_mask")} | {"id": record["id"]}
        for i in range(0, n, MAX_SIZE)
    ]


def capped(
    kind: str, on_oversize: Any, report: CapReport | None = None, sizes: list[int] = SIZES, **options: Any
) -> Any:
    """The dataset under test, a MapDataset or an IterDataset, as one that can be iterated."""
    ds = grain.MapDataset.source(make_records(sizes))
    if kind == "iter":
        ds = ds.to_iter_dataset(READ_OPTIONS)
    if on_oversize == "split":
        options = {"split_fn": halves, "max_pieces": 5 if kind == "map" else None} | options
    ds = ds.pipe(cap_oversize, max_size=MAX_SIZE, on_oversize=on_oversize, report=report, **options)
    return ds.to_iter_dataset(READ_OPTIONS) if kind == "map" else ds


EACH_KIND = pytest.mark.parametrize("kind", ["map", "iter"])


@EACH_KIND
def test_error_names_position_size_and_remedy(kind: str) -> None:
    iterator = iter(capped(kind, "error"))
    assert next(iterator)["id"] == 0
    with pytest.raises(
        ValueError, match=r"record 1 has size 12, above max_size 10: raise max_size, or pass on_oversize"
    ):
        next(iterator)


@EACH_KIND
def test_error_lets_everything_else_through(kind: str) -> None:
    sizes = [1, 10, 5]
    np.testing.assert_equal(list(capped(kind, "error", sizes=sizes)), make_records(sizes))


@EACH_KIND
def test_truncate_cuts_every_feature_of_the_size(kind: str) -> None:
    report = CapReport()
    got = list(capped(kind, "truncate", report))
    expected = make_records(SIZES)
    for record in expected:
        for name in ("tokens", "loss_mask"):
            record[name] = record[name][:MAX_SIZE]
    np.testing.assert_equal(got, expected)
    assert (report.records, report.size_removed) == (3, 2 + 21 + 1)


@EACH_KIND
def test_truncate_takes_the_users_function(kind: str) -> None:
    report = CapReport()
    got = list(
        capped(kind, "truncate", report, truncate_fn=lambda record, size: {"tokens": record["tokens"][-size + 1 :]})
    )
    assert got[1]["tokens"].tolist() == list(range(103, 112))
    assert (report.records, report.size_removed) == (3, 3 + 22 + 2)


@EACH_KIND
def test_truncate_that_leaves_too_much_is_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match=r"record of size 12 still has size 11 after truncate_fn, above max_size 10"):
        list(capped(kind, "truncate", CapReport(), truncate_fn=lambda r, size: {"tokens": r["tokens"][:11]}))


@EACH_KIND
def test_drop_leaves_the_others_in_order(kind: str) -> None:
    report = CapReport()
    assert [record["id"] for record in capped(kind, "drop", report)] == [0, 2, 4]
    assert (report.records, report.size_removed) == (3, 12 + 31 + 11)


@EACH_KIND
def test_split_keeps_every_token(kind: str) -> None:
    report = CapReport()
    got = list(capped(kind, "split", report))
    assert [(record["id"], len(record["tokens"])) for record in got] == [
        (0, 3),
        *[(1, 10), (1, 2)],
        (2, 10),
        *[(3, 10), (3, 10), (3, 10), (3, 1)],
        (4, 1),
        *[(5, 10), (5, 1)],
    ]
    for name in ("tokens", "loss_mask"):
        np.testing.assert_array_equal(
            np.concatenate([record[name] for record in got]),
            np.concatenate([record[name] for record in make_records(SIZES)]),
        )
    assert (report.records, report.size_removed) == (3, 0)


@EACH_KIND
def test_split_counts_what_the_pieces_lack(kind: str) -> None:
    report = CapReport()
    list(capped(kind, "split", report, split_fn=lambda record: halves(record)[:1]))
    assert (report.records, report.size_removed) == (3, 2 + 21 + 1)


@EACH_KIND
@pytest.mark.parametrize(("split_fn", "sizes"), [(lambda record: [record], r"\[12\]"), (lambda record: [], r"\[\]")])
def test_pieces_are_checked(kind: str, split_fn: Any, sizes: str) -> None:
    with pytest.raises(ValueError, match=rf"record of size 12 was split by split_fn into sizes {sizes}, but"):
        list(capped(kind, "split", CapReport(), split_fn=split_fn))


@EACH_KIND
@pytest.mark.parametrize("on_oversize", ["truncate", "drop", "split"])
def test_report_grows_with_the_iteration(kind: str, on_oversize: Any) -> None:
    report = CapReport()
    iterator = iter(capped(kind, on_oversize, report))
    assert report.records == 0
    next(iterator)
    assert report.records == 0
    next(iterator)
    assert report.records == 1


@EACH_KIND
@pytest.mark.parametrize("on_oversize", ["error", "truncate", "drop", "split"])
def test_checkpoints_exactly(kind: str, on_oversize: Any) -> None:
    sizes = [3, 10, 1, 5] if on_oversize == "error" else SIZES
    grain.experimental.assert_equal_output_after_checkpoint(capped(kind, on_oversize, CapReport(), sizes))


@EACH_KIND
def test_restore_between_pieces_does_not_count_again(kind: str) -> None:
    report = CapReport()
    ds = capped(kind, "split", report)
    iterator = iter(ds)
    next(iterator)
    next(iterator)  # the first piece of record 1
    assert report.records == 1
    restored = iter(ds)
    restored.set_state(iterator.get_state())
    assert next(restored)["tokens"].tolist() == [110, 111]
    assert report.records == 1


@pytest.mark.parametrize("on_oversize", ["truncate", "drop", "split"])
def test_many_reading_threads_and_epochs_count_into_one_report(on_oversize: Any) -> None:
    report = CapReport()
    ds = grain.MapDataset.source(make_records(SIZES * 20)).repeat(3)
    options = {"split_fn": halves, "max_pieces": 5} if on_oversize == "split" else {}
    ds = ds.pipe(cap_oversize, max_size=MAX_SIZE, on_oversize=on_oversize, report=report, **options)
    for _ in ds.to_iter_dataset(grain.ReadOptions(num_threads=8, prefetch_buffer_size=64)):
        pass
    assert report.records == 3 * 20 * 3


def test_threads_that_work_on_copies_count_into_the_same_report() -> None:
    report = CapReport()
    ds = capped("iter", "drop", report)
    assert len(list(grain.experimental.multithread_prefetch(ds, num_threads=2, buffer_size=2))) == 3
    assert report.records == 3


def test_report_arrives_empty_when_pickled_and_stays_itself_when_copied() -> None:
    report = CapReport()
    report.add(5)
    assert copy.deepcopy(report) is report
    arrived = pickle.loads(pickle.dumps(report))
    assert (arrived.records, arrived.size_removed) == (0, 0)
    arrived.add(1)
    assert (report.records, arrived.records) == (1, 1)


@EACH_KIND
def test_size_fn_decides(kind: str) -> None:
    report = CapReport()
    got = capped(kind, "drop", report, size_fn=lambda record: 11 if record["id"] == 4 else 0.5)
    assert [record["id"] for record in got] == [0, 1, 2, 3, 5]
    assert (report.records, report.size_removed) == (1, 11)


def test_a_size_that_is_not_a_number_does_not_pass() -> None:
    with pytest.raises(ValueError, match="record 0 has size nan"):
        list(capped("iter", "error", size_fn=lambda record: float("nan")))


def test_record_without_tokens_is_an_error() -> None:
    ds = grain.MapDataset.source([{"text": "x"}])
    with pytest.raises(ValueError, match="pass a size_fn"):
        list(ds.pipe(cap_oversize, max_size=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_size": 0}, "max_size must be an integer of at least 1, got 0"),
        ({"on_oversize": "explode"}, "on_oversize must be .* got 'explode'"),
        ({"on_oversize": "drop"}, r"'drop' changes the data: pass report=CapReport\(\)"),
        ({"on_oversize": "split"}, "need each other"),
        ({"split_fn": halves}, "need each other"),
        ({"on_oversize": "split", "split_fn": halves}, "max_pieces is needed to split a MapDataset"),
        ({"max_pieces": 3}, "max_pieces is needed to split a MapDataset, and only there, got 3"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grain.MapDataset.source([]).pipe(cap_oversize, **{"max_size": 4, **options})


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.floats(0.5, 100))
def test_fit_cap_is_the_smallest_that_covers(sizes: list[int], percentile: float) -> None:
    def percent_at_most(cap: int) -> float:
        return 100 * sum(size <= cap for size in sizes) / len(sizes)

    cap = fit_cap(sizes, percentile)
    assert cap in sizes
    assert percent_at_most(cap) >= percentile - 1e-9
    assert percent_at_most(cap - 1) < percentile + 1e-9


@pytest.mark.parametrize(
    ("sizes", "percentile", "message"),
    [([], 99, "non-empty"), ([3, 0], 99, "at least 1"), ([3], 0, "got 0"), ([3], 101, "got 101")],
)
def test_fit_cap_refuses_bad_input(sizes: list[int], percentile: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_cap(sizes, percentile)


@pytest.mark.parametrize("on_oversize", ["error", "truncate", "drop", "split"])
def test_dataset_can_be_sent_to_another_process(on_oversize: Any) -> None:
    sizes = [3, 10] if on_oversize == "error" else SIZES
    ds = capped("iter", on_oversize, CapReport(), sizes)
    np.testing.assert_equal(list(pickle.loads(pickle.dumps(ds))), list(ds))
