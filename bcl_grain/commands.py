"""What each command of the command line does: options in, tables, JSON and plots out."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import textwrap
from typing import Any, get_args

import numpy as np

from bcl_grain import plots, report
from bcl_grain.advice import make_plan
from bcl_grain.arms import policy_names, run_policy
from bcl_grain.boundary import LAYOUTS, memory_boundary
from bcl_grain.draws import DrawKind, Draws
from bcl_grain.inputs import Lengths, read_lengths
from bcl_grain.job import Job
from bcl_grain.length_profile import LengthProfile, profile_lengths, verdict
from bcl_grain.memory import GIB, MemoryModel
from bcl_grain.models import load_model
from bcl_grain.options import parse_cap, parse_cost, parse_layout, parse_names, parse_sizes, parse_steps
from bcl_grain.planner import Policy
from bcl_grain.priors import CorpusPrior, corpus_prior, read_prior, write_prior
from bcl_grain.progress import ProgressLine
from bcl_grain.tally import Tally

_IID_STEPS = 1_000
_RECORDS_FOR_WORKERS = 4_000_000
"""Below, starting processes takes longer than they save."""


def profile(args: argparse.Namespace) -> None:
    """Runs `profile`."""
    lengths = _read(args)
    cost = parse_cost(args.cost)
    _check_window(lengths, args.pack_size, 1)
    lookahead = min(args.lookahead, lengths.values.size // args.pack_size)  # a smaller file is one window
    job = {"ranks": args.ranks, "pack_size": args.pack_size, "lookahead": lookahead}
    figures = profile_lengths(lengths, cost, **job, seed=args.seed)
    sentences = verdict(figures, **job)
    prior = corpus_prior(lengths.values, cost, cost=args.cost, pack_size=args.pack_size, seed=args.seed)
    if args.prior_out:
        write_prior(prior, args.prior_out)
    if args.plot:
        plots.draw_profile(args.plot, figures, unit=lengths.unit, title=f"{lengths.name}: {figures.records:,} records")
    results = [{**dataclasses.asdict(figures), "verdict": sentences, "prior": prior.document()}]
    if not _wrote_json(args, lengths, results, lookahead=lookahead):
        _print_profile(lengths, figures, args.cost)
        print("\n" + "\n".join(sentences))
        if args.prior_out:
            print(f"\nprior: mean {prior.prior.mean:.6g}, worth {prior.prior.records:,} records: {args.prior_out}")


def _print_profile(lengths: Lengths, figures: LengthProfile, cost: str) -> None:
    print(f"{lengths.name}: {figures.records:,} records, {figures.tokens:,} {lengths.unit}")
    heads = ("length", "mean", "CV", "min", "p50", "p90", "p99", "p99.9", "max")
    quantiles = (figures.shortest, figures.p50, figures.p90, figures.p99, figures.p999, figures.longest)
    row = ("", f"{figures.mean:,.1f}", f"{figures.cv:.2f}", *(f"{q:,.0f}" for q in quantiles))
    print(report.format_table(heads, [row]))
    print(
        f"cost ({cost}): CV {figures.cost_cv:.2f}, the dearest 1 % of the records have "
        f"{report.percent(figures.top_cost_share)} of all cost\n"
    )
    edges = [round(edge) for edge in figures.histogram_edges]
    records = np.array(figures.histogram_records) / figures.records
    widest = max(records.max(), max(figures.histogram_cost))
    rows = [
        (f"{low:,} to {high - 1:,}", report.percent(share), report.percent(of_cost), report.bar(share / widest))
        for low, high, share, of_cost in zip(edges, edges[1:], records, figures.histogram_cost, strict=False)
    ]
    table = report.format_table(("length", "records", "cost"), [row[:3] for row in rows]).splitlines()
    print("\n".join(f"{line}  {text}".rstrip() for line, text in zip(table, ["", *(r[3] for r in rows)], strict=True)))


def simulate(args: argparse.Namespace) -> None:
    """Runs `simulate`."""
    policies = parse_names(args.policies, policy_names(), "policy")
    lengths = _read(args)
    job, prior = _job(args, lengths)
    settings: dict[str, Any] = {"lookahead": args.lookahead, "order": args.order, "prior": prior and prior.prior}
    workers = args.workers or ((os.cpu_count() or 1) if job.records >= _RECORDS_FOR_WORKERS else 1)
    line = _progress(args)
    tallies: dict[str, Tally] = {}
    for policy in dict.fromkeys(("arrival", *policies)):  # the others are judged against arrival
        planned = policy in get_args(Policy)
        tallies[policy] = run_policy(
            policy,
            job,
            workers=workers,
            on_progress=lambda done, total, policy=policy: line.update(policy, done, total),  # type: ignore[misc]
            **(settings if planned else {}),
        )
    capped = job.draws.records_capped
    results = [
        report.arm_result(
            policy,
            tallies[policy],
            tallies["arrival"],
            order=args.order if policy in get_args(Policy) and policy != "arrival" else None,
            records_in=job.records,
            records_capped=capped,
        )
        for policy in policies
    ]
    heading = (
        f"{lengths.name}: {job.ranks} ranks x {job.pack_size} records, {job.steps} steps ({job.draws.kind} draws), "
        f"figures of steps {job.first_step} to {job.end - 1}"
    )
    if args.plot:
        plots.draw_simulation(args.plot, {policy: tallies[policy] for policy in policies}, title=heading)
    resolved = {"steps": job.steps, "draws": job.draws.kind, "workers": workers, "bin_tokens": job.bin_capacity}
    resolved |= {"first_step": job.first_step, "last_step": job.end, "layout_shapes": job.layout and job.layout.shapes}
    if not _wrote_json(args, lengths, results, **resolved, prior=prior and prior.document()):
        print(heading)
        print(report.results_table(results))


def _job(args: argparse.Namespace, lengths: Lengths) -> tuple[Job, CorpusPrior | None]:
    if args.ranks % args.packs_per_step:
        raise ValueError(
            f"--ranks {args.ranks} is no multiple of --packs-per-step {args.packs_per_step}: each stream feeds as many"
        )
    kind: DrawKind = args.draws or ("shuffled" if lengths.has_order else "iid")
    if kind == "order" and not lengths.has_order:
        raise ValueError(f"--draws order needs a file: the table of workload {lengths.name!r} knows no order")
    streams, step_records = args.ranks // args.packs_per_step, args.pack_size * args.packs_per_step
    _check_window(lengths, step_records, args.lookahead, streams=1 if kind == "iid" else streams)
    steps = args.steps or (_IID_STEPS if kind == "iid" else lengths.values.size // (streams * step_records))
    if steps < args.lookahead:
        raise ValueError(
            f"{steps} steps have fewer records than one window of --lookahead {args.lookahead} steps: pass --lookahead "
            f"{steps} or less, or more --steps"
        )
    cap = parse_cap(args.cap, lengths.values)
    cost = parse_cost(args.cost)
    capped = lengths.values if cap is None else np.minimum(lengths.values, cap)
    layout = parse_layout(
        args.layout,
        capped,
        pack_size=args.pack_size,
        # A kernel that skips other records' tokens makes long rows no dearer.
        cost=cost if args.attention == "rows" else dataclasses.replace(cost, per_token_squared=0.0),
        seed=args.seed,
    )
    if layout is not None and capped.max() > (row := max(length for _, length in layout.shapes)):
        raise ValueError(
            f"--layout {args.layout} has no row longer than {row:,}, but the longest record is {capped.max():,}: cut "
            f"records by --cap {row}, or raise the row's length"
        )
    first, last = parse_steps(args.report, steps)
    draws = Draws(
        population=lengths.values, kind=kind, streams=streams, records=steps * step_records, seed=args.seed, cap=cap
    )
    job = Job(
        draws=draws,
        pack_size=args.pack_size,
        packs_per_step=args.packs_per_step,
        cost=cost,
        layout=layout,
        kernel=args.attention,
        bin_tokens=args.bin_tokens,
        first_step=first,
        last_step=last,
        seed=args.seed,
    )
    if args.prior == "none":
        return job, None
    if args.prior == "auto":
        return job, corpus_prior(capped, cost, cost=args.cost, pack_size=args.pack_size, seed=args.seed)
    return job, read_prior(args.prior, cost=args.cost, pack_size=args.pack_size)


def plan(args: argparse.Namespace) -> None:
    """Runs `plan`."""
    lengths = _read(args)
    line = _progress(args)
    options = {"column": args.column, "tokenizer": args.tokenizer}
    given = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
    result = make_plan(
        lengths,
        _memory(args),
        budget_gib=args.memory_gib,
        ranks=args.ranks,
        devices_per_host=args.devices_per_host,
        pack_size=args.pack_size,
        source=f"read_lengths({lengths.name!r}{given}).values",
        seed=args.seed,
        on_progress=lambda done, total: line.update("plan", done, total),
    )
    if _wrote_json(args, lengths, [dataclasses.asdict(result)]):
        return
    shapes = " and ".join(f"{rows} x {length:,}" for rows, length in result.shapes)
    one_shape = "none" if result.one_shape is None else "{} x {:,}".format(*result.one_shape)
    one_shape += "" if result.capacity_tokens is None else f", capacity {result.capacity_tokens:,} tokens"
    settings = (
        ("pack_size", str(result.pack_size)),
        ("lookahead", str(result.lookahead)),
        ("policy", result.policy),
        ("cap", "none" if result.cap is None else f"{result.cap:,}"),
        ("layout", f"{result.layout}, chunks {shapes}, {result.peak_gib:.1f} GiB at most"),
        ("one_shape", one_shape),
    )
    print(
        f"{lengths.name}: {args.ranks} ranks, {result.packs_per_step} a host, {args.model} in {args.memory_gib:g} GiB\n"
    )
    for name, value in settings:
        indent = 12 * " "
        reason = textwrap.fill(result.reasons[name], 110, initial_indent=indent, subsequent_indent=indent)
        print(f"{name.replace('_', ' '):10}  {value}\n{reason}")
    gain = report.speedup(result.arrival, result.planned)
    print(f"\nexpected: {gain:.3f} times as fast as packs in order of arrival, in the same layout (simulated)\n")
    print(result.snippet, end="")


def boundary(args: argparse.Namespace) -> None:
    """Runs `boundary`."""
    lengths = _read(args)
    memory = _memory(args)
    _check_window(lengths, 1, args.lookahead)
    line = _progress(args)
    result = memory_boundary(
        lengths.values,
        memory.dims.cost(remat=args.remat),
        memory,
        budget_gib=args.memory_gib,
        lookahead=args.lookahead,
        pack_sizes=parse_sizes(args.pack_sizes, "--pack-sizes"),
        seed=args.seed,
        on_progress=lambda done, total: line.update("boundary", done, total),
    )
    title = f"{lengths.name}, {args.model}"
    if args.plot:
        usable = memory.usable_bytes(args.memory_gib) / GIB
        plots.draw_boundary(args.plot, result, budget_gib=args.memory_gib, usable_gib=usable, title=title)
    effects = {effect.name: dataclasses.asdict(effect) for effect in result.caps}
    results = [{**dataclasses.asdict(cell), "cap_effect": effects[cell.cap]} for cell in result.cells]
    if _wrote_json(args, lengths, results, state_gib=memory.state_bytes / GIB):
        return
    state, reserve = memory.state_bytes / GIB, report.percent(args.reserve, 0)
    print(f"{title} in {args.memory_gib:g} GiB; state {state:.1f} GiB, {reserve} in reserve\n")
    heads = ("cap", "longest", "records above", "tokens cut", "dropped", "cost cut", "dropped")
    rows = [
        (
            e.name,
            f"{e.cap:,}",
            *(
                report.percent(share, 2)
                for share in (e.records, e.tokens_truncated, e.tokens_dropped, e.cost_truncated, e.cost_dropped)
            ),
        )
        for e in result.caps
    ]
    print(report.format_table(heads, rows))
    most = max(cell.pack_size for cell in result.cells)
    print(f"\nlargest pack size that fits, of up to {most}")
    largest = [[result.largest_pack(e.name, layout) for layout in LAYOUTS] for e in result.caps]
    cells = [
        ["none" if size is None else f">= {size}" if size == most else str(size) for size in row] for row in largest
    ]
    rows = [(e.name, *row) for e, row in zip(result.caps, cells, strict=True)]
    print(report.format_table(("cap", *LAYOUTS), rows))


def _read(args: argparse.Namespace) -> Lengths:
    return read_lengths(args.data, column=args.column, tokenizer=args.tokenizer)


def _check_window(lengths: Lengths, step_records: int, lookahead: int, streams: int = 1) -> None:
    window = streams * step_records * lookahead
    have = lengths.values.size
    if have < window:
        each = f"{streams} streams x " if streams > 1 else ""
        most = have // (streams * step_records)
        hint = f"pass --lookahead {most} or less" if most else "pass a smaller --pack-size"
        if streams > 1:
            hint += ", fewer --ranks, or --draws iid, which draws records again and again"
        raise ValueError(
            f"{lengths.name!r} has {have:,} records, fewer than one window of {each}{step_records} x {lookahead} = "
            f"{window:,}: {hint}, or bring more records"
        )


def _memory(args: argparse.Namespace) -> MemoryModel:
    precision = {
        "f32": {},
        "bf16": {"param_bytes": 2, "grad_bytes": 2, "optimizer_bytes": 12},
        "frozen": {"param_bytes": 2, "grad_bytes": 0, "accumulator_bytes": 0, "optimizer_bytes": 0},
    }[args.precision]
    return MemoryModel(
        dims=load_model(args.model),
        optimizer_shards=args.optimizer_shards,
        remat=args.remat,
        attention=args.attention,
        logits_at_once=args.logits_at_once,
        reserve=args.reserve,
        **precision,
    )


def _progress(args: argparse.Namespace) -> ProgressLine:
    return ProgressLine(None if args.quiet else sys.stderr)


def _wrote_json(args: argparse.Namespace, lengths: Lengths, results: list[dict[str, Any]], **more: Any) -> bool:
    """Writes the JSON that was asked for; returns whether it took the tables' place."""
    config = {name: value for name, value in vars(args).items() if name not in ("command", "json", "plot", "quiet")}
    config |= {"command": config.pop("name"), "records": lengths.values.size, "unit": lengths.unit, **more}
    if args.json:
        report.write_json({"config": config, "results": results}, args.json)
    return bool(args.json == "-")
