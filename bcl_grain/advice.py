"""Settings for a corpus, a model and a machine: pack size, lookahead, policy, cap, layout, each with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from bcl_grain.arms import run_policy
from bcl_grain.boundary import cap_effect
from bcl_grain.caps import fit_cap
from bcl_grain.costs import TransformerCost
from bcl_grain.draws import Draws
from bcl_grain.inputs import Lengths
from bcl_grain.job import Job
from bcl_grain.layouts import BucketedLayout, Layout, RowPackedLayout, Shape
from bcl_grain.memory import GIB, MemoryModel
from bcl_grain.metrics import Arm
from bcl_grain.options import LENGTH_MULTIPLE, round_up
from bcl_grain.planner import PlannerConfig, Policy
from bcl_grain.report import percent
from bcl_grain.shapes import fit_shape
from bcl_grain.snippet import make_snippet

IntArray = npt.NDArray[np.int64]

PACK_SIZES = (8, 16, 32, 64, 128, 256)
LOOKAHEADS = (4, 8, 16, 32, 64)

_STEPS = 256
_MOST_STREAMS = 8
_GOOD_ENOUGH = 0.02
"""A cheaper setting is taken if it wastes at most so much more than the best one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is recommended.

    Attributes:
        streams: Streams of the job: its hosts.
        packs_per_step: Devices that a stream feeds.
        pack_size: Records of a rank in a step.
        lookahead: See `PlannerConfig`.
        policy: See `PlannerConfig`.
        cap: Longest record, or None where none needs to be capped.
        layout: Its name: "row-packed" or "bucketed".
        shapes: Shapes to compile.
        peak_gib: Memory at the largest chunk.
        one_shape: (rows, length) in which whole packs fit, for a trainer that needs one shape; None where packs vary
            too much.
        capacity_tokens: Tokens of that shape, or None.
        arrival: Figures of arrival order with these settings, over a short job.
        planned: Figures of the policy.
        num_packs: Packs that each stream gives in an epoch.
        reasons: Why, by setting.
        snippet: The pipeline, ready to run.
    """

    streams: int
    packs_per_step: int
    pack_size: int
    lookahead: int
    policy: str
    cap: int | None
    layout: str
    shapes: tuple[Shape, ...]
    peak_gib: float
    one_shape: Shape | None
    capacity_tokens: int | None
    arrival: Arm
    planned: Arm
    num_packs: int
    reasons: dict[str, str]
    snippet: str


def make_plan(
    lengths: Lengths,
    memory: MemoryModel,
    *,
    budget_gib: float,
    ranks: int,
    devices_per_host: int = 1,
    pack_size: int | None = None,
    source: str | None = None,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Recommends settings.

    Args:
        lengths: The corpus.
        memory: The memory model.
        budget_gib: Memory of a device.
        ranks: Devices of the job.
        devices_per_host: Devices that one process feeds, a divisor of `ranks`.
        pack_size: Records of a rank in a step, where it is given; default: chosen.
        source: Python expression for the lengths, for the snippet; default: that reads `lengths.name`.
        seed: Of the draws.
        on_progress: Called after each simulation.

    Raises:
        ValueError: If the budget is below the model's own size or holds no useful row, or an option is out of range.
    """
    if ranks < 1 or devices_per_host < 1 or ranks % devices_per_host:
        raise ValueError(
            f"ranks {ranks} must be a positive multiple of devices_per_host {devices_per_host}: every host has as many"
        )
    row_limit = memory.longest_row(budget_gib)
    if not row_limit:
        raise ValueError(
            f"not even a chunk of 1 x 128 tokens fits {budget_gib:g} GiB: raise the budget or shrink the state"
        )
    reasons: dict[str, str] = {}
    cap = _choose_cap(lengths.values, memory, row_limit, budget_gib, reasons)
    values = lengths.values if cap is None else np.minimum(lengths.values, cap)
    trial = _Trial(values, memory, budget_gib, ranks // devices_per_host, devices_per_host, seed)
    steps = {size: values.size // (ranks * size) for size in (PACK_SIZES if pack_size is None else (pack_size,))}
    candidates = [size for size in steps if steps[size] >= LOOKAHEADS[0]]
    if not candidates:
        needed = ranks * min(steps) * LOOKAHEADS[0]
        raise ValueError(
            f"{values.size} records are fewer than one window: {ranks} ranks with packs of {min(steps)} and lookahead "
            f"{LOOKAHEADS[0]} take {needed}; lower the ranks or the pack size, or bring more records"
        )
    total = len(candidates) + len(LOOKAHEADS) + len(get_args(Policy)) + 3
    done = 0

    def simulate(policy: str, size: int, lookahead: int, layout: Layout | None = None) -> Arm:
        nonlocal done
        arm = trial.run(policy, size, lookahead, layout)
        done += 1
        on_progress(min(done, total), total)
        return arm

    by_size = {size: simulate("windowed", size, 32, trial.row_packed(size)) for size in candidates}
    size = _smallest({s: _total(arm) for s, arm in by_size.items()})
    rule = "as given" if pack_size is not None else f"the smallest within {percent(_GOOD_ENOUGH, 0)} of the best"
    reasons["pack_size"] = f"{rule}; total waste (waiting and padding) by pack size: {_list(by_size, _total)}"
    by_lookahead = {k: simulate("windowed", size, k) for k in LOOKAHEADS if k <= steps[size]}
    lookahead = _smallest({k: arm.sync_waste for k, arm in by_lookahead.items()}, tolerance=_GOOD_ENOUGH / 2)
    reasons["lookahead"] = f"sync waste by lookahead: {_list(by_lookahead, _sync)}"
    if len(by_lookahead) < len(LOOKAHEADS):
        reasons["lookahead"] += f"; an epoch has {steps[size]} steps"
    layouts: dict[str, Layout] = {"row-packed": trial.row_packed(size)}
    bucketed = trial.bucketed()
    if bucketed is not None:
        layouts["bucketed"] = bucketed
    by_layout = {name: simulate("windowed", size, lookahead, layout) for name, layout in layouts.items()}
    chosen = min(by_layout, key=lambda name: _total(by_layout[name]))
    layout = layouts[chosen]
    largest = max(layout.shapes, key=lambda shape: memory.peak_bytes(*shape))
    reasons["layout"] = f"rows hold every record, chunks fit the memory; total waste: {_list(by_layout, _total)}"
    p99 = fit_cap(values, 99.0)
    capped = dataclasses.replace(trial, values=np.minimum(values, p99))
    waste = _total(capped.run("windowed", size, lookahead, capped.row_packed(size)))
    reasons["cap"] += f" and make the total waste {percent(waste)}"
    arms = {policy: simulate(policy, size, lookahead, layout) for policy in get_args(Policy)}
    on_progress(total, total)
    policy = min((p for p in arms if p != "arrival"), key=lambda p: (round(arms[p].sync_waste, 3), p != "windowed"))
    reasons["policy"] = f"sync waste over {_STEPS} steps: {_list(arms, _sync)}"
    one_shape = _one_shape(values, size, seed, reasons)
    num_packs = steps[size] * devices_per_host
    config = PlannerConfig(
        pack_size=size,
        packs_per_step=devices_per_host,
        lookahead=lookahead,
        policy=policy,
        num_packs=num_packs,
    )
    return Plan(
        streams=trial.streams,
        packs_per_step=devices_per_host,
        pack_size=size,
        lookahead=lookahead,
        policy=policy,
        cap=cap,
        layout=chosen,
        shapes=layout.shapes,
        peak_gib=memory.peak_bytes(*largest) / GIB,
        one_shape=one_shape,
        capacity_tokens=None if one_shape is None else one_shape[0] * one_shape[1],
        arrival=arms["arrival"],
        planned=arms[policy],
        num_packs=num_packs,
        reasons=reasons,
        snippet=make_snippet(
            config,
            layout,
            trial.cost,
            source=source or f"read_lengths({lengths.name!r}).values",
            streams=trial.streams,
            cap=cap,
        ),
    )


def _choose_cap(
    values: IntArray, memory: MemoryModel, row_limit: int, budget_gib: float, reasons: dict[str, str]
) -> int | None:
    longest = int(values.max())
    p99 = fit_cap(values, 99.0)
    effect = cap_effect(values, memory.dims.cost(remat=memory.remat), "p99", p99)
    touched = (
        f"a cap at p99 = {p99:,} would touch {percent(effect.records)} of the records, "
        f"{percent(effect.tokens_truncated)} of the tokens, {percent(effect.cost_truncated)} of the cost,"
    )
    if longest <= row_limit:
        reasons["cap"] = f"none needed: a row of the longest record, {longest:,}, fits {budget_gib:g} GiB; {touched}"
        return None
    reasons["cap"] = f"the longest row that fits {budget_gib:g} GiB; the longest record is {longest:,}; {touched}"
    return row_limit


@dataclasses.dataclass(frozen=True)
class _Trial:
    """Short simulated jobs on a corpus."""

    values: IntArray
    memory: MemoryModel
    budget_gib: float
    streams: int
    packs_per_step: int
    seed: int

    @property
    def cost(self) -> TransformerCost:
        return self.memory.dims.cost(remat=self.memory.remat)

    def row_packed(self, pack_size: int) -> RowPackedLayout:
        """Rows that hold the longest record, in chunks small against a pack: their last one is partly empty."""
        length = round_up(int(self.values.max()))
        eighth = int(pack_size * self.values.mean() / (8 * length))
        most = min(self.memory.most_rows(length, self.budget_gib), max(1, eighth))
        rows = 1 << (most.bit_length() - 1)
        return RowPackedLayout(length=length, rows_per_chunk=rows, heights=(1,) if rows > 1 else ())

    def bucketed(self) -> BucketedLayout | None:
        """Row lengths in powers of two, in chunks of the longest's tokens; None where these don't fit the memory."""
        lengths = [LENGTH_MULTIPLE]
        while lengths[-1] < self.values.max():
            lengths.append(2 * lengths[-1])
        layout = BucketedLayout(lengths=tuple(lengths), tokens_per_chunk=lengths[-1])
        fits = all(self.memory.fits(rows, length, self.budget_gib) for rows, length in layout.shapes)
        return layout if fits else None

    def run(self, policy: str, pack_size: int, lookahead: int, layout: Layout | None) -> Arm:
        draws = Draws(
            population=self.values,
            kind="iid",
            streams=min(self.streams, _MOST_STREAMS),
            records=_STEPS * pack_size * self.packs_per_step,
            seed=self.seed,
        )
        job = Job(
            draws=draws,
            pack_size=pack_size,
            packs_per_step=self.packs_per_step,
            cost=self.cost,
            layout=layout,
            # A fused kernel skips the pairs of other records; a dense mask computes them.
            kernel="segments" if self.memory.attention == "fused" else "rows",
        )
        settings: dict[str, Any] = {} if policy == "arrival" else {"lookahead": lookahead}
        return run_policy(policy, job, **settings).arm()


def _sync(arm: Arm) -> float:
    return arm.sync_waste


def _list(arms: Mapping[Any, Arm], figure: Callable[[Arm], float]) -> str:
    return ", ".join(f"{name}: {percent(figure(arm))}" for name, arm in arms.items())


def _total(arm: Arm) -> float:
    assert arm.total_waste is not None  # these trials are laid out
    return arm.total_waste


def _smallest(waste: dict[int, float], tolerance: float = _GOOD_ENOUGH) -> int:
    """Returns the smallest setting that is about as good as the best."""
    best = min(waste.values())
    return min(setting for setting, value in waste.items() if value <= best + tolerance)


def _one_shape(values: IntArray, pack_size: int, seed: int, reasons: dict[str, str]) -> Shape | None:
    try:
        shape = fit_shape(values, max_length=int(values.max()), pack_size=pack_size, seed=seed)
    except ValueError:
        reasons["one_shape"] = "none: random packs vary too much to be held near the mean; raise the pack size or cap"
        return None
    share = pack_size * values.mean() / (shape[0] * shape[1])
    reasons["one_shape"] = (
        f"for a trainer that needs one shape; packs within 2 % of the mean fill {percent(share, 0)} of it"
    )
    return shape
