"""Results as text tables and JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bcl_grain.metrics import Arm
from bcl_grain.tally import Tally

RESULT_KEYS = (
    "policy",
    "order",
    "cost_cv",
    "cost_cv_reduction",
    "sync_waste",
    "total_waste",
    "step_cost_mean",
    "executed_step_cost_mean",
    "speedup_vs_arrival",
    "padding_fraction",
    "bins_per_rank",
    "max_wait_cycles",
    "records_in",
    "records_out",
    "records_capped",
    "planning_us_per_record",
)
"""What a simulated arm's result holds. Absent figures are None."""


def arm_result(
    policy: str, tally: Tally, arrival: Tally, *, order: str | None, records_in: int, records_capped: int
) -> dict[str, Any]:
    """Returns one arm's figures under `RESULT_KEYS`.

    The speed-up compares executed costs where both arms have been laid out, else estimated ones.

    Args:
        policy: Its name.
        tally: Its sums.
        arrival: Those of arrival order over the same job.
        order: The order of a cycle's steps, where the policy has one.
        records_in: Records of the job.
        records_capped: Those that a cap has shortened.
    """
    arm, base = tally.arm(), arrival.arm()
    values = (
        policy,
        order,
        arm.cost_cv,
        1 - arm.cost_cv / base.cost_cv if base.cost_cv else None,
        arm.sync_waste,
        arm.total_waste,
        arm.step_cost,
        arm.executed_step_cost,
        speedup(base, arm),
        tally.padding,
        tally.bins_per_rank,
        tally.max_wait_cycles,
        records_in,
        tally.records,
        records_capped,
        tally.planning_us_per_record,
    )
    return dict(zip(RESULT_KEYS, values, strict=True))


def speedup(base: Arm, arm: Arm) -> float:
    """Returns how many times as fast `arm` is, from executed costs where both have them, else from estimated ones."""
    if base.executed_step_cost is not None and arm.executed_step_cost is not None:
        return base.executed_step_cost / arm.executed_step_cost
    return base.step_cost / arm.step_cost


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns columns of text, the first one flush left, the others flush right.

    >>> print(format_table(["policy", "waste"], [["arrival", "0.30"], ["windowed", "0.04"]]))
    policy    waste
    arrival    0.30
    windowed   0.04
    """
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, all but the first column flush right.

    >>> print(markdown_table(["a", "b"], [["x", "1"]]))
    | a | b |
    |---|--:|
    | x | 1 |
    """
    rules = ["---"] + ["--:"] * (len(heads) - 1)
    lines = [_markdown_row(heads), "|" + "|".join(rules) + "|", *map(_markdown_row, rows)]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def percent(value: float | None, digits: int = 1) -> str:
    """Returns a share as text; "-" stands for an absent one.

    >>> percent(0.1234), percent(None)
    ('12.3 %', '-')
    """
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def number(value: float | None, spec: str = ",.0f") -> str:
    """Returns a number as text; "-" stands for an absent one.

    >>> number(1234.5), number(0.5, ".2f"), number(None)
    ('1,234', '0.50', '-')
    """
    return "-" if value is None else format(value, spec)


def results_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns the figures of simulated arms as a table; columns without any figure are left out.

    Args:
        results: As `arm_result` makes them.
    """
    columns: list[tuple[str, Any]] = [
        ("policy", lambda r: r["policy"]),
        ("order", lambda r: r["order"] or "-"),
        ("cost CV", lambda r: number(r["cost_cv"], ".4f")),
        ("CV cut", lambda r: percent(r["cost_cv_reduction"])),
        ("sync waste", lambda r: percent(r["sync_waste"], 2)),
        ("total waste", lambda r: percent(r["total_waste"], 2)),
        ("padding", lambda r: percent(r["padding_fraction"])),
        ("speed-up", lambda r: number(r["speedup_vs_arrival"], ".3f")),
        ("bins/rank", lambda r: number(r["bins_per_rank"], ".1f")),
        ("max wait", lambda r: number(r["max_wait_cycles"], "d")),
        ("us/record", lambda r: number(r["planning_us_per_record"], ".2f")),
    ]
    cells = [[show(result) for _, show in columns] for result in results]
    used = [i for i in range(len(columns)) if i < 2 or any(row[i] != "-" for row in cells)]
    return format_table([columns[i][0] for i in used], [[row[i] for i in used] for row in cells])


def bar(share: float, width: int = 40) -> str:
    """Returns a bar of `share` of `width` characters.

    >>> bar(0.25, 8)
    '##'
    """
    return "#" * round(share * width)


def write_json(document: Mapping[str, Any], path: str) -> None:
    """Writes JSON to a file, or to standard output where `path` is "-". What is not finite becomes null."""
    text = json.dumps(json_safe(document), indent=2, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def json_safe(value: Any) -> Any:
    """Returns `value` with tuples as lists, NumPy's numbers as Python's, and None for what is not finite.

    >>> json_safe({"a": (1, float("nan"))})
    {'a': [1, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
