"""Every policy under test, in one place: a new policy joins all the tests below by a line here."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bcl_grain.cost_prior import CostPrior
from bcl_grain.planner import PlannerConfig


@dataclasses.dataclass(frozen=True)
class PolicyCase:
    """One way to plan.

    Attributes:
        settings: Arguments of `PlannerConfig` and of the transformation.
        balances: Whether the packs of a step have equal planned cost.
        random_access: Whether any pack can be gone to by its index.
    """

    settings: dict[str, Any]
    balances: bool = True
    random_access: bool = True

    def config(self, **more: Any) -> PlannerConfig:
        return PlannerConfig(**{**self.settings, **more})


POLICIES: dict[str, PolicyCase] = {
    "arrival": PolicyCase({"policy": "arrival"}, balances=False),
    "windowed": PolicyCase({"policy": "windowed"}),
    "windowed-aligned": PolicyCase({"policy": "windowed", "order": "aligned"}),
    "streaming": PolicyCase({"policy": "streaming", "order": "aligned"}, random_access=False),
    "streaming-prior": PolicyCase(
        {"policy": "streaming", "max_age": 2, "prior": CostPrior(mean=1.7, records=1000, ceiling=9.0)},
        random_access=False,
    ),
}


def _each(cases: dict[str, PolicyCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("policy", cases.values(), ids=cases.keys())


EACH_POLICY = _each(POLICIES)
EACH_BALANCING_POLICY = _each({name: case for name, case in POLICIES.items() if case.balances})
EACH_RANDOM_ACCESS_POLICY = _each({name: case for name, case in POLICIES.items() if case.random_access})
EACH_TAIL = pytest.mark.parametrize("tail", ["drop", "keep", "pad"])
EACH_STEP_WIDTH = pytest.mark.parametrize("packs_per_step", [1, 3])
