"""What a plan depends on, besides the costs: the planner's settings."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any, Literal, get_args

from bcl_grain.capacity import Capacity, checked_capacity
from bcl_grain.checks import check_choice, checked_integer
from bcl_grain.cost_prior import CostPrior

Policy = Literal["arrival", "windowed", "streaming"]
Order = Literal["shuffled", "aligned"]
Tail = Literal["drop", "keep", "pad"]
OnOverflow = Literal["error", "extra_chunk"]
OnChangedSettings = Literal["error", "finish_pool"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """What a plan depends on, besides the costs.

    Attributes:
        pack_size: Records in a pack.
        packs_per_step: Packs of this stream that one step consumes: the local devices it feeds.
        lookahead: Pool length in steps. The pool holds `pack_size * packs_per_step * lookahead` records.
        policy: `arrival` takes consecutive records (the baseline); `windowed` partitions one full pool after the
            other into packs of balanced cost; `streaming` aims every pack at the long-run mean and carries half of
            the pool from cycle to cycle (see `bcl_grain.streaming`).
        order: In which order a cycle's steps come. `shuffled`: independently on every stream. `aligned`: ranked by
            cost and placed by a permutation that is alike on all streams with the same seed, so that the dearest
            steps of all ranks meet. Arrival keeps the order of arrival.
        tail: What happens to arrivals that don't fill a step when the stream ends: `drop` them before planning,
            `keep` them as a short last step, or `pad` the last step with weightless records.
        num_packs: Packs that the stream gives in all, a multiple of `packs_per_step`; the same on every rank, from
            the global record count. Default: as many as the stream fills.
        seed: Key of the order.
        max_age: `streaming`: a record comes out at most so many cycles after it was read.
        prior: `streaming`: what is known of the mean cost beforehand, alike on all streams.
        capacity: What a pack may hold, cost being the objective: a number of tokens in all, or the (rows, length)
            of a `RowPackedOneShapeLayout`, which then holds every pack. It goes before `max_age`. Arrival, which
            moves no record, is only checked. With `num_packs`, `streaming` prepares for its last pool, which can
            exchange with nothing: without it that one is over the capacity more often.
        on_overflow: What happens if no packs within the capacity are found: an `error` before any pack of the
            cycle comes out, or packs that are too large and need an `extra_chunk` of a layout that has such.

    Raises:
        ValueError: If a value is out of range; the message shows it.
    """

    pack_size: int
    packs_per_step: int = 1
    lookahead: int = 32
    policy: Policy = "streaming"
    order: Order = "aligned"
    tail: Tail = "drop"
    num_packs: int | None = None
    seed: int = 0
    max_age: int = 16
    prior: CostPrior | None = None
    capacity: Capacity | None = None
    on_overflow: OnOverflow = "error"

    def __post_init__(self) -> None:
        least_values = (("pack_size", 1), ("packs_per_step", 1), ("lookahead", 1), ("seed", 0), ("max_age", 1))
        for name, least in least_values:
            object.__setattr__(self, name, checked_integer(name, getattr(self, name), least))
        choices = (("policy", Policy), ("order", Order), ("tail", Tail), ("on_overflow", OnOverflow))
        for name, allowed in choices:
            check_choice(name, getattr(self, name), get_args(allowed))
        if not (self.prior is None or isinstance(self.prior, CostPrior)):
            raise ValueError(f"prior must be a CostPrior, as estimate_cost_prior returns, or None, got {self.prior!r}")
        if self.capacity is not None:
            object.__setattr__(self, "capacity", checked_capacity(self.capacity))
        if self.num_packs is not None:
            object.__setattr__(self, "num_packs", checked_integer("num_packs", self.num_packs, 1))
            if self.num_packs % self.packs_per_step:
                raise ValueError(
                    f"num_packs {self.num_packs} is not a multiple of packs_per_step {self.packs_per_step}: the "
                    "last step would not feed every device"
                )

    @property
    def step_records(self) -> int:
        """Records that one step consumes."""
        return self.pack_size * self.packs_per_step

    @property
    def pool_records(self) -> int:
        """Records that the pool holds, W in the formulas."""
        return self.step_records * self.lookahead

    def describe(self) -> str:
        """Returns the settings as one line, `name=value` apart by spaces: a checkpoint's fingerprint.

        `capacity` and `on_overflow` are left out: they may change from cycle to cycle.

        >>> PlannerConfig(pack_size=4, lookahead=2).describe()[:73]
        'pack_size=4 packs_per_step=1 lookahead=2 policy=streaming order=aligned t'
        """
        return " ".join(f"{name}={str(getattr(self, name)).replace(' ', '')}" for name in _described())

    def from_description(self, line: str) -> PlannerConfig:
        """Returns this config with the settings of a line that `describe` returned.

        Raises:
            ValueError: If the line is none, or a setting is out of range.

        >>> config = PlannerConfig(pack_size=4, policy="streaming", prior=CostPrior(mean=1.5, records=9))
        >>> PlannerConfig(pack_size=2).from_description(config.describe()) == config
        True
        """
        pairs = [pair.partition("=")[::2] for pair in line.split(" ")]
        if [name for name, _ in pairs] != _described():
            raise ValueError(f"expected settings like {self.describe()!r}, got {line!r}")
        return dataclasses.replace(self, **{name: _read_setting(value) for name, value in pairs})


def _described() -> list[str]:
    return [f.name for f in dataclasses.fields(PlannerConfig) if f.name not in ("capacity", "on_overflow")]


def _read_setting(text: str) -> Any:
    """Returns the value that `describe` wrote: a number, None, a word, or a prior; runs nothing of the text."""
    try:
        tree = ast.parse(text, mode="eval").body
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == CostPrior.__name__:
            return CostPrior(**{str(word.arg): ast.literal_eval(word.value) for word in tree.keywords})
        return text if isinstance(tree, ast.Name) else ast.literal_eval(tree)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"can't read the setting {text!r} ({error})") from error
