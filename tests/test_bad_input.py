"""Every option of the public API at zero, negative, huge, NaN and of the wrong type: taken, or refused in words."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import grain
import numpy as np
import pytest

import bcl_grain as bcl
from tests.pipelines import DIRECT

HUGE = 10**12
NAMELESS = object()
VALUES: list[Any] = [
    *(0, -1, -HUGE, HUGE, 1.5, math.nan, math.inf, True, None, "2", "", b"x", [], {}, (), [1, "x"], NAMELESS),
    *(np.float64("nan"), np.array([1, 2]), np.array(["x"])),
]


def records() -> Any:
    return grain.MapDataset.source([{"tokens": np.ones(n, np.int32)} for n in range(1, 20)])


def packs(**options: Any) -> Any:
    return records().to_iter_dataset(DIRECT).pipe(bcl.BatchCostLookaheadIterDataset, **options)


def lanes(**options: Any) -> Any:
    return bcl.LanesIterDataset(**options)


COST = bcl.TransformerCost(1.0)
DIMS = {"layers": 2, "width": 8, "heads": 2, "hidden": 16, "vocab_size": 32, "kv_heads": 1, "head_dim": 4}
# What is called, with options that it takes.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "BatchCostLookaheadIterDataset": (packs, {"pack_size": 2, "cost_fn": COST}),
    "PlannerConfig": (bcl.PlannerConfig, {"pack_size": 2}),
    "CostPrior": (bcl.CostPrior, {"mean": 2.0, "records": 3}),
    "TransformerCost": (bcl.TransformerCost, {"per_token": 1.0}),
    "TransformerCost.from_dims": (bcl.TransformerCost.from_dims, DIMS),
    "fit_cost": (bcl.fit_cost, {"timings": [((1, 8), 0.1), ((1, 16), 0.3)]}),
    "fit_cap": (bcl.fit_cap, {"sample_sizes": [1, 2, 3]}),
    "cap_oversize": (bcl.cap_oversize, {"ds": records(), "max_size": 5}),
    "fit_shape": (bcl.fit_shape, {"sample_sizes": [1, 2, 3, 4] * 9, "max_length": 4, "pack_size": 2}),
    "RowPackedLayout": (bcl.RowPackedLayout, {"length": 8, "rows_per_chunk": 2}),
    "RowPackedOneShapeLayout": (bcl.RowPackedOneShapeLayout, {"rows": 2, "length": 8}),
    "BucketedLayout": (bcl.BucketedLayout, {"lengths": (4, 8), "tokens_per_chunk": 8}),
    "PaddedLayout": (bcl.PaddedLayout, {"pack_size": 2, "length": 8}),
    "estimate_cost_prior": (bcl.estimate_cost_prior, {"records": records(), "cost_fn": COST, "pack_size": 2}),
    "plan_lanes": (bcl.plan_lanes, {"num_records": 100, "num_lanes": 4, "pack_size": 2}),
    "lanes_of_host": (bcl.lanes_of_host, {"num_lanes": 4, "host": 0, "num_hosts": 2}),
    "LanesIterDataset": (lanes, {"lanes": {0: packs(pack_size=2, cost_fn=COST)}, "num_lanes": 2}),
}
ANYTHING = {"pad_record"}  # a user's own thing
# Not an option but data, or one whose cost grows with it without bound: huge values are asked for on purpose.
NOT_TRIED = {("cap_oversize", "ds"), ("estimate_cost_prior", "records"), ("LanesIterDataset", "lanes")}
NOT_HUGE = {
    *(("fit_shape", name) for name in ("pack_size", "num_packs", "multiple_of", "max_length", "max_row_length")),
    *(("lanes_of_host", name) for name in ("num_lanes", "num_hosts")),
}


def options(name: str) -> list[str]:
    function, good = CALLS[name]
    if function is packs:
        function = bcl.BatchCostLookaheadIterDataset
    if function is lanes:
        function = bcl.LanesIterDataset
    names = [option for option in inspect.signature(function).parameters if option not in ("self", "parent")]
    assert set(good) <= set(names)
    return names


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in CALLS for option in options(name)])
def test_a_bad_value_is_refused_by_name_and_shown(name: str, option: str) -> None:
    function, good = CALLS[name]
    function(**good)
    if (name, option) in NOT_TRIED or option in ANYTHING:
        return
    refused = 0
    for value in VALUES:
        if type(value) is int and value == HUGE and (name, option) in NOT_HUGE:
            continue
        try:
            function(**{**good, option: value})
        except ValueError as error:
            message = str(error)
            refused += 1
            shown = {repr(value), str(value)} | (
                {repr(list(value))} if isinstance(value, list | tuple | dict) else set()
            )
            shown |= {repr(item) for item in value} if isinstance(value, list | np.ndarray) else set()
            assert any(text in message for text in shown), f"{option}={value!r}: {message}"
            assert len(message) > len(repr(value)) + 15, f"{option}={value!r}: {message}"
    assert refused, f"{option} takes anything"


def test_every_public_name_is_tried_or_has_nothing_to_set() -> None:
    tried = {name.partition(".")[0] for name in CALLS}
    # Types, what the library itself makes, and files and states, which have tests of their own.
    others = {
        "CapReport",
        "CostFit",
        "CostFn",
        "CostTable",
        "LanePlan",
        "LanesIterator",
        "Layout",
        "TableCost",
        "Telemetry",
    }
    others |= {"join_lane_states", "lane_states", "read_lane_states", "write_lane_states", "serve_lanes", "token_cost"}
    others |= {"read_cost_table", "write_cost_table", "fit_rows", "fit_record_cost"}
    assert set(bcl.__all__) - tried - others == set()
