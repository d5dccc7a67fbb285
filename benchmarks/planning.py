"""Planning time per record, by policy, pack size and pool: `python -m benchmarks.planning`."""

from __future__ import annotations

import time
from typing import Any, get_args

import numpy as np

from bcl_grain.planner import PlannerConfig, Policy
from bcl_grain.simulate import plan_stream
from benchmarks.result import write_result


def planning_us_per_record(config: PlannerConfig, *, records: int = 60_000, repeats: int = 3) -> float:
    """Returns the best of `repeats` runs over log-normal costs (sigma 0.9)."""
    pools = max(3, records // config.pool_records)
    costs = np.random.default_rng(0).lognormal(5.9, 0.9, pools * config.pool_records)
    best = np.inf
    for _ in range(repeats):
        begin = time.perf_counter()
        packs = plan_stream(config, costs)
        best = min(best, time.perf_counter() - begin)
        assert sum(map(len, packs)) == costs.size
    return 1e6 * best / costs.size


def main() -> None:
    """Prints a table and writes planning.json."""
    rows: list[dict[str, Any]] = []
    for policy in get_args(Policy):
        for pack_size, lookahead in ((64, 1), (64, 8), (64, 32), (64, 128), (8, 32)):
            config = PlannerConfig(pack_size=pack_size, lookahead=lookahead, policy=policy)
            figure = planning_us_per_record(config)
            rows.append(
                {"policy": policy, "pack_size": pack_size, "pool": config.pool_records, "us_per_record": figure}
            )
            print(
                f"{policy:10s} pack {pack_size:3d}  pool {config.pool_records:5d}  {figure:6.2f} us/record", flush=True
            )
    write_result("planning", {"rows": rows})


if __name__ == "__main__":
    main()
