"""Batch Cost Lookahead for Grain: even training steps from records of uneven cost."""

from bcl_grain.caps import CapReport, cap_oversize, fit_cap
from bcl_grain.cost_prior import CostPrior, estimate_cost_prior
from bcl_grain.cost_table import CostTable, TableCost, read_cost_table, write_cost_table
from bcl_grain.costs import CostFit, CostFn, TransformerCost, fit_cost, fit_record_cost, token_cost
from bcl_grain.dataset import BatchCostLookaheadIterDataset
from bcl_grain.lane_files import read_lane_states, write_lane_states
from bcl_grain.lanes import (
    LanePlan,
    LanesIterator,
    LanesIterDataset,
    join_lane_states,
    lane_states,
    lanes_of_host,
    plan_lanes,
    serve_lanes,
)
from bcl_grain.layouts import BucketedLayout, Layout, PaddedLayout, RowPackedLayout, RowPackedOneShapeLayout
from bcl_grain.planner import PlannerConfig
from bcl_grain.shapes import fit_rows, fit_shape
from bcl_grain.telemetry import Telemetry

__all__ = [
    "BatchCostLookaheadIterDataset",
    "BucketedLayout",
    "CapReport",
    "CostFit",
    "CostFn",
    "CostPrior",
    "CostTable",
    "LanePlan",
    "LanesIterDataset",
    "LanesIterator",
    "Layout",
    "PaddedLayout",
    "PlannerConfig",
    "RowPackedLayout",
    "RowPackedOneShapeLayout",
    "TableCost",
    "Telemetry",
    "TransformerCost",
    "cap_oversize",
    "estimate_cost_prior",
    "fit_cap",
    "fit_cost",
    "fit_record_cost",
    "fit_rows",
    "fit_shape",
    "join_lane_states",
    "lane_states",
    "lanes_of_host",
    "plan_lanes",
    "read_cost_table",
    "read_lane_states",
    "serve_lanes",
    "token_cost",
    "write_cost_table",
    "write_lane_states",
]
