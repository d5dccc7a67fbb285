"""Runs a policy over streams of costs, without data: the same planner, driven as the dataset drives it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bcl_grain.planner import PlannerConfig, finished, initial_state, plan_cycle, records_wanted

FloatArray = npt.NDArray[np.float64]


def plan_stream(config: PlannerConfig, costs: npt.ArrayLike) -> list[list[int]]:
    """Returns every pack that one stream gives: arrival positions, in the order in which the packs come.

    Args:
        config: The settings.
        costs: [n] costs of the stream's records, positive and finite.

    Raises:
        ValueError: If the stream is too short (see `planner.plan_cycle`).

    Complexity: O(n log W) for a pool of W records.

    >>> plan_stream(PlannerConfig(pack_size=2, policy="arrival"), [9.0, 1.0, 8.0, 2.0])
    [[0, 1], [2, 3]]
    """
    values = np.asarray(costs, np.float64)
    packs: list[list[int]] = []
    state = initial_state(config)
    while not finished(config, state):
        end = min(state.read + records_wanted(config, state), values.size)
        # As in a pipeline, the end shows only when the stream has less than is wanted.
        final = end - state.read < records_wanted(config, state)
        cycle = plan_cycle(config, state, values[state.read : end], final=final)
        packs += cycle.packs
        state = cycle.state
        if final:
            break
    return packs


def pack_costs(packs: Sequence[Sequence[int]], costs: npt.ArrayLike) -> FloatArray:
    """Returns the estimated cost of each pack, fillers counted as nothing.

    >>> pack_costs([[0, 1], [2, -1]], [9.0, 1.0, 8.0])
    array([10.,  8.])
    """
    values = np.append(np.asarray(costs, np.float64), 0.0)  # a filler's position -1 finds the 0
    return np.array([values[list(pack)].sum() for pack in packs])
