"""(d) The memory-feasibility boundary of a few corpora and models."""

from __future__ import annotations

import dataclasses
from typing import Any

from bcl_grain.boundary import LAYOUTS, memory_boundary
from bcl_grain.memory import GIB, MemoryModel
from bcl_grain.models import KNOWN_MODELS
from bcl_grain.plots import draw_boundary
from bcl_grain.report import markdown_table, percent
from benchmarks.paper.common import Page, Setting, population

SHARDED = {"param_bytes": 2, "grad_bytes": 2, "optimizer_bytes": 12, "optimizer_shards": 8}
CASES: tuple[tuple[str, str, float, dict[str, Any], str], ...] = (
    ("medquad", "smollm2-135m", 8.0, {}, "float32 state"),
    ("p3_t0_mix", "llama-3.2-1b", 80.0, {}, "float32 state"),
    ("qmsum", "llama-3.2-1b", 80.0, {}, "float32 state"),
    ("servegen_deepseek_r1", "llama-3.1-8b", 141.0, SHARDED, "bfloat16, optimizer over 8 ranks"),
    ("mooncake_conversation", "llama-3.1-8b", 141.0, SHARDED, "bfloat16, optimizer over 8 ranks"),
)
DRAWN = (0, 4)
"""Cases that get a plot."""


def _case(index: int, *, setting: Setting) -> dict[str, Any]:
    corpus, model, budget_gib, options, state = CASES[index]
    memory = MemoryModel(dims=KNOWN_MODELS[model], **options)
    sizes = population(corpus)
    boundary = memory_boundary(
        sizes, memory.dims.cost(remat=True), memory, budget_gib=budget_gib, num_packs=128 if setting.scale == 1 else 32
    )
    usable = memory.usable_bytes(budget_gib) / GIB
    if index in DRAWN:
        path = draw_boundary(
            str(setting.directory), boundary, budget_gib=budget_gib, usable_gib=usable, title=f"{corpus}, {model}"
        )
        path.rename(path.with_name(f"memory-{corpus}.png"))
    return {
        "corpus": corpus,
        "model": model,
        "budget_gib": budget_gib,
        "state": state,
        "state_gib": memory.state_bytes / GIB,
        "caps": [dataclasses.asdict(effect) for effect in boundary.caps],
        "largest_pack": {
            e.name: {name: boundary.largest_pack(e.name, name) for name in LAYOUTS} for e in boundary.caps
        },
        "most": max(cell.pack_size for cell in boundary.cells),
    }


def make(setting: Setting) -> Page:
    """Returns the page."""
    cases = [_case(index, setting=setting) for index in range(len(CASES))]
    sections = []
    for case in cases:
        heads = ("cap", "longest", "records", "tokens cut", "cost cut", *LAYOUTS)
        cells = [
            (
                effect["name"],
                f"{effect['cap']:,}",
                *(percent(effect[key], 2) for key in ("records", "tokens_truncated", "cost_truncated")),
                *(_size(case["largest_pack"][effect["name"]][layout], case["most"]) for layout in LAYOUTS),
            )
            for effect in case["caps"]
        ]
        sections.append(
            f"### {case['corpus']}, {case['model']} in {case['budget_gib']:g} GiB\n\n{case['state']}: "
            f"{case['state_gib']:.1f} GiB; a tenth of the budget is kept in reserve.\n\n"
            f"{markdown_table(heads, cells)}\n"
        )
    padded = [case["largest_pack"]["none"]["padded"] or 0 for case in cases]
    chunked, capped = (
        sum(case["largest_pack"][cap]["chunks"] == case["most"] for case in cases) for cap in ("none", "p99")
    )
    summary = (
        f"Without a cap row-packed chunks fit at any pack size in {chunked} of {len(cases)} cases, with a cap at p99 "
        f"in {capped}; the largest padded pack without a cap has {min(padded)} to "
        f"{max(padded)} records."
    )
    images = "\n\n".join(f"![memory of a pack, {CASES[i][0]}](memory-{CASES[i][0]}.png)" for i in DRAWN)
    text = f"""\
Largest pack size, of those up to {cases[0]["most"]} tried, whose chunk fits a device, by the memory model of
`bcl_grain.memory` (remat, fused attention), under each cap, and what the cap touches. *padded*: a record a row.
*one-shape*: rows filled with several records, all in one chunk that holds every pack of a random draw, in order
of arrival or balanced by the windowed policy. *chunks*: the same rows run one at a time, as this project's
trainer does.

{summary}

{images}

{chr(10).join(sections)}"""
    return Page("memory", "(d) Memory feasibility", text, {"cases": cases}, summary)


def _size(size: int | None, most: int) -> str:
    if size is None:
        return "none"
    return f">= {size}" if size == most else str(size)
