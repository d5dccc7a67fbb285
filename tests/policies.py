"""Every policy under test, in one place: a new policy joins all the tests below by a line here."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

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
}
EACH_POLICY = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
EACH_TAIL = pytest.mark.parametrize("tail", ["drop", "keep", "pad"])
EACH_STEP_WIDTH = pytest.mark.parametrize("packs_per_step", [1, 3])
