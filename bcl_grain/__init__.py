"""Batch Cost Lookahead for Grain: even training steps from records of uneven cost."""

from bcl_grain.costs import CostFit, CostFn, TransformerCost, fit_cost, token_cost
from bcl_grain.dataset import BatchCostLookaheadIterDataset
from bcl_grain.planner import PlannerConfig
from bcl_grain.telemetry import Telemetry

__all__ = [
    "BatchCostLookaheadIterDataset",
    "CostFit",
    "CostFn",
    "PlannerConfig",
    "Telemetry",
    "TransformerCost",
    "fit_cost",
    "token_cost",
]
