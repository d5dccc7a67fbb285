"""Measured costs: seconds of each chunk shape on a device, kept in a JSON file."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bcl_grain.costs import TransformerCost, fit_cost, fit_record_cost
from bcl_grain.json_files import read_json

Shape = tuple[int, int]


class Layout(Protocol):
    """What `bcl_grain.layouts.Layout` offers here."""

    def executed_cost(self, sizes: Sequence[int], cost_model: Any) -> float:
        """Returns the cost of the chunks of a pack of these sizes."""


KIND = "bcl-grain cost table"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class TableCost(TransformerCost):
    """A cost model in seconds whose chunks cost what was measured. What a record costs is fitted: see `with_records`.

    Attributes:
        chunk_seconds: ((rows, length), seconds) of every chunk shape that was timed.
        update_seconds: What a step takes beside its chunks: the update. Not part of any cost; the same for all ranks.

    Raises:
        ValueError: If no shape was timed, one twice, or a time is not positive and finite.

    >>> cost = TableCost.from_timings([((1, 128), 0.2), ((2, 128), 0.3)])
    >>> cost.of_chunk(2, 128)
    0.3
    >>> print(f"{cost({'tokens': range(64)}):.2f}")
    0.05
    """

    chunk_seconds: tuple[tuple[Shape, float], ...] = ()
    update_seconds: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self._table) != len(self.chunk_seconds) or not self.chunk_seconds:
            raise ValueError(f"chunk_seconds must hold each shape once, and at least one, got {self.chunk_seconds!r}")
        for shape, seconds in self.chunk_seconds:
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"the time of a chunk {shape} must be positive and finite, got {seconds!r}")
        if not (math.isfinite(self.update_seconds) and self.update_seconds >= 0):
            raise ValueError(f"update_seconds must be finite and at least 0, got {self.update_seconds!r}")

    @classmethod
    def from_timings(
        cls, timings: Sequence[tuple[Shape, float]], *, update_seconds: float = 0.0, feature: str = "tokens"
    ) -> TableCost:
        """Returns the table with a record cost by `fit_cost`, as if every record had a row of its own length.

        By tokens alone if only one shape, or only one row length, was timed.

        Args:
            timings: ((rows, length), seconds), each shape once.
            update_seconds: See `TableCost`.
            feature: See `TransformerCost`.

        Raises:
            ValueError: See `TableCost`.
        """
        if len(timings) == 1:
            ((rows, length), seconds), *_ = timings
            fitted = TransformerCost(per_token=seconds / (rows * length))
        else:
            fitted = fit_cost(timings).cost
        return cls(
            fitted.per_token, fitted.per_token_squared, fitted.per_chunk, feature, tuple(timings), update_seconds
        )

    def of_chunk(self, rows: int, length: int) -> float:
        """Returns the measured seconds of a chunk; where several row lengths were timed, else those of the fit.

        Raises:
            ValueError: If the shape was not timed and only one row length was, which says nothing about others.
        """
        seconds = self._table.get((rows, length))
        if seconds is not None:
            return seconds
        if len({timed for _, timed in self._table}) == 1:
            raise ValueError(
                f"the cost table has no chunk of shape {(rows, length)}, only {', '.join(map(str, self._table))}: "
                "calibrate with a layout that has it, or take a layout of these shapes"
            )
        return self._fit.of_chunk(rows, length)

    def with_records(self, layout: Layout, packs: Sequence[Sequence[int]]) -> TableCost:
        """Returns the table with the record cost that comes nearest to what packs take in a layout.

        Args:
            layout: Packs to chunks, all of them timed.
            packs: Lengths of some packs' records, in tokens, at least two.

        Raises:
            ValueError: If a pack does not fit the layout, or a shape was not timed.

        Complexity: that of laying out the packs.
        """
        record = fit_record_cost(packs, [layout.executed_cost(pack, self) for pack in packs])
        return dataclasses.replace(self, per_token=record.per_token, per_token_squared=record.per_token_squared)

    @functools.cached_property
    def _fit(self) -> TransformerCost:
        return fit_cost(self.chunk_seconds).cost

    @functools.cached_property
    def _table(self) -> dict[Shape, float]:
        return dict(self.chunk_seconds)


class CostTable(NamedTuple):
    """What a file of measured costs holds.

    Attributes:
        cost: The cost model.
        about: Where the figures come from, JSON-safe: device, model, commit, ...
    """

    cost: TableCost
    about: dict[str, Any]


def write_cost_table(table: CostTable, path: str | Path) -> None:
    """Writes a cost table as JSON; `read_cost_table` gives the same back."""
    cost = table.cost
    document = {
        "kind": KIND,
        "format": _FORMAT,
        "chunks": [{"rows": rows, "length": length, "seconds": s} for (rows, length), s in cost.chunk_seconds],
        "update_seconds": cost.update_seconds,
        "record_cost": {
            "per_token": cost.per_token,
            "per_token_squared": cost.per_token_squared,
            "per_chunk": cost.per_chunk,
        },
        "about": table.about,
    }
    Path(path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def read_cost_table(path: str | Path, *, feature: str = "tokens") -> CostTable:
    """Reads a cost table.

    Args:
        path: A file that `python -m train.calibrate`, or `write_cost_table`, wrote.
        feature: See `TransformerCost`.

    Raises:
        ValueError: If the file can't be read, is none of ours, or its values are impossible.
    """
    try:
        document = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cost table {str(path)!r} can't be read ({error}): write one with train.calibrate") from error
    if not isinstance(document, dict) or (document.get("kind"), document.get("format")) != (KIND, _FORMAT):
        raise ValueError(f"{str(path)!r} is no cost table of format {_FORMAT}: write one with train.calibrate")
    try:
        record_cost = document["record_cost"]
        cost = TableCost(
            float(record_cost["per_token"]),
            float(record_cost["per_token_squared"]),
            float(record_cost["per_chunk"]),
            feature,
            tuple(((int(c["rows"]), int(c["length"])), float(c["seconds"])) for c in document["chunks"]),
            float(document["update_seconds"]),
        )
        return CostTable(cost, dict(document["about"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"cost table {str(path)!r} is damaged ({error!r}): write it anew with train.calibrate"
        ) from error
