from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from bcl_grain.workloads import load_workload, nemo_rl_stand_ins, workload_names
from benchmarks.make_workloads import LENGTHS, OUTPUT, make_workloads, read_lengths, to_json

TOLERANCE = 0.02
SAMPLES = 300_000

needs_lengths = pytest.mark.skipif(
    not LENGTHS.is_dir(), reason="no folder of record lengths beside the checkout (shared/data/lengths)"
)


def assert_statistics(lengths: np.ndarray, mean: float, cv: float, p99: float) -> None:
    assert lengths.mean() == pytest.approx(mean, rel=TOLERANCE)
    assert lengths.std() / lengths.mean() == pytest.approx(cv, rel=TOLERANCE)
    assert np.quantile(lengths, 0.99) == pytest.approx(p99, rel=TOLERANCE)


@pytest.mark.parametrize("name", workload_names())
def test_samples_have_the_mean_cv_and_p99_of_the_corpus(name: str) -> None:
    workload = load_workload(name)
    sample = workload.sample(SAMPLES, np.random.default_rng(1))
    assert sample.shape == (SAMPLES,)
    assert sample.dtype == np.int64
    assert sample.min() >= 1
    assert_statistics(sample, workload.mean, workload.cv, workload.p99)


@needs_lengths
@pytest.mark.parametrize("name", workload_names())
def test_samples_agree_with_the_lengths_themselves(name: str) -> None:
    lengths = read_lengths(LENGTHS / f"{name}.npz")
    workload = load_workload(name)
    sample = workload.sample(SAMPLES, np.random.default_rng(2))
    assert_statistics(sample, lengths.mean(), lengths.std() / lengths.mean(), float(np.quantile(lengths, 0.99)))
    assert workload.quantile([0.0, 1.0]).tolist() == [lengths.min(), lengths.max()]
    assert workload.records == lengths.size


@needs_lengths
def test_the_package_file_is_what_its_script_makes() -> None:
    assert OUTPUT.read_text(encoding="utf-8") == to_json(make_workloads(LENGTHS))


@pytest.mark.parametrize("name", workload_names())
def test_a_table_is_a_distribution_that_says_where_it_comes_from(name: str) -> None:
    workload = load_workload(name)
    assert workload.kind in ("sft", "trace", "other")
    assert all((workload.description, workload.source, workload.licence, workload.unit))
    assert workload.probabilities[0] == 0.0
    assert workload.probabilities[-1] == 1.0
    assert len(workload.probabilities) == len(workload.quantiles)
    assert (np.diff(workload.probabilities) > 0).all()
    assert (np.diff(workload.quantiles) >= 0).all()
    assert workload.quantiles[0] >= 1
    assert workload.records >= 1_000


def test_there_are_workloads_of_every_kind() -> None:
    kinds = {kind: workload_names(kind) for kind in ("sft", "trace", "other")}
    assert sorted(sum(kinds.values(), ())) == list(workload_names())
    assert len(workload_names()) >= 24
    assert min(map(len, kinds.values())) >= 4


def test_thirteen_corpora_are_said_to_be_stand_ins() -> None:
    names = nemo_rl_stand_ins()
    assert len(names) == 13
    for name in names:
        assert load_workload(name).kind == "sft"
        assert load_workload(name).nemo_rl_stand_in
    assert "not those corpora" in (nemo_rl_stand_ins.__doc__ or "")


def test_sampling_depends_on_the_generator_alone() -> None:
    workload = load_workload("medquad")
    first, second = (workload.sample(50, np.random.default_rng(3)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_workload_cannot_be_changed() -> None:
    workload = load_workload("medquad")
    with pytest.raises(dataclasses.FrozenInstanceError):
        workload.mean = 1.0  # type: ignore[misc]
    assert isinstance(workload.quantiles, tuple)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("mooncake", "did you mean mooncake_conversation"),
        ("gsm8k_trian", "did you mean gsm8k_train"),
        ("zzz", "unknown workload 'zzz': pass one of .*medquad"),
        ("", "unknown workload '': pass one of .*medquad"),
    ],
)
def test_an_unknown_name_is_refused_with_the_similar_ones(name: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        load_workload(name)


def test_tables_hold_no_records() -> None:
    file = Path(OUTPUT)
    assert file.stat().st_size < 50_000
    tables = json.loads(file.read_text(encoding="utf-8"))
    assert len(tables["probabilities"]) < 150
