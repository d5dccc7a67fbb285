"""The input pipeline: records -> caps -> global shuffle -> lanes, in each BCL -> layout -> prefetch.

Records are read at random, from memory or from files that are mapped into it, so that a shuffle is global and a restore
reads only what it needs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypedDict, TypeVar, cast

import grain
import numpy as np

import bcl_grain as bcl
from bcl_grain.chunks import Chunk
from bcl_grain.cost_prior import CostPrior, estimate_cost_prior
from bcl_grain.costs import TransformerCost
from bcl_grain.layouts import Layout
from bcl_grain.planner_config import OnChangedSettings, Order, Policy
from train.config import BalanceConfig
from train.token_table import TokenTable
from train.tokenizers import IntArray, Record

T = TypeVar("T")

READ_IN_PLACE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
"""No reader threads: for records in memory they cost 15 times what they save."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capped:
    """Records after the cap, and what it did.

    Attributes:
        records: Small enough, each with at least one token that counts in the loss.
        num_oversize: Records that were larger than the cap.
        tokens_removed: What of them was cut off or left out.
        num_unlearnable: Records left out because none of the tokens that remain counts in the loss.
    """

    records: TokenTable
    num_oversize: int
    tokens_removed: int
    num_unlearnable: int

    def describe(self) -> str:
        """Returns one line for the user."""
        return (
            f"{len(self.records):,} records; {self.num_oversize:,} above the cap lost {self.tokens_removed:,} tokens, "
            f"{self.num_unlearnable:,} had no response left and were dropped"
        )


def cap_records(records: TokenTable, *, max_tokens: int, on_oversize: str) -> Capped:
    """Applies the cap, as `bcl_grain.cap_oversize` would, from the sizes alone; only what is cut is read.

    It comes before sharding: the number of steps follows from what is left.

    Raises:
        ValueError: If a record is too large and `on_oversize` is "error", or no record is left.
    """
    too_large = records.sizes > max_tokens
    num_oversize = int(too_large.sum())
    if num_oversize and on_oversize == "error":
        first = int(np.argmax(too_large))
        raise ValueError(
            f"record {first} has {records.sizes[first]:,} tokens, {num_oversize:,} of {len(records):,} records have "
            f"more than max_tokens {max_tokens:,}"
        )
    capped = records.cut(max_tokens) if on_oversize == "truncate" else records.select(~too_large)
    kept = capped.select(capped.loss_tokens > 0)
    if not len(kept):
        raise ValueError(f"no record of {len(records)} is left after the cap of {max_tokens} tokens: raise max_tokens")
    return Capped(
        records=kept,
        num_oversize=num_oversize,
        tokens_removed=_total(records.sizes) - _total(capped.sizes),
        num_unlearnable=len(capped) - len(kept),
    )


def _total(sizes: IntArray) -> int:
    return int(sizes.sum(dtype=np.int64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSize:
    """How long a job is. It follows from global numbers alone, so that all processes agree without asking.

    Attributes:
        steps: Optimizer updates.
        global_batch: Records of one step, all ranks together.
        epochs: Times that the corpus is read, the last one perhaps in part.
        num_unused: Records of the last epoch that no step uses.
    """

    steps: int
    global_batch: int
    epochs: int
    num_unused: int


def job_size(num_records: int, *, pack_size: int, ranks: int, steps: int | None, epochs: int) -> JobSize:
    """Returns the size of a job of `steps` steps of `ranks` packs, or without it of as many as `epochs` epochs fill.

    Records may cross an epoch's end inside a pack: the stream is cut into steps once, not once an epoch.

    Raises:
        ValueError: If the corpus is smaller than one step.

    >>> job_size(100, pack_size=8, ranks=2, steps=None, epochs=2)
    JobSize(steps=12, global_batch=16, epochs=2, num_unused=8)
    """
    global_batch = pack_size * ranks
    if num_records < global_batch:
        raise ValueError(
            f"the corpus has {num_records} records, but one step takes {global_batch} ({ranks} ranks of pack_size "
            f"{pack_size}): lower balance.pack_size, or give a larger corpus"
        )
    if steps is None:
        steps = epochs * num_records // global_batch
    epochs = math.ceil(steps * global_batch / num_records)
    return JobSize(
        steps=steps,
        global_batch=global_batch,
        epochs=epochs,
        num_unused=epochs * num_records - steps * global_batch,
    )


def arrivals(source: Sequence[T], job: JobSize, *, seed: int, shard: int, num_shards: int) -> grain.MapDataset[T]:
    """Returns what one shard reads in a job: every epoch shuffled anew as a whole, then dealt out record by record.

    The shards of any number together hold the same `job.steps * job.global_batch` records.
    """
    ds = grain.MapDataset.source(source).seed(seed).shuffle().repeat(job.epochs)
    return ds[shard : job.steps * job.global_batch : num_shards]


def arrival_sizes(sizes: IntArray, job: JobSize, *, seed: int, shard: int, num_shards: int) -> IntArray:
    """Returns the sizes of the records that one shard reads in a job, in the order of `arrivals`."""
    ds = arrivals(cast(Sequence[int], sizes), job, seed=seed, shard=shard, num_shards=num_shards)
    return np.array(list(ds.to_iter_dataset(READ_IN_PLACE)), np.int32)


class Pack(NamedTuple):
    """What one device consumes in one step.

    Attributes:
        chunks: Its arrays.
        records: Number of records.
        tokens: Their tokens.
        executed_tokens: Tokens of the chunks, padding included.
        cost: Estimated cost of the records.
        executed_cost: Cost of the chunks.
    """

    chunks: list[Chunk]
    records: int
    tokens: int
    executed_tokens: int
    cost: float
    executed_cost: float


@dataclasses.dataclass(frozen=True)
class LayOut:
    """Turns a list of records into a `Pack`."""

    layout: Layout
    cost: TransformerCost

    def __call__(self, records: Sequence[Record]) -> Pack:
        """Runs the layout and counts."""
        chunks = self.layout(records)
        shapes = [chunk["tokens"].shape for chunk in chunks]
        return Pack(
            chunks=chunks,
            records=len(records),
            tokens=sum(len(record["tokens"]) for record in records),
            executed_tokens=sum(rows * length for rows, length in shapes),
            cost=sum(self.cost(record) for record in records),
            executed_cost=sum(self.cost.of_chunk(rows, length) for rows, length in shapes),
        )


def cost_prior(
    records: Sequence[Record], balance: BalanceConfig, cost: TransformerCost, *, seed: int
) -> CostPrior | None:
    """Returns what all ranks know of the mean cost before the first step, from the records before they are sharded."""
    if not balance.prior_records:
        return None
    return estimate_cost_prior(records, cost, pack_size=balance.pack_size, num_records=balance.prior_records, seed=seed)


class PlannerSettings(TypedDict):
    """How a lane's records become packs: what the pipeline gets, and whoever plans beforehand what it will do."""

    pack_size: int
    packs_per_step: int
    lookahead: int
    policy: Policy
    order: Order
    num_packs: int
    prior: CostPrior | None
    seed: int


def planner_settings(job: JobSize, balance: BalanceConfig, *, prior: CostPrior | None, seed: int) -> PlannerSettings:
    """Returns a lane's settings; the order's key is the same on all lanes, so that the policy may align them."""
    packs_per_step = balance.packs_per_step or 1
    return {
        "pack_size": balance.pack_size,
        "packs_per_step": packs_per_step,
        "lookahead": balance.lookahead,
        "policy": balance.policy,
        "order": balance.order,
        "num_packs": job.steps * packs_per_step,
        "prior": prior,
        "seed": seed,
    }


def train_dataset(
    records: Sequence[Record],
    job: JobSize,
    *,
    balance: BalanceConfig,
    prior: CostPrior | None,
    lay_out: LayOut,
    seed: int,
    capacity: tuple[int, int] | None = None,
    host: int = 0,
    num_hosts: int = 1,
    prefetch_steps: int = 0,
    telemetry: dict[int, bcl.Telemetry] | None = None,
    on_changed_balance: OnChangedSettings = "error",
) -> grain.IterDataset[list[Pack]]:
    """Returns the steps of one host: the packs of the lanes that it serves.

    With a `capacity` every pack fits so many (rows, length). With `prefetch_steps` a thread lays them out ahead. An
    iterator must be closed then before the interpreter ends, or the process aborts. `telemetry` gets an entry for each
    lane served, for one iterator. `on_changed_balance`: see `RuntimeConfig`.
    """
    counters = {} if telemetry is None else telemetry
    settings = planner_settings(job, balance, prior=prior, seed=seed)

    def lane(shard: grain.MapDataset[Record], number: int) -> grain.IterDataset[Pack]:
        packs = shard.to_iter_dataset(READ_IN_PLACE).pipe(
            bcl.BatchCostLookaheadIterDataset,
            **settings,
            cost_fn=lay_out.cost,
            capacity=capacity,
            size_fn=None if capacity is None else _num_tokens,
            telemetry=counters.setdefault(number, bcl.Telemetry()),
            on_changed_settings=on_changed_balance,
        )
        return packs.map(lay_out)

    ds: grain.IterDataset[list[Pack]] = bcl.serve_lanes(
        arrivals(records, job, seed=seed, shard=0, num_shards=1),
        lane,
        num_lanes=balance.lanes or num_hosts,
        host=host,
        num_hosts=num_hosts,
        packs_per_step=settings["packs_per_step"],
    )
    if not prefetch_steps:
        return ds
    return grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=prefetch_steps)


def balance_figures(telemetry: Iterable[bcl.Telemetry]) -> dict[str, float]:
    """Returns what the lanes' transformations know about themselves, in one: sums of counters, means or maxima else."""
    lanes = [lane.figures() for lane in telemetry if lane.cycles]
    if not lanes:
        return {}
    sums = (
        "packs",
        "records",
        "records_dropped",
        "packs_over_capacity",
        "overdue",
        "planning_seconds",
        "reading_seconds",
    )
    figures = {name: sum(lane[name] for lane in lanes) for name in sums}
    figures |= {name: sum(lane[name] for lane in lanes) / len(lanes) for name in ("pack_cost_cv", "target")}
    return figures | {name: max(lane[name] for lane in lanes) for name in ("drift", "oldest_wait")}


def _num_tokens(record: Record) -> int:
    return len(record["tokens"])


def eval_chunks(
    records: Sequence[Record], *, layout: Layout, pack_size: int, shard: int = 0, num_shards: int = 1
) -> list[Chunk]:
    """Returns the chunks of one shard of the eval records, each record in exactly one of them.

    The last pack may be short: the layout takes any number of records up to `pack_size`.
    """
    own = records[shard::num_shards]
    return [chunk for start in range(0, len(own), pack_size) for chunk in layout(own[start : start + pack_size])]
