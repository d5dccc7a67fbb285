"""What the streaming policy and the aligned order gain over windowed balancing: `python -m benchmarks.streaming`.

Counts as the design says: all arms get the same records in the same number of steps, which is checked; start and
flush belong to a job; waste is estimated waiting, in units of windowed's with shuffled order. Reads real lengths from
`../shared/data/lengths` beside the checkout. About 10 minutes on two idle cores; `--quick` takes one seed and short
jobs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from bcl_grain.cost_prior import EXACT_RECORDS, CostPrior, balanceable_ceiling
from bcl_grain.costs import TransformerCost
from bcl_grain.metrics import check_comparable, cost_cv, waste
from bcl_grain.planner import PlannerConfig
from bcl_grain.simulate import pack_costs, plan_stream
from benchmarks.result import write_result

FloatArray = npt.NDArray[np.float64]

LENGTHS = pathlib.Path(__file__).parents[2] / "shared" / "data" / "lengths"
CORPORA = (
    "gsm8k_train",
    "math_test_cot",
    "gpteacher_codegen",
    "gpteacher_toolformer",
    "bfcl_v4",
    "medquad",
    "mts_dialog",
    "taskmaster4",
    "sgd_dialogues",
    "xquad_multi",
    "p3_t0_mix",
    "alpaca_eval_outputs",
    "qmsum",
)
OUTLIER_BOUND = ("servegen_deepseek_r1",)
MORE_NATURAL = ("servegen_deepseek_r1", "mooncake_conversation", "wikisql", "molnet_hiv_graphs", "uniprot_proteins")
RANKS = 8
COST = TransformerCost(per_token=1.0, per_token_squared=1 / 30_000)
PRIOR_SAMPLE = 10_000
SHAPES = {"pack 64, k 8": (64, 8), "pack 8, k 32": (8, 32)}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to plan: settings of the planner, and the corpus's prior, if it gets one."""

    settings: dict[str, Any]
    prior: Callable[[FloatArray, int, np.random.Generator], CostPrior] | None = None
    knows_end: bool = True


def corpus_lengths(name: str) -> npt.NDArray[np.int64]:
    """Returns the length of every record of a corpus, in tokens, in its natural order."""
    with np.load(LENGTHS / f"{name}.npz") as table:
        lengths = table["len"] if "len" in table else table["prompt_len"] + table["response_len"]
    return np.maximum(1, lengths).astype(np.int64)


def corpus_costs(name: str) -> FloatArray:
    """Returns the cost of every record of a corpus, in its natural order."""
    return np.asarray(COST.of_length(corpus_lengths(name).astype(np.float64)), np.float64)


def exact_prior(costs: FloatArray, pack_size: int, rng: np.random.Generator) -> CostPrior:
    """Returns what a look at every record of the corpus gives."""
    del rng
    return _prior(costs, pack_size, EXACT_RECORDS)


def sampled_prior(costs: FloatArray, pack_size: int, rng: np.random.Generator) -> CostPrior:
    """Returns what 10,000 independent records give."""
    return _prior(rng.choice(costs, PRIOR_SAMPLE), pack_size, PRIOR_SAMPLE)


def wrong_prior(*, errors: float = 0.0, share: float = 0.0) -> Callable[..., CostPrior]:
    """Returns a prior that counts for 10,000 records and is off by so many standard errors, or by a share."""

    def prior(costs: FloatArray, pack_size: int, rng: np.random.Generator) -> CostPrior:
        del rng
        right = _prior(costs, pack_size, PRIOR_SAMPLE)
        deviation = float(np.minimum(costs, balanceable_ceiling(costs, pack_size)).std())
        mean = right.mean * (1 + share) + errors * deviation / np.sqrt(PRIOR_SAMPLE)
        return dataclasses.replace(right, mean=float(mean))

    return prior


def _prior(costs: FloatArray, pack_size: int, records: int) -> CostPrior:
    ceiling = balanceable_ceiling(costs, pack_size)
    return CostPrior(mean=float(np.minimum(costs, ceiling).mean()), records=records, ceiling=ceiling)


WINDOWED = Arm({"policy": "windowed", "order": "shuffled"})
STREAMING: dict[str, Any] = {"policy": "streaming", "order": "aligned"}
ARMS = {
    "windowed": WINDOWED,
    "windowed aligned": Arm({"policy": "windowed", "order": "aligned"}),
    "streaming": Arm(STREAMING),
    "streaming shuffled": Arm({"policy": "streaming", "order": "shuffled"}),
    "end unknown": Arm(STREAMING, knows_end=False),
    "prior, exact": Arm(STREAMING, exact_prior),
    "prior, 10k sample": Arm(STREAMING, sampled_prior),
    "prior + 2 errors": Arm(STREAMING, wrong_prior(errors=2)),
    "prior - 2 errors": Arm(STREAMING, wrong_prior(errors=-2)),
    "prior + 2 %": Arm(STREAMING, wrong_prior(share=0.02)),
    "prior - 2 %": Arm(STREAMING, wrong_prior(share=-0.02)),
}
FEW_ARMS = ("windowed", "streaming", "end unknown", "prior, exact")


def run(arm: Arm, corpus: FloatArray, streams: FloatArray, shape: tuple[int, int], width: int = 1) -> FloatArray:
    """Returns what every rank's pack of every step costs: [streams * width, steps].

    Raises:
        AssertionError: If a record is lost or comes twice.
    """
    pack_size, lookahead = shape
    num_packs = streams.shape[1] // pack_size
    prior = arm.prior(corpus, pack_size, np.random.default_rng(12345)) if arm.prior else None
    rows = []
    for stream, costs in enumerate(streams):
        # The seed is alike on all streams: it is what aligns them.
        config = PlannerConfig(
            pack_size=pack_size,
            packs_per_step=width,
            lookahead=lookahead,
            num_packs=num_packs if arm.knows_end else None,
            prior=prior,
            **arm.settings,
        )
        packs = plan_stream(config, costs)
        assert np.array_equal(np.sort(np.concatenate(packs)), np.arange(costs.size)), (arm, stream)
        rows.append(pack_costs(packs, costs).reshape(-1, width).T)
    return np.concatenate(rows)


def job(name: str, shape: tuple[int, int], steps: int, seeds: int, arms: Iterable[str]) -> dict[str, float]:
    """Returns the mean sync waste of each arm over independent jobs of `steps` steps."""
    corpus = corpus_costs(name)
    wastes: dict[str, list[float]] = {}
    for seed in range(seeds):
        streams = np.random.default_rng([seed, steps]).choice(corpus, (RANKS, shape[0] * steps))
        costs = {arm: run(ARMS[arm], corpus, streams, shape) for arm in arms}
        assert all(c.shape == (RANKS, steps) for c in costs.values())
        check_comparable(costs)
        for arm, packs in costs.items():
            wastes.setdefault(arm, []).append(waste(packs))
    return {arm: float(np.mean(values)) for arm, values in wastes.items()}


def steady(name: str, shape: tuple[int, int], arms: Iterable[str]) -> dict[str, float]:
    """Returns sync waste over steps 1,900 to 2,900 of 3,000, and the cut of the CV of pack cost, without prior."""
    corpus = corpus_costs(name)
    streams = np.random.default_rng([7, 3000]).choice(corpus, (RANKS, shape[0] * 3000))
    window = slice(1900, 2900)
    figures = {}
    for name_of_arm in arms:
        arm = dataclasses.replace(ARMS[name_of_arm], knows_end=False)
        packs = run(arm, corpus, streams, shape)[:, window]
        figures[name_of_arm] = waste(packs)
        if name_of_arm == "streaming":
            arrival = streams.reshape(RANKS, -1, shape[0]).sum(axis=2)[:, window]
            figures["cv cut"] = 1 - cost_cv(packs)[0] / cost_cv(arrival)[0]
    return figures


def one_host(name: str, shape: tuple[int, int], steps: int) -> dict[str, float]:
    """Returns the sync waste of one host with 8 devices, whose pool is as large as 8 pools of one device."""
    corpus = corpus_costs(name)
    streams = np.random.default_rng([11, steps]).choice(corpus, (1, RANKS * shape[0] * steps))
    return {arm: waste(run(ARMS[arm], corpus, streams, shape, RANKS)) for arm in ("windowed", "streaming")}


def natural(name: str, shape: tuple[int, int]) -> dict[str, float]:
    """Returns the sync waste of one epoch in file order, shards strided, and the number of steps."""
    corpus = corpus_costs(name)
    steps = corpus.size // RANKS // shape[0]
    if not steps:
        return {}
    streams = np.stack([corpus[rank::RANKS][: steps * shape[0]] for rank in range(RANKS)])
    arms = ("windowed", "windowed aligned", "streaming", "end unknown", "prior, exact")
    return {arm: waste(run(ARMS[arm], corpus, streams, shape)) for arm in arms} | {"steps": steps}


def planning_us_per_record(shape: tuple[int, int]) -> dict[str, float]:
    """Returns the best of five runs on p3_t0_mix, for each policy, in processor time."""
    corpus = corpus_costs("p3_t0_mix")
    costs = np.random.default_rng(3).choice(corpus, 64 * 1000)
    figures = {}
    for policy in ("windowed", "streaming"):
        config = PlannerConfig(pack_size=shape[0], lookahead=shape[1], policy=policy, order="aligned")
        best = np.inf
        for _ in range(5):
            begin = time.thread_time()
            plan_stream(config, costs)
            best = min(best, time.thread_time() - begin)
        figures[policy] = 1e6 * best / costs.size
    return figures


def next_latency(calls: int) -> dict[str, float]:
    """Returns the p99.9 of `next()` on an in-memory source at pack 8, k 32, against the time of planning a cycle."""
    import grain

    from bcl_grain.dataset import BatchCostLookaheadIterDataset
    from bcl_grain.telemetry import Telemetry

    corpus = corpus_costs("p3_t0_mix")
    costs = np.random.default_rng(3).choice(corpus, calls * 8).tolist()
    telemetry = Telemetry()
    source = grain.MapDataset.source(costs).to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    packs = iter(
        BatchCostLookaheadIterDataset(
            source, pack_size=8, lookahead=32, policy="streaming", order="aligned", cost_fn=float, telemetry=telemetry
        )
    )
    next(packs)  # the first pool is filled at once
    seconds, own_seconds = np.empty(calls - 1), np.empty(calls - 1)
    for i in range(calls - 1):
        begin, own = time.perf_counter(), time.thread_time()
        next(packs)
        seconds[i], own_seconds[i] = time.perf_counter() - begin, time.thread_time() - own
    config = PlannerConfig(pack_size=8, lookahead=32, policy="streaming", order="aligned")
    own = time.thread_time()
    planned = plan_stream(config, costs[: 8 * 16 * 500])
    own_cycle = (time.thread_time() - own) / (len(planned) / 16)
    cycle = telemetry.planning_seconds / telemetry.cycles
    p999, own_p999 = float(np.quantile(seconds, 0.999)), float(np.quantile(own_seconds, 0.999))
    return {
        "p999_seconds": p999,
        "planning_seconds_per_cycle": cycle,
        "ratio": p999 / cycle,
        "ratio_in_processor_time": own_p999 / own_cycle,  # what a machine with other work to do can tell
    }


def table(title: str, rows: dict[str, dict[str, float]], *, against: str | None = None) -> dict[str, float]:
    """Prints a row for each corpus; returns the geometric means of the ratios to the column `against`."""
    print(f"\n{title}")
    columns = list(next(iter(rows.values())))
    print(f"{'':22s}" + "".join(f"{column:>20s}" for column in columns))
    for name, row in rows.items():
        shown = [row[c] / row[against] if against and c not in (against, "cv cut") else row[c] for c in columns]
        print(f"{name:22s}" + "".join(f"{value:20.4f}" for value in shown), flush=True)
    if against is None:
        return {}
    ratios = {
        c: float(np.exp(np.mean([np.log(row[c] / row[against]) for name, row in rows.items() if name in CORPORA])))
        for c in columns
        if c not in (against, "cv cut")
    }
    print(f"{'geometric mean of 13':22s}" + "".join(f"{ratios.get(column, np.nan):20.4f}" for column in columns))
    return ratios


def main() -> None:
    """Prints the tables and writes streaming.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, short jobs: a check that it runs")
    quick = parser.parse_args().quick
    if not LENGTHS.is_dir():
        print(f"skipped: no real lengths at {LENGTHS}")
        return
    figures: dict[str, Any] = {"latency": next_latency(2_000 if quick else 100_000)}
    figures["planning_us_per_record"] = {label: planning_us_per_record(shape) for label, shape in SHAPES.items()}
    print(figures)
    jobs = {40: 24, 160: 8} if quick else {40: 16, 160: 8, 1000: 2}
    with concurrent.futures.ProcessPoolExecutor(2) as pool:

        def over(corpora: Iterable[str], function: Callable[..., dict[str, float]], *rest: Any) -> dict[str, Any]:
            futures = {name: pool.submit(function, name, *rest) for name in corpora}
            return {name: future.result() for name, future in futures.items()}

        for label, shape in SHAPES.items():
            few = FEW_ARMS if shape[0] == 64 else (*FEW_ARMS, "windowed aligned", "streaming shuffled")
            for steps, seeds in jobs.items():
                arms = tuple(ARMS) if steps == 1000 and shape[0] == 64 else (*few, "prior, 10k sample")
                corpora = (*CORPORA, *OUTLIER_BOUND) if shape[0] == 8 else CORPORA
                rows = over(corpora, job, shape, steps, 1 if quick else seeds, arms)
                title = f"{label}, job of {steps} steps: sync waste of windowed, and of the others as a share of it"
                figures[f"{label}, job {steps}"] = {"rows": rows, "geomean": table(title, rows, against="windowed")}
            rows = over((*CORPORA, *MORE_NATURAL), natural, shape)
            figures[f"{label}, natural order"] = rows = {name: row for name, row in rows.items() if row}
            table(f"{label}, one epoch in file order: sync waste", rows)
            write_result("streaming", figures)  # an interrupted run leaves what it has
        rows = over(CORPORA, one_host, SHAPES["pack 64, k 8"], 160)
        table("pack 64, k 8, one host with 8 devices, 160 steps: sync waste", rows)
        figures["one host"] = rows
        if not quick:
            rows = over(CORPORA, steady, SHAPES["pack 64, k 8"], ("windowed", "streaming", "prior, exact"))
            title = "pack 64, k 8, steps 1,900 to 2,900, end unknown: share of windowed's waste, cut of the CV"
            figures["steady"] = {"rows": rows, "geomean": table(title, rows, against="windowed")}
    write_result("streaming", figures)


if __name__ == "__main__":
    main()
