"""What reordering does to training: `python -m benchmarks.neutrality [--seeds 5]`.

Trains the same small decoder on the same records in the same number of steps, in order of arrival and by the streaming
policy, aligned and shuffled, with each step's own token count as denominator and with the expected one. A step holds
the packs of 4 ranks, each with a stream of its own, added up on one device. Two corpora: the standard library in bytes,
and long-tailed medical answers from `../shared/data/text`, where those are, in tokens of their own. Prints final eval
losses with 95 % confidence intervals of the paired difference to arrival, and how the order shows in what a step
holds. About 15 minutes on two idle cores; `--quick` is a check that it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tqdm import tqdm

from bcl_grain.layouts import RowPackedLayout
from benchmarks.result import write_result
from train.compiling import enable_compile_cache
from train.config import BalanceConfig, CorpusConfig, OptimizerConfig, TrainConfig
from train.data import Pack, eval_chunks, train_dataset
from train.model import ModelConfig
from train.prepare import Prepared, prepare
from train.programs import Programs
from train.step import evaluate, init_state, train_step
from train.topology import Topology
from train.warm_up import warm_up

FloatArray = npt.NDArray[np.float64]

MEDQUAD = pathlib.Path(__file__).parents[2] / "shared" / "data" / "text" / "medquad.jsonl"
RANKS = 4
PACK_SIZE = 8
LOOKAHEAD = 8
CAPS = {"standard library": 1024, "medquad": 2048}
"""Longer records are cut."""
ARMS: dict[str, dict[str, Any]] = {
    "arrival": {"policy": "arrival"},
    "streaming aligned": {"policy": "streaming", "order": "aligned"},
    "streaming shuffled": {"policy": "streaming", "order": "shuffled"},
}
CONSTANT_TOO = ("arrival", "streaming aligned")
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""Student's t, 97.5 %, by the number of pairs."""


def make_tokenizer(texts: pathlib.Path, directory: pathlib.Path) -> dict[str, str]:
    """Trains a byte-pair encoding of 1,000 tokens on the texts; returns the corpus's settings that name it."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train([str(texts)], vocab_size=1000, special_tokens=["<eos>"], show_progress=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    return {"tokenizer": str(directory / "tokenizer.json"), "eos_token": "<eos>"}


def config_of(name: str, corpus: dict[str, Any], *, steps: int, constant: bool) -> TrainConfig:
    """Returns a run of a small model; policy and seed are an arm's business."""
    return TrainConfig(
        corpus=CorpusConfig(max_tokens=CAPS[name], on_oversize="truncate", eval_share=0.08, **corpus),
        balance=BalanceConfig(pack_size=PACK_SIZE, lookahead=LOOKAHEAD, lanes=RANKS),
        layout=RowPackedLayout(length=512, rows_per_chunk=1, lengths=(1024, CAPS[name])),
        model=ModelConfig(vocab_size=1, layers=1, width=64, heads=2, kv_heads=1, head_dim=32, hidden=160),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=10),
        steps=steps,
        constant_denominator=constant,
    )


def steps_of(prepared: Prepared, settings: dict[str, Any], seed: int) -> Iterable[list[Pack]]:
    """Returns the steps of a job: a pack of every rank, each from a stream of its own."""
    return train_dataset(
        prepared.train,
        prepared.job,
        balance=dataclasses.replace(prepared.config.balance, **settings),
        prior=prepared.prior,
        lay_out=prepared.lay_out,
        seed=seed,
    )


def train(prepared: Prepared, programs: Programs, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """Trains once; returns the final eval loss, and the tokens of every rank's packs: [ranks, steps]."""
    state = init_state(programs, seed=seed)
    tokens, counted = np.zeros((RANKS, prepared.job.steps)), np.zeros(prepared.job.steps)
    seen = 0
    for step, packs in enumerate(steps_of(prepared, settings, seed)):
        state, metrics = train_step(programs, state, [[chunk for pack in packs for chunk in pack.chunks]])
        tokens[:, step] = [pack.tokens for pack in packs]
        counted[step] = _counted(packs)
        seen += sum(pack.records for pack in packs)
    assert seen == prepared.job.steps * prepared.job.global_batch, "all arms learn from the same records"
    chunks = eval_chunks(prepared.evaluation, layout=prepared.lay_out.layout, pack_size=PACK_SIZE)
    loss = float(evaluate(programs, state.params, [chunks])["loss"])
    assert math.isfinite(loss), "the run diverged"
    return {"eval_loss": loss, "train_loss": float(metrics["loss"]), "tokens": tokens, "counted": counted}


def _counted(packs: Sequence[Pack]) -> float:
    return float(sum(chunk["loss_mask"].sum() for pack in packs for chunk in pack.chunks))


def order_figures(tokens: FloatArray, counted: FloatArray) -> dict[str, float]:
    """Returns how an order shows in what steps hold.

    Args:
        tokens: [ranks, steps] tokens of each rank's pack.
        counted: [steps] tokens that count in the loss, of all ranks.
    """
    steps = tokens.shape[1]
    mean = tokens.mean()
    cycle = max(1, (LOOKAHEAD + 1) // 2)
    per_step = tokens.mean(axis=0)
    place = np.arange(steps) % cycle
    by_place = np.array([per_step[place == p].mean() for p in range(cycle)])
    last = min(LOOKAHEAD, steps)
    return {
        "cv_of_a_step": float(counted.std() / counted.mean()),
        "cv_of_a_pack": float(tokens.std() / mean),
        "trend": float(np.corrcoef(np.arange(steps), per_step)[0, 1]),  # a drift of pack size over the job
        "sawtooth": float((by_place.max() - by_place.min()) / mean),  # between places in a cycle
        "last_packs": float(per_step[-last:].mean() / mean - 1),  # the flush, all ranks
        "last_packs_worst_rank": float(np.abs(tokens[:, -last:].mean(axis=1) / mean - 1).max()),
    }


def paired(losses: FloatArray, baseline: FloatArray) -> dict[str, float]:
    """Returns the mean difference and the half-width of its 95 % confidence interval."""
    difference = losses - baseline
    n = difference.size
    half = T_95[n] * float(difference.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return {"mean": float(difference.mean()), "half_width": half}


def study(name: str, corpus: dict[str, Any], *, steps: int, seeds: int) -> dict[str, Any]:
    """Trains all arms on one corpus, seed by seed, and prints the table."""
    runs: dict[str, list[dict[str, Any]]] = {}
    topology = Topology(process_index=0, process_count=1, local_devices=1)
    with tqdm(total=seeds * (len(ARMS) + len(CONSTANT_TOO)), desc=name) as progress:
        for constant in (False, True):
            prepared = prepare(config_of(name, corpus, steps=steps, constant=constant), topology, lambda line: None)
            programs = warm_up(prepared, lambda line: None)
            for seed in range(seeds):
                for arm in CONSTANT_TOO if constant else ARMS:
                    label = arm + (", constant" if constant else "")
                    runs.setdefault(label, []).append(train(prepared, programs, ARMS[arm], seed))
                    progress.update()
    return summarise(name, runs)


def summarise(name: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Prints a corpus's tables and returns their figures."""
    losses = {label: np.array([run["eval_loss"] for run in of_label]) for label, of_label in runs.items()}
    figures: dict[str, Any] = {}
    print(f"\n{name}: final eval loss, nats a token; difference to arrival with its 95 % interval")
    for label, values in losses.items():
        orders = [order_figures(run["tokens"], run["counted"]) for run in runs[label]]
        order = {key: float(np.mean([figure[key] for figure in orders])) for key in orders[0]}
        difference = paired(values, losses["arrival"])
        figures[label] = {"eval_loss": values.tolist(), "difference": difference, "order": order}
        print(
            f"  {label:30s} {values.mean():.4f}   {difference['mean']:+.4f} +- {difference['half_width']:.4f}   "
            + "  ".join(f"{key} {value:.3f}" for key, value in order.items())
        )
    return figures


def main() -> None:
    """Prints the tables and writes neutrality.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, choices=sorted(T_95), help="pairs of runs of an arm")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="2 seeds of 12 steps: a check that it runs")
    options = parser.parse_args()
    seeds, steps = (2, 12) if options.quick else (options.seeds, options.steps)
    enable_compile_cache(pathlib.Path("runs/xla-cache").absolute())
    figures: dict[str, Any] = {
        "job": {"ranks": RANKS, "pack_size": PACK_SIZE, "lookahead": LOOKAHEAD, "steps": steps, "seeds": seeds}
    }
    with tempfile.TemporaryDirectory() as directory:
        corpora: dict[str, dict[str, Any]] = {"standard library": {}}
        if MEDQUAD.exists():
            corpora["medquad"] = {"path": str(MEDQUAD), **make_tokenizer(MEDQUAD, pathlib.Path(directory))}
        else:
            print(f"medquad: skipped, no texts at {MEDQUAD}")
        for name, corpus in corpora.items():
            figures[name] = study(name, corpus, steps=steps, seeds=seeds)
            if not options.quick:
                write_result("neutrality", figures)


if __name__ == "__main__":
    main()
