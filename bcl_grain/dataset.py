"""The Grain transformation: records in, packs of balanced cost out; `bcl_grain.pack_iterator` does the work."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, get_args

import grain

from bcl_grain.capacity import FILLER_SIZE, Capacity, SizeFn
from bcl_grain.checks import check_choice, check_function
from bcl_grain.cost_prior import CostPrior
from bcl_grain.costs import CostFn
from bcl_grain.pack_iterator import PackIterator
from bcl_grain.planner import (
    OnOverflow,
    Order,
    PlannerConfig,
    Policy,
    Tail,
)
from bcl_grain.planner_config import OnChangedSettings
from bcl_grain.telemetry import Telemetry

T = TypeVar("T")


class BatchCostLookaheadIterDataset(grain.IterDataset, Generic[T]):
    """Repartitions a stream of records into packs of a fixed record count and balanced cost.

    Batch Cost Lookahead (Huang et al., "Coordination-Free Workload Regularization for Variable-Cost Distributed
    Training", 2026). Use it after sharding, on each host's own records; no host talks to another:

    >>> import grain, bcl_grain as bcl
    >>> records = [[0] * n for n in (9, 1, 8, 2, 7, 3, 6, 4)]
    >>> ds = (
    ...     grain.MapDataset.source(records)
    ...     .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    ...     .pipe(bcl.BatchCostLookaheadIterDataset, pack_size=2, lookahead=4, cost_fn=len)
    ... )
    >>> [[len(record) for record in pack] for pack in ds]
    [[6, 4], [8, 2], [7, 3], [9, 1]]

    An element is one pack: a list of `pack_size` records, as they came from the parent, in order of arrival.
    `packs_per_step` consecutive packs belong to one step of the host's local devices. Every record comes out exactly
    once; what a stream that ends has left over is the business of `tail`, and is counted.

    Args:
        parent: The records of one stream.
        pack_size: Records in a pack.
        cost_fn: Cost of a record, positive and finite, deterministic. See `bcl_grain.costs`.
        packs_per_step: Packs of this stream that one step consumes: the local devices it feeds.
        lookahead: Pool length in steps; the pool holds `pack_size * packs_per_step * lookahead` records.
        policy: See `PlannerConfig`, as for `order`, `tail`, `num_packs` and `seed`.
        order: In which order a cycle's steps come.
        tail: What happens to arrivals that don't fill a step. With `keep`, the packs of the last step are short, or
            even empty lists; there are always `packs_per_step` of them.
        num_packs: Packs in all, alike on every rank; without it, ranks whose shards differ in length may differ in
            steps. What the stream has beyond is not read.
        seed: Key of the order, at least 0; the same on every host.
        max_age: `streaming`: a record comes out at most so many cycles after it was read. Restoring a state reads at
            most `max_age` cycles' records and one pool again.
        prior: `streaming`: what is known of the mean cost; the same on every host. See `estimate_cost_prior`.
        size_fn: With `capacity`: size of a record in tokens, a positive integer, deterministic.
        capacity: What a pack may hold: tokens in all, or the (rows, length) of a `RowPackedOneShapeLayout`, as
            `fit_shape` proposes, which then holds every pack. See `PlannerConfig`. It may be another one after a
            restore, unless the state was saved within a cycle, which has to come out as it was planned.
        on_overflow: What happens if no packs within the capacity are found: `error`, before any pack of the cycle
            comes out, so that the state can be saved; or `extra_chunk`, for a layout that can add chunks.
        on_changed_settings: What happens if a state is restored that was saved with another lookahead, policy, order,
            tail, seed, max_age or prior: an `error`; or `finish_pool`, where what the old pool holds comes out as
            the old settings have it, and the new ones start with the record after. Either way no record is lost or
            repeated, and the number of packs stays. `pack_size`, `packs_per_step` and `num_packs` can't change.
        pad_record: With `tail="pad"`: the weightless record. Each place gets a copy. With a capacity it may have
            one token.
        telemetry: Filled while iterating, in the process that iterates.

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(
        self,
        parent: grain.IterDataset[T],
        *,
        pack_size: int,
        cost_fn: CostFn,
        packs_per_step: int = 1,
        lookahead: int = 32,
        policy: Policy = "streaming",
        order: Order = "aligned",
        tail: Tail = "drop",
        num_packs: int | None = None,
        seed: int = 0,
        max_age: int = 16,
        prior: CostPrior | None = None,
        size_fn: SizeFn | None = None,
        capacity: Capacity | None = None,
        on_overflow: OnOverflow = "error",
        on_changed_settings: OnChangedSettings = "error",
        pad_record: T | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        super().__init__(parent)
        self._config = PlannerConfig(
            pack_size=pack_size,
            packs_per_step=packs_per_step,
            lookahead=lookahead,
            policy=policy,
            order=order,
            tail=tail,
            num_packs=num_packs,
            seed=seed,
            max_age=max_age,
            prior=prior,
            capacity=capacity,
            on_overflow=on_overflow,
        )
        check_function("cost_fn", cost_fn)
        if tail == "pad" and pad_record is None:
            raise ValueError("tail='pad' needs a pad_record: a record whose loss weight is 0")
        if (size_fn is None) != (capacity is None):
            raise ValueError(f"size_fn and capacity go together, got size_fn={size_fn!r}, capacity={capacity!r}")
        if size_fn is not None:
            check_function("size_fn", size_fn)
        if not (telemetry is None or isinstance(telemetry, Telemetry)):
            raise ValueError(f"telemetry must be a Telemetry, to be filled, or None, got {telemetry!r}")
        if size_fn is not None and tail == "pad" and size_fn(pad_record) > FILLER_SIZE:
            raise ValueError(f"with a capacity, pad_record must have one token, got {size_fn(pad_record)}: cut it")
        check_choice("on_changed_settings", on_changed_settings, get_args(OnChangedSettings))
        self._on_changed_settings = on_changed_settings
        self._cost_fn = cost_fn
        self._size_fn = size_fn
        self._pad_record = pad_record
        self._telemetry = telemetry

    def __iter__(self) -> grain.DatasetIterator[list[T]]:
        """Returns an iterator over packs; reads nothing."""
        return PackIterator(
            self.parents[0].__iter__(),
            self._config,
            self._on_changed_settings == "finish_pool",
            self._cost_fn,
            self._size_fn,
            self._pad_record,
            Telemetry() if self._telemetry is None else self._telemetry,
        )

    def __str__(self) -> str:
        return f"BatchCostLookaheadIterDataset({self._config.describe()})"

    @property
    def _element_spec(self) -> Any:
        return [self.parents[0]._element_spec] * self._config.pack_size
