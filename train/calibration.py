"""Times a run's programs on one device: every chunk shape, the update, and whole steps to check the sum against.

Times are taken as the loop spends them, transfers from the host included, with the device idle before and after.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from bcl_grain.cost_table import TableCost
from train.programs import CHUNK_DTYPES, Programs, Shape
from train.step import Chunk, init_state, train_step

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long something takes.

    Attributes:
        seconds: The median.
        spread: Half of the interquartile range / median.
        repeats: Number of measurements.
    """

    seconds: float
    spread: float
    repeats: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Returns the summary of at least one measurement."""
        low, median, high = np.percentile(seconds, [25, 50, 75]).tolist()
        return cls(median, (high - low) / (2 * median), len(seconds))


@dataclasses.dataclass(frozen=True)
class Prediction:
    """How well the sum of chunk times, and the update's, predicts whole steps.

    Attributes:
        predicted: [n] seconds, from the table.
        measured: [n] seconds.
    """

    predicted: tuple[float, ...]
    measured: tuple[float, ...]

    @property
    def r_squared(self) -> float:
        """1 - (squared error / squared deviation of the measured from their mean); the prediction is used as it is.

        Steps that hardly differ leave little to explain: then look at the errors.
        """
        measured = np.array(self.measured)
        residual = np.sum((measured - np.array(self.predicted)) ** 2)
        return float(1 - residual / np.sum((measured - measured.mean()) ** 2))

    @property
    def median_error(self) -> float:
        """Median of |predicted / measured - 1|."""
        return statistics.median(abs(p / m - 1) for p, m in zip(self.predicted, self.measured, strict=True))

    @property
    def ratio(self) -> float:
        """All measured seconds / all predicted."""
        return sum(self.measured) / sum(self.predicted)

    def figures(self) -> dict[str, float | int]:
        """Returns all of it but the single steps, JSON-safe."""
        return {
            "steps": len(self.measured),
            "r_squared": self.r_squared,
            "median_absolute_error": self.median_error,
            "measured_over_predicted": self.ratio,
        }


def full_chunk(shape: Shape, *, vocab_size: int, record_tokens: int | None = None, seed: int = 0) -> Chunk:
    """Returns a chunk without padding.

    Args:
        shape: (rows, length).
        vocab_size: Tokens are drawn below it.
        record_tokens: Length of its records, the last of a row perhaps shorter; default: one record a row.
        seed: Of the tokens.
    """
    length = shape[1]
    places = np.arange(length)
    size = length if record_tokens is None else min(record_tokens, length)
    arrays: Mapping[str, Array] = {
        "tokens": np.random.default_rng(seed).integers(0, vocab_size, shape),
        "tokens_segment_ids": np.broadcast_to(places // size + 1, shape),
        "tokens_positions": np.broadcast_to(places % size, shape),
        "loss_mask": np.ones(shape),
    }
    return {name: np.ascontiguousarray(arrays[name], dtype) for name, dtype in CHUNK_DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        cost: The cost table.
        chunks: Time of each shape, its rows full, one record each.
        update: Time of a step without chunks.
        segments_ratio: Time of the largest chunk with rows of many records / with one record a row: near 1 the kernel
            runs whole rows, whatever they hold, so that a record costs its share of a row.
        prediction: Sums of the table against whole steps.
    """

    cost: TableCost
    chunks: dict[Shape, Timing]
    update: Timing
    segments_ratio: float
    prediction: Prediction


SEGMENTS_PER_ROW = 8


def calibrate(
    programs: Programs,
    packs: Sequence[Sequence[Chunk]],
    *,
    vocab_size: int,
    feature: str = "tokens",
    repeats: int = 7,
    calls: int = 2,
    seed: int = 0,
) -> Calibration:
    """Measures everything on one device.

    Args:
        programs: Compiled for one local device.
        packs: Packs as the layout makes them, to check sums of chunk times against steps. At least two.
        vocab_size: Of the model.
        feature: See `TransformerCost`.
        repeats: Measurements of each time.
        calls: Runs of a chunk in one measurement, one right after the other.
        seed: Of the parameters and tokens.

    Raises:
        ValueError: If there are fewer than two packs, or several devices.
    """
    if len(packs) < 2 or len(programs.local_devices) != 1:
        raise ValueError(
            f"calibration takes at least 2 packs on 1 device, got {len(packs)} on {len(programs.local_devices)}"
        )
    shapes = programs.shapes
    largest = max(shapes, key=lambda shape: shape[0] * shape[1])
    full = [full_chunk(shape, vocab_size=vocab_size, seed=seed) for shape in shapes]
    many = max(1, largest[1] // SEGMENTS_PER_ROW)
    segmented = full_chunk(largest, vocab_size=vocab_size, record_tokens=many, seed=seed)
    bench = _Bench(programs, seed)
    bench.warm_up([*full, segmented])
    of_chunks: list[list[float]] = [[] for _ in (*full, segmented)]
    of_updates: list[float] = []
    of_steps = [0.0] * len(packs)
    # All take turns, so that a machine that slows down does so for all of them.
    for turn in range(repeats):
        for chunk, taken in zip((*full, segmented), of_chunks, strict=True):
            taken.append(bench.chunk_seconds(chunk, calls))
        of_updates.append(bench.step_seconds([]))
        for i in range(turn, len(packs), repeats):
            of_steps[i] = bench.step_seconds(packs[i])
    *timings, of_segments = (Timing.of(taken) for taken in of_chunks)
    by_shape = dict(zip(shapes, timings, strict=True))
    update = Timing.of(of_updates)
    cost = TableCost.from_timings(
        [(shape, timing.seconds) for shape, timing in by_shape.items()],
        update_seconds=update.seconds,
        feature=feature,
    )
    predicted = [sum(cost.of_chunk(*chunk["tokens"].shape) for chunk in pack) + update.seconds for pack in packs]
    return Calibration(
        cost=cost,
        chunks=by_shape,
        update=update,
        segments_ratio=of_segments.seconds / by_shape[largest].seconds,
        prediction=Prediction(tuple(predicted), tuple(of_steps)),
    )


class _Bench:
    """Runs a run's programs under a clock: whatever it times starts and ends with an idle device."""

    def __init__(self, programs: Programs, seed: int) -> None:
        self._programs = programs
        self._device = programs.local_devices[0]
        self._state = init_state(programs, seed=seed)
        self._frozen = _frozen(programs)

    def warm_up(self, chunks: Sequence[Chunk]) -> None:
        """Runs every program once: the first run of one takes longer."""
        for chunk in chunks:
            self.chunk_seconds(chunk, 1)
        self.step_seconds([])

    def chunk_seconds(self, chunk: Chunk, calls: int) -> float:
        """Returns the seconds of one of `calls` runs, one right after the other as in a step."""
        program = self._programs.accumulate[chunk["tokens"].shape, self._device]
        params = jax.tree.map(lambda x: x.addressable_data(0), self._state.params)
        accumulator = self._programs.zeros[self._device]()[0]
        _wait(accumulator)
        begin = time.monotonic()
        for _ in range(calls):
            accumulator = program(accumulator, params, self._frozen, jax.device_put(dict(chunk), self._device))
        _wait(accumulator)
        return (time.monotonic() - begin) / calls

    def step_seconds(self, pack: Sequence[Chunk]) -> float:
        """Returns the seconds of a whole step; without chunks, those of fresh accumulators and the update."""
        begin = time.monotonic()
        self._state, metrics = train_step(self._programs, self._state, [pack], self._frozen)
        _wait((self._state, metrics))
        return time.monotonic() - begin


def _wait(tree: Any) -> None:
    jax.block_until_ready(tree)  # type: ignore[no-untyped-call]


def _frozen(programs: Programs) -> Any:
    """Returns stand-ins for parameters that are not trained, None if all are: a product takes as long with zeros."""
    return jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), programs.abstract_frozen)
