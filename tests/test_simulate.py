from __future__ import annotations

from typing import Any, get_args

import grain
import numpy as np
import numpy.typing as npt
import pytest

import bcl_grain as bcl
from bcl_grain import baseline_runs
from bcl_grain.arms import policy_names, run_policy
from bcl_grain.draws import DrawKind, Draws
from bcl_grain.job import Job, rank_lengths
from bcl_grain.planner import PlannerConfig, Policy
from bcl_grain.simulate import chunks_cost, plan_stream, simulate, simulate_stream
from tests.policies import EACH_POLICY, EACH_STEP_WIDTH, PolicyCase

COST = bcl.TransformerCost(1.0, 0.01)
LAYOUT = bcl.RowPackedLayout(length=512, rows_per_chunk=2, heights=(1,))
POPULATION = np.minimum(np.random.default_rng(5).lognormal(4.5, 0.8, 3000).astype(np.int64) + 1, 500)


def make_job(*, streams: int = 4, steps: int = 24, packs_per_step: int = 1, kind: DrawKind = "iid", **more: Any) -> Job:
    draws = Draws(population=POPULATION, kind=kind, streams=streams, records=8 * packs_per_step * steps, seed=3)
    return Job(draws=draws, pack_size=8, packs_per_step=packs_per_step, cost=COST, **more)


@EACH_POLICY
@EACH_STEP_WIDTH
def test_the_dataset_and_the_simulator_give_the_same_packs_one_by_one(policy: PolicyCase, packs_per_step: int) -> None:
    settings = {**policy.settings, "pack_size": 5, "packs_per_step": packs_per_step, "lookahead": 4, "seed": 2}
    lengths = POPULATION[: 5 * packs_per_step * 15]
    records = [{"tokens": np.full(n, i, np.int32)} for i, n in enumerate(lengths)]
    ds = (
        grain.MapDataset.source(records)
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        .pipe(bcl.BatchCostLookaheadIterDataset, cost_fn=COST, **settings)
    )
    simulated = plan_stream(PlannerConfig(**settings), COST.of_length(lengths))
    run = simulate_stream(PlannerConfig(**settings), lengths, COST, LAYOUT)
    assert run.executed is not None
    packs = list(ds)
    assert len(packs) == len(simulated) == 15 * packs_per_step
    for i, (pack, expected) in enumerate(zip(packs, simulated, strict=True)):
        step, rank = divmod(i, packs_per_step)
        assert [int(record["tokens"][0]) for record in pack] == expected
        assert sum(map(COST, pack)) == pytest.approx(run.estimated[rank, step])
        chunks = [chunk["tokens"].shape for chunk in LAYOUT(pack)]
        assert sum(COST.of_chunk(*shape) for shape in chunks) == pytest.approx(run.executed[rank, step])


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("packs_per_step", [1, 2])
def test_every_arm_consumes_the_identical_records_in_the_same_steps(policy: str, packs_per_step: int) -> None:
    job = make_job(packs_per_step=packs_per_step)
    settings: dict[str, Any] = {"lookahead": 6} if policy in get_args(Policy) else {}
    tally = run_policy(policy, job, **settings)
    lengths = np.concatenate([job.draws.stream(i).lengths for i in range(4)])
    assert tally.records == lengths.size == job.ranks * 24 * 8
    assert tally.useful_tokens == lengths.sum()
    assert tally.step_sum.sum() == pytest.approx(COST.of_length(lengths).sum(), rel=1e-12)
    assert (tally.ranks, tally.step_max.size) == (job.ranks, 24)
    assert tally.arm().sync_waste >= 0


def test_a_baseline_that_loses_a_record_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(costs: Any, *, pack_size: int) -> Any:
        ranks, n = costs.shape
        places = np.arange(ranks * n).reshape(ranks, -1, pack_size)
        places[0, 0, 0] = places[0, 0, 1]
        return places.tolist()

    monkeypatch.setattr(baseline_runs, "global_karmarkar_karp", lossy)
    with pytest.raises(RuntimeError, match="lost a record or gave one twice"):
        run_policy("kk", make_job())


def test_an_arm_with_other_records_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = baseline_runs.BASELINES["kk"](make_job(), lambda done, total: None)
    monkeypatch.setitem(baseline_runs.BASELINES, "kk", lambda job, progress: run._replace(records=run.records - 1))
    with pytest.raises(RuntimeError, match=r"kk consumed 767 records in 24 steps instead of 768"):
        run_policy("kk", make_job())


@pytest.mark.parametrize("policy", ["arrival", "windowed"])
@EACH_STEP_WIDTH
def test_running_sums_give_the_figures_of_the_whole_matrix(policy: Any, packs_per_step: int) -> None:
    job = make_job(streams=70, packs_per_step=packs_per_step, layout=LAYOUT, first_step=3, last_step=20)
    tally = run_policy(policy, job, lookahead=6)
    config = PlannerConfig(policy=policy, pack_size=8, packs_per_step=packs_per_step, lookahead=6)
    whole = simulate(config, np.stack([job.draws.stream(i).lengths for i in range(70)]), COST, LAYOUT)
    expected = whole.arm(3, 20)
    for name in ("cost_cv", "cost_cv_error", "sync_waste", "total_waste", "step_cost", "executed_step_cost"):
        assert getattr(tally.arm(), name) == pytest.approx(getattr(expected, name), rel=1e-12)
    assert tally.padding == whole.padding
    assert tally.records == whole.records


def test_processes_change_nothing() -> None:
    job = make_job(streams=5)
    alone, together = (run_policy("windowed", job, workers=workers, lookahead=6) for workers in (1, 2))
    assert alone.arm() == together.arm()
    assert np.array_equal(alone.step_max, together.step_max)


def test_progress_goes_up_to_the_end() -> None:
    for policy in ("windowed", "kk", "length-grouped", "grain-first-fit"):
        told: list[tuple[int, int]] = []
        settings: dict[str, Any] = {"lookahead": 6} if policy == "windowed" else {}
        run_policy(policy, make_job(), on_progress=lambda *at, told=told: told.append(at), **settings)
        assert told == sorted(told)
        assert told[-1][0] == told[-1][1]


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown policy 'magic': choose among arrival, windowed, .*mffd"):
        run_policy("magic", make_job())


def test_ranks_of_a_stream_share_its_steps_as_in_arrival_order() -> None:
    job = make_job(streams=2, packs_per_step=3)
    config = PlannerConfig(policy="arrival", pack_size=8, packs_per_step=3)
    matrix = simulate(config, np.stack([job.draws.stream(i).lengths for i in range(2)]), COST).estimated
    by_rank = COST.of_length(rank_lengths(job)).reshape(6, -1, 8).sum(axis=2)
    np.testing.assert_allclose(by_rank, matrix)


def test_bins_cost_what_they_hold_and_what_they_are_padded_to() -> None:
    job = make_job(bin_tokens=600)
    tally = run_policy("mffd", job)
    # All ranks have as many bins, so the dearest executed step is any rank's.
    assert tally.executed_max is not None
    assert tally.bins is not None
    assert tally.bins_per_rank == pytest.approx(tally.bins / (4 * 24))
    assert tally.executed_max.sum() * 4 == pytest.approx(tally.bins * COST.of_chunk(1, 600))
    assert tally.padding == pytest.approx(1 - tally.useful_tokens / (tally.bins * 600))


def test_attention_inside_records_only_leaves_the_padding_linear() -> None:
    shapes, sizes = [(2, 16), (1, 8)], [5, 7, 9, 3]
    expected = 1.0 * (32 + 8) + 0.01 * sum(n * n for n in sizes)
    assert chunks_cost(COST, shapes, sizes, "segments") == pytest.approx(expected)
    assert chunks_cost(COST, shapes, sizes) == pytest.approx(40 + 0.01 * (2 * 256 + 64))


def streams_of(kind: DrawKind, *, streams: int, records: int, population: npt.NDArray[np.int64]) -> list[list[int]]:
    draws = Draws(population=population, kind=kind, streams=streams, records=records, seed=1)
    return [draws.stream(i).lengths.tolist() for i in range(streams)]


def test_natural_order_is_dealt_out_record_by_record_and_repeated() -> None:
    dealt = streams_of("order", streams=3, records=5, population=np.arange(1, 8))
    assert [length for row in zip(*dealt, strict=True) for length in row] == [*range(1, 8), *range(1, 8), 1]


def test_each_shuffled_epoch_holds_every_record_once() -> None:
    dealt = streams_of("shuffled", streams=3, records=14, population=np.arange(1, 22))
    flat = [length for row in zip(*dealt, strict=True) for length in row]
    assert sorted(flat[:21]) == sorted(flat[21:]) == list(range(1, 22))
    assert list(range(1, 22)) != flat[:21] != flat[21:] != list(range(1, 22))
    assert dealt == streams_of("shuffled", streams=3, records=14, population=np.arange(1, 22))


def test_independent_draws_differ_between_streams_and_have_the_population_s_mean() -> None:
    dealt = streams_of("iid", streams=2, records=20_000, population=POPULATION)
    assert dealt[0] != dealt[1]
    assert np.mean(dealt) == pytest.approx(POPULATION.mean(), rel=0.02)


def test_a_cap_cuts_and_counts() -> None:
    draws = Draws(population=np.array([1, 5, 9, 7]), kind="order", streams=2, records=2, cap=6)
    assert [draws.stream(i).lengths.tolist() for i in range(2)] == [[1, 6], [5, 6]]
    assert draws.records_capped == 2
    assert draws.longest == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"population": np.array([3, 0])}, "population must be"),
        ({"kind": "sorted"}, "draws must be one of"),
        ({"streams": 0}, "streams must be at least 1"),
        ({"cap": 0}, "cap must be at least 1"),
    ],
)
def test_draws_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Draws(**{"population": POPULATION, "kind": "iid", "streams": 1, "records": 4, **settings})


def test_a_job_is_a_whole_number_of_steps_and_reports_some_of_them() -> None:
    draws = Draws(population=POPULATION, kind="iid", streams=1, records=20)
    with pytest.raises(ValueError, match="20 records a stream are no whole number of steps of 1 x 8"):
        Job(draws=draws, pack_size=8, cost=COST)
    with pytest.raises(ValueError, match="24 steps, so steps 5 to 30 can't be reported"):
        run_policy("arrival", make_job(first_step=5, last_step=30))


def test_windowed_variability_falls_as_theory_says() -> None:
    # One window's packs are equal, windows are independent: 1 - 1 / sqrt(k), reached from 300 windows a rank.
    draws = Draws(population=POPULATION, kind="iid", streams=4, records=16 * 16 * 300)
    job = Job(draws=draws, pack_size=16, cost=bcl.token_cost())
    arrival, windowed = (run_policy(p, job, lookahead=16).arm().cost_cv for p in ("arrival", "windowed"))
    assert 1 - windowed / arrival == pytest.approx(1 - 1 / np.sqrt(16), abs=0.02)


def test_no_wait_in_a_window() -> None:
    assert run_policy("windowed", make_job(), lookahead=6).max_wait_cycles == 0
    assert run_policy("mffd", make_job()).max_wait_cycles is None


def test_baselines_step_by_step_and_in_blocks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    tallies = []
    for at_once in (1, 10**9):
        monkeypatch.setattr(baseline_runs, "_RECORDS_AT_ONCE", at_once)
        tallies.append([run_policy(policy, make_job(layout=LAYOUT)) for policy in ("mffd", "kk")])
    for one, other in zip(*tallies, strict=True):
        assert one.arm() == other.arm()
        assert one.executed_tokens == other.executed_tokens
