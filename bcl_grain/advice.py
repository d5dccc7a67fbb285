"""Settings for a corpus, a model and a machine: pack size, lookahead, policy, cap, layout, each with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from bcl_grain.boundary import cap_effect
from bcl_grain.caps import fit_cap
from bcl_grain.inputs import Lengths
from bcl_grain.layouts import Layout, RowPackedLayout, Shape
from bcl_grain.memory import GIB, MemoryModel
from bcl_grain.metrics import Arm
from bcl_grain.planner import PlannerConfig, Policy
from bcl_grain.report import percent
from bcl_grain.shapes import fit_shape
from bcl_grain.snippet import make_snippet
from bcl_grain.trial import MOST_ROW_LENGTHS, STEPS, Trial

IntArray = npt.NDArray[np.int64]

PACK_SIZES = (8, 16, 32, 64, 128, 256)
LOOKAHEADS = (4, 8, 16, 32, 64)

_GOOD_ENOUGH = 0.02
"""A cheaper setting is taken if it wastes at most so much more than the best one."""

_Run = Callable[..., Arm]
"""(policy, pack size, lookahead, layout or nothing) -> figures of a short job."""


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
    trial = Trial(values, memory, budget_gib, ranks // devices_per_host, devices_per_host, seed)
    sizes = _sizes(values.size, ranks, pack_size)
    total = len(sizes) + len(LOOKAHEADS) + len(get_args(Policy)) + MOST_ROW_LENGTHS + 4
    done = 0

    def run(policy: str, size: int, lookahead: int, layout: Layout | None = None) -> Arm:
        nonlocal done
        arm = trial.run(policy, size, lookahead, layout)
        done += 1
        on_progress(min(done, total), total)
        return arm

    size = _choose_size(sizes, trial, run, reasons, given=pack_size is not None)
    steps = values.size // (ranks * size)
    lookahead = _choose_lookahead(size, steps, run, reasons)
    policy = _choose_policy(size, lookahead, run, reasons)
    name, layout, planned = _choose_layout(size, lookahead, policy, trial, run, reasons)
    p99 = dataclasses.replace(trial, values=np.minimum(values, fit_cap(values, 99.0)))
    reasons["cap"] += (
        f" and make the total waste {percent(_total(p99.run(policy, size, lookahead, p99.fullest_rows(size))))}"
    )
    arrival = run("arrival", size, lookahead, layout)
    one_shape = _one_shape(values, size, seed, reasons)
    on_progress(total, total)
    config = PlannerConfig(
        pack_size=size,
        packs_per_step=devices_per_host,
        lookahead=lookahead,
        policy=policy,
        num_packs=steps * devices_per_host,
    )
    return Plan(
        streams=trial.streams,
        packs_per_step=devices_per_host,
        pack_size=size,
        lookahead=lookahead,
        policy=policy,
        cap=cap,
        layout=name,
        shapes=layout.shapes,
        peak_gib=max(memory.peak_bytes(*shape) for shape in layout.shapes) / GIB,
        one_shape=one_shape,
        capacity_tokens=None if one_shape is None else one_shape[0] * one_shape[1],
        arrival=arrival,
        planned=planned,
        num_packs=steps * devices_per_host,
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


def _sizes(records: int, ranks: int, given: int | None) -> list[int]:
    """Returns the pack sizes to try: those of which an epoch holds at least one window."""
    sizes = PACK_SIZES if given is None else (given,)
    possible = [size for size in sizes if records // (ranks * size) >= LOOKAHEADS[0]]
    if not possible:
        raise ValueError(
            f"{records} records are fewer than one window: {ranks} ranks with packs of {sizes[0]} and lookahead "
            f"{LOOKAHEADS[0]} take {ranks * sizes[0] * LOOKAHEADS[0]}; lower the ranks or the pack size, or bring more "
            "records"
        )
    return possible


def _choose_size(sizes: list[int], trial: Trial, run: _Run, reasons: dict[str, str], *, given: bool) -> int:
    arms = {size: run("windowed", size, 32, trial.fullest_rows(size)) for size in sizes}
    rule = "as given" if given else f"the smallest within {percent(_GOOD_ENOUGH, 0)} of the best"
    reasons["pack_size"] = f"{rule}; total waste (waiting and padding) by pack size: {_list(arms, _total)}"
    return _smallest({size: _total(arm) for size, arm in arms.items()}, _GOOD_ENOUGH)


def _choose_lookahead(size: int, steps: int, run: _Run, reasons: dict[str, str]) -> int:
    arms = {k: run("windowed", size, k) for k in LOOKAHEADS if k <= steps}
    reasons["lookahead"] = f"sync waste by lookahead: {_list(arms, _sync)}"
    if len(arms) < len(LOOKAHEADS):
        reasons["lookahead"] += f"; an epoch has {steps} steps"
    return _smallest({k: arm.sync_waste for k, arm in arms.items()}, _GOOD_ENOUGH / 2)


def _choose_policy(size: int, lookahead: int, run: _Run, reasons: dict[str, str]) -> Policy:
    arms: dict[Policy, Arm] = {policy: run(policy, size, lookahead) for policy in get_args(Policy)}
    reasons["policy"] = f"sync waste over {STEPS} steps: {_list(arms, _sync)}"
    balancing = [policy for policy in arms if policy != "arrival"]
    # Windowed is the simpler one: it wins where the other gains next to nothing.
    return min(balancing, key=lambda policy: (round(arms[policy].sync_waste, 3), policy != "windowed"))


def _choose_layout(
    size: int, lookahead: int, policy: Policy, trial: Trial, run: _Run, reasons: dict[str, str]
) -> tuple[str, Layout, Arm]:
    """Returns the layout of the least total waste, its name, and its figures."""
    rows = {layout: run(policy, size, lookahead, layout) for layout in trial.rows(size)}
    best = min(rows, key=lambda layout: _total(rows[layout]))
    ladder = trial.ladder(size)
    if ladder is not None:
        rows[ladder] = run(policy, size, lookahead, ladder)
        best = min(best, ladder, key=lambda layout: _total(rows[layout]))
    layouts: dict[str, tuple[Layout, Arm]] = {"row-packed": (best, rows[best])}
    bucketed = trial.bucketed()
    if bucketed is not None:
        layouts["bucketed"] = (bucketed, run(policy, size, lookahead, bucketed))
    name = min(layouts, key=lambda name: _total(layouts[name][1]))
    reasons["layout"] = (
        f"rows hold every record, chunks fit the memory; total waste: "
        f"{_list({name: arm for name, (_, arm) in layouts.items()}, _total)}; row-packed by row length: "
        f"{_list({_lengths(layout): arm for layout, arm in rows.items()}, _total)}"
    )
    return (name, *layouts[name])


def _lengths(layout: RowPackedLayout) -> str:
    return "+".join(str(length) for length in sorted({length for _, length in layout.shapes}))


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


def _sync(arm: Arm) -> float:
    return arm.sync_waste


def _list(arms: Mapping[Any, Arm], figure: Callable[[Arm], float]) -> str:
    return ", ".join(f"{name}: {percent(figure(arm))}" for name, arm in arms.items())


def _total(arm: Arm) -> float:
    assert arm.total_waste is not None  # these trials are laid out
    return arm.total_waste


def _smallest(waste: dict[int, float], tolerance: float) -> int:
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
