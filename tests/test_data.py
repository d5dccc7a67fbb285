"""The input pipeline: nothing lost, equal step counts by construction, exact restores."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Sequence
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import train.data
from bcl_grain.costs import TransformerCost
from bcl_grain.layouts import BucketedLayout, Layout, PaddedLayout, RowPackedLayout
from train.config import BalanceConfig
from train.data import (
    JobSize,
    LayOut,
    Pack,
    arrivals,
    cap_records,
    cost_prior,
    eval_chunks,
    job_size,
    train_dataset,
)
from train.token_table import TokenTable
from train.tokenizers import Record

LAYOUT = RowPackedLayout(length=32, rows_per_chunk=2, heights=(1,))


def record(i: int, size: int) -> Record:
    """A record whose every token is its number, from 1 on: padding is 0."""
    mask = np.ones(size, np.float32)
    mask[0] = 0
    return {"tokens": np.full(size, i + 1, np.int32), "loss_mask": mask}


def records(n: int = 50) -> list[Record]:
    sizes = np.clip(np.random.default_rng(1).lognormal(2, 0.8, n), 2, 32).astype(int)
    return [record(i, int(size)) for i, size in enumerate(sizes)]


LAY_OUT = LayOut(LAYOUT, TransformerCost(1.0, 0.01))


def dataset(
    job: JobSize, policy: Any = "streaming", *, lanes: int = 1, packs_per_step: int = 2, prefetch: int = 0, **host: Any
) -> Any:
    balance = BalanceConfig(pack_size=4, lookahead=3, policy=policy, lanes=lanes, packs_per_step=packs_per_step)
    return train_dataset(
        records(),
        job,
        balance=balance,
        prior=cost_prior(records(), balance, LAY_OUT.cost, seed=5),
        lay_out=LAY_OUT,
        seed=5,
        prefetch_steps=prefetch,
        **host,
    )


def record_numbers(chunks: Iterable[Any]) -> collections.Counter[int]:
    """Which records the chunks hold, and how often, told by their segments alone."""
    found: collections.Counter[int] = collections.Counter()
    for chunk in chunks:
        for tokens, segments in zip(chunk["tokens"], chunk["tokens_segment_ids"], strict=True):
            for segment in range(1, int(segments.max()) + 1):
                values = set(tokens[segments == segment].tolist())
                assert len(values) == 1, "a segment holds one record"
                found[values.pop() - 1] += 1
    return found


def held(packs: Sequence[Pack]) -> collections.Counter[int]:
    return record_numbers(chunk for pack in packs for chunk in pack.chunks)


@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 5), st.integers(1, 30))
@settings(deadline=None, max_examples=60)
def test_a_job_reads_whole_steps_from_as_few_epochs_as_hold_them(
    n: int, pack_size: int, ranks: int, steps: int
) -> None:
    batch = pack_size * ranks
    if n < batch:
        with pytest.raises(ValueError, match=f"corpus has {n} records, but one step takes {batch}"):
            job_size(n, pack_size=pack_size, ranks=ranks, steps=steps, epochs=1)
        return
    job = job_size(n, pack_size=pack_size, ranks=ranks, steps=steps, epochs=1)
    assert job.steps == steps
    assert (job.epochs - 1) * n < steps * batch <= job.epochs * n
    assert job.num_unused == job.epochs * n - steps * batch
    by_epochs = job_size(n, pack_size=pack_size, ranks=ranks, steps=None, epochs=3)
    assert (by_epochs.steps, by_epochs.epochs) == (3 * n // batch, 3)
    assert 0 <= by_epochs.num_unused < batch


@pytest.mark.parametrize("num_shards", [2, 4, 8])
def test_shards_together_read_the_same_records_in_every_step(num_shards: int) -> None:
    numbers = list(range(50))
    job = job_size(50, pack_size=2, ranks=8, steps=11, epochs=1)
    whole = list(arrivals(numbers, job, seed=0, shard=0, num_shards=1))
    shards = [list(arrivals(numbers, job, seed=0, shard=i, num_shards=num_shards)) for i in range(num_shards)]
    assert {len(shard) for shard in shards} == {11 * job.global_batch // num_shards}
    for step in range(11):
        part = slice(step * job.global_batch // num_shards, (step + 1) * job.global_batch // num_shards)
        together = sorted(n for shard in shards for n in shard[part])
        assert together == sorted(whole[step * job.global_batch : (step + 1) * job.global_batch])


def test_every_epoch_is_a_new_shuffle_of_everything() -> None:
    job = job_size(50, pack_size=5, ranks=1, steps=20, epochs=1)
    stream = list(arrivals(list(range(50)), job, seed=0, shard=0, num_shards=1))
    first, second = stream[:50], stream[50:]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != sorted(first)


@pytest.mark.parametrize("policy", ["arrival", "windowed", "streaming"])
def test_a_job_consumes_its_arrivals_exactly_once_in_the_steps_agreed(policy: str) -> None:
    job = job_size(50, pack_size=4, ranks=2, steps=17, epochs=1)  # 136 records: two epochs and a part, a short window
    steps = list(dataset(job, policy))
    assert [len(packs) for packs in steps] == [2] * 17
    packs = [pack for packs in steps for pack in packs]
    assert {pack.records for pack in packs} == {4}
    arrived = collections.Counter(
        int(r["tokens"][0]) - 1 for r in arrivals(records(), job, seed=5, shard=0, num_shards=1)
    )
    assert held(packs) == arrived


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_a_step_holds_the_same_records_on_any_number_of_hosts(num_hosts: int) -> None:
    job = job_size(50, pack_size=4, ranks=4, steps=9, epochs=1)
    hosts = [
        dataset(job, lanes=4, packs_per_step=1, host=host, num_hosts=num_hosts, prefetch=host % 2)
        for host in range(num_hosts)
    ]
    iterators = [iter(host) for host in hosts]
    steps = [held([pack for packs in step for pack in packs]) for step in zip(*iterators, strict=True)]
    for iterator in iterators:
        iterator.close()
    assert steps == [held(packs) for packs in dataset(job, lanes=4, packs_per_step=1)]
    assert len(steps) == 9


def test_the_run_s_seed_orders_the_steps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same arrivals: another seed gives the same packs, in another order."""
    monkeypatch.setattr(train.data, "arrivals", lambda source, *_, **__: grain.MapDataset.source(source))
    job = job_size(50, pack_size=4, ranks=1, steps=12, epochs=1)
    balance = BalanceConfig(pack_size=4, lookahead=12, policy="windowed", lanes=1, packs_per_step=1)
    orders = []
    for seed in (1, 2, 1):
        steps = train_dataset(records(), job, balance=balance, prior=None, lay_out=LAY_OUT, seed=seed)
        orders.append([sorted(held(packs).elements()) for packs in steps])
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_a_pack_counts_what_it_holds() -> None:
    job = job_size(50, pack_size=4, ranks=2, steps=6, epochs=1)
    for pack in (pack for packs in dataset(job) for pack in packs):
        sizes = [len(records()[i]["tokens"]) for i in held([pack]).elements()]
        assert pack.tokens == sum(sizes)
        assert pack.cost == pytest.approx(sum(n + 0.01 * n * n for n in sizes))
        assert pack.executed_tokens == sum(chunk["tokens"].size for chunk in pack.chunks)
        assert pack.executed_cost == pytest.approx(pack.executed_tokens / 32 * (32 + 0.01 * 32 * 32))


def test_prefetch_changes_neither_packs_nor_state_and_restores_exactly() -> None:
    job = job_size(50, pack_size=4, ranks=2, steps=9, epochs=1)
    plain, ahead = iter(dataset(job)), iter(dataset(job, prefetch=5))
    states: list[str] = []
    steps: list[list[Pack]] = []
    for _ in range(9):
        assert json.dumps(ahead.get_state()) == json.dumps(plain.get_state())
        states.append(json.dumps(ahead.get_state()))
        expected, packs = next(plain), next(ahead)
        assert held(packs) == held(expected)
        steps.append(packs)
    ahead.close()
    for taken in (0, 1, 4, 6, 8):
        restored = iter(dataset(job, prefetch=5))
        restored.set_state(json.loads(states[taken]))
        for packs in steps[taken:]:
            np.testing.assert_equal(next(restored), packs)
        with pytest.raises(StopIteration):
            next(restored)
        restored.close()


@pytest.mark.parametrize(
    "layout", [LAYOUT, BucketedLayout(lengths=(8, 32), tokens_per_chunk=64), PaddedLayout(pack_size=7, length=32)]
)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_evaluation_holds_every_record_exactly_once(layout: Layout, num_shards: int) -> None:
    chunks = [
        chunk
        for shard in range(num_shards)
        for chunk in eval_chunks(records(), layout=layout, pack_size=7, shard=shard, num_shards=num_shards)
    ]
    assert record_numbers(chunks) == collections.Counter(range(50))


def test_the_cap_is_counted() -> None:
    prompt_only = {"tokens": np.arange(9, dtype=np.int32), "loss_mask": np.array([0] * 6 + [1] * 3, np.float32)}
    given_records = TokenTable.of([record(0, 3), record(1, 8), prompt_only])
    truncated = cap_records(given_records, max_tokens=5, on_oversize="truncate")
    assert [len(r["tokens"]) for r in truncated.records] == [3, 5]
    assert (truncated.num_oversize, truncated.tokens_removed, truncated.num_unlearnable) == (2, 3 + 4, 1)
    dropped = cap_records(given_records, max_tokens=5, on_oversize="drop")
    assert [len(r["tokens"]) for r in dropped.records] == [3]
    assert (dropped.num_oversize, dropped.tokens_removed, dropped.num_unlearnable) == (2, 8 + 9, 0)
    with pytest.raises(ValueError, match="record 1 has 8 tokens, 2 of 3 records have more than max_tokens 5"):
        cap_records(given_records, max_tokens=5, on_oversize="error")
    with pytest.raises(ValueError, match="no record of 3 is left after the cap of 2 tokens"):
        cap_records(given_records, max_tokens=2, on_oversize="drop")


def test_the_pipeline_passes_grains_own_checkpoint_check() -> None:
    job = job_size(50, pack_size=4, ranks=2, steps=5, epochs=1)
    grain.experimental.assert_equal_output_after_checkpoint(dataset(job))
