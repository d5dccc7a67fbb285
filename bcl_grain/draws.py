"""Which record lengths arrive on which stream of a simulated job."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

DrawKind = Literal["iid", "shuffled", "order"]


class Arrivals(NamedTuple):
    """One stream's records.

    Attributes:
        lengths: [n] lengths in order of arrival.
        capped: How many of them the cap has shortened.
    """

    lengths: IntArray
    capped: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Draws:
    """The arrivals of every stream, made one stream at a time, so that a job of any size takes little memory.

    Attributes:
        population: [m] lengths of the corpus, in its natural order.
        kind: `iid`: each record drawn with replacement. `shuffled`: one permutation of the corpus an epoch, dealt out
            to the streams record by record. `order`: the same without shuffling. The last two repeat the corpus where
            the job is longer.
        streams: Number of streams.
        records: Records of each stream.
        seed: Key of what is random.
        cap: Longer records are cut to this length; default: none is.

    Raises:
        ValueError: If a value is out of range.

    >>> draws = Draws(population=np.array([5, 6, 7, 8]), kind="order", streams=2, records=3)
    >>> draws.stream(0).lengths.tolist(), draws.stream(1).lengths.tolist()
    ([5, 7, 5], [6, 8, 6])
    """

    population: IntArray
    kind: DrawKind
    streams: int
    records: int
    seed: int = 0
    cap: int | None = None

    def __post_init__(self) -> None:
        if self.population.ndim != 1 or not self.population.size or self.population.min() < 1:
            raise ValueError("population must be a non-empty vector of lengths of at least 1")
        if self.kind not in get_args(DrawKind):
            raise ValueError(f"draws must be one of {get_args(DrawKind)}, got {self.kind!r}")
        for name in ("streams", "records"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if self.cap is not None and self.cap < 1:
            raise ValueError(f"cap must be at least 1, got {self.cap!r}")

    @property
    def longest(self) -> int:
        """The longest record that can arrive."""
        longest = int(self.population.max())
        return longest if self.cap is None else min(longest, self.cap)

    @property
    def records_capped(self) -> int:
        """Records of all streams that the cap has shortened.

        Complexity: that of making all streams.
        """
        return 0 if self.cap is None else sum(self.stream(index).capped for index in range(self.streams))

    def stream(self, index: int) -> Arrivals:
        """Returns the arrivals of one stream, the same whenever it is asked.

        Complexity: O(records), and O(m) for each epoch that is shuffled.
        """
        if self.kind == "iid":
            places = np.random.default_rng([self.seed, index]).integers(self.population.size, size=self.records)
        else:
            places = self._dealt(index)
        lengths = self.population[places]
        if self.cap is None:
            return Arrivals(lengths, 0)
        return Arrivals(np.minimum(lengths, self.cap), int((lengths > self.cap).sum()))

    def _dealt(self, index: int) -> IntArray:
        size = self.population.size
        epochs, places = np.divmod(np.arange(self.records) * self.streams + index, size)
        if self.kind == "shuffled":
            for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
                now = epochs == epoch if epochs[0] != epochs[-1] else slice(None)
                places[now] = _permutation(self.seed, epoch, size)[places[now]]
        return places


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> IntArray:
    return np.random.default_rng([seed, epoch]).permutation(size)
