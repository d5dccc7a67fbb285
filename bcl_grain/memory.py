"""What a training step takes of a device's memory, by arithmetic: state, and activations of one chunk.

The step is a decoupled one (`docs/design.md`): chunk after chunk is run forward and backward, its gradient is added to
an accumulator, and one update follows. So activations depend on the chunk's shape, not on the pack's size.

    peak = state + gradient of a chunk + activations of the chunk, and some per cent for what the arithmetic leaves out

With P parameters the state is P * (parameter + accumulator bytes) + P * optimizer bytes / shards. Of one layer JAX
keeps for the backward pass, for each token, in elements of the activations' type

    7 width          the stream, and for each of two norms its input, normalised and scaled
    2 query_width    queries, attention's output
    4 kv_width       keys and values, before and after they are spread over query heads
    6 hidden         gate, its sigmoid and derivative, its activation, up, their product (4 hidden without a gate)

and of attention either 4 bytes for each head (a fused kernel keeps the softmax's normaliser) or, dense,
`heads * length` scores, once in float32 and once in the activations' type. Without remat all layers' activations live
at once; with remat only each layer's input (`width`), and one layer's activations, which are computed again. Dense
scores have a gradient as large as they are. Logits exist slice by slice, in float32, with their gradient: two times
`logits_at_once` at most.

The coefficients were read off XLA's own memory analysis of this project's trainer, in float32 on a CPU with dense
attention: without remat the arithmetic is between 5 % below and 8 % above what XLA plans; with remat it is above
throughout, by 4 % for long chunks and up to 74 % for small ones. What is not an activation is left out: the process
itself on a CPU, the workspace of matrix products, what several devices add up in an update.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from bcl_grain.models import ModelDims

Attention = Literal["fused", "dense"]

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Bytes of one device. The defaults are those of this project's trainer on an accelerator, but for the logits.

    Attributes:
        dims: The model.
        param_bytes: Bytes of a parameter.
        grad_bytes: Bytes of an entry of a chunk's gradient.
        accumulator_bytes: Bytes of an entry of the gradient accumulator; 0 for a trainer that has none.
        optimizer_bytes: Bytes of optimizer state a parameter: 8 for Adam in float32, 12 with a float32 master copy.
        optimizer_shards: Ranks that the optimizer state is spread over (ZeRO-1).
        activation_bytes: Bytes of an activation.
        remat: Whether the backward pass computes a layer's activations again.
        attention: Whether the kernel keeps scores ("dense") or not ("fused").
        logits_at_once: Logits that exist at a time. The trainer makes 2**27 on an accelerator: 0.9 GiB more.
        reserve: Share of the budget for what the arithmetic leaves out: runtime, fragmentation, compiled code.

    Raises:
        ValueError: If a value is out of range.
    """

    dims: ModelDims
    param_bytes: int = 4
    grad_bytes: int = 4
    accumulator_bytes: int = 4
    optimizer_bytes: int = 8
    optimizer_shards: int = 1
    activation_bytes: int = 2
    remat: bool = True
    attention: Attention = "fused"
    logits_at_once: int = 2**24
    reserve: float = 0.1

    def __post_init__(self) -> None:
        for name in ("param_bytes", "activation_bytes", "optimizer_shards", "logits_at_once"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        for name in ("grad_bytes", "accumulator_bytes", "optimizer_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)!r}")
        if self.attention not in ("fused", "dense"):
            raise ValueError(f"attention must be 'fused' or 'dense', got {self.attention!r}")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve must be at least 0 and below 1, got {self.reserve!r}")

    @property
    def state_bytes(self) -> int:
        """Parameters, accumulator, a chunk's gradient and optimizer state: what no chunk can do without."""
        parameters = self.dims.num_parameters
        kept = parameters * (self.param_bytes + self.grad_bytes + self.accumulator_bytes)
        return kept + -(-parameters * self.optimizer_bytes // self.optimizer_shards)

    def layer_bytes(self, rows: int, length: int) -> int:
        """Activations that the backward pass needs of one layer, for a chunk [rows, length]."""
        dims = self.dims
        stream = 7 * dims.width + 2 * dims.query_width + 4 * dims.kv_width
        elements = stream + (6 if dims.gated else 4) * dims.hidden
        return rows * length * elements * self.activation_bytes + self._score_bytes(rows, length)

    def chunk_bytes(self, rows: int, length: int) -> int:
        """Activations of a chunk [rows, length]: layers, gradients of dense scores, final norm, logits.

        Complexity: O(1).
        """
        dims = self.dims
        tokens = rows * length
        layer = self.layer_bytes(rows, length)
        stream = tokens * dims.width * self.activation_bytes
        layers = dims.layers * stream + layer if self.remat else dims.layers * layer
        gradients = self._score_bytes(rows, length) if self.attention == "dense" else 0
        slice_tokens = min(tokens, max(1, self.logits_at_once // dims.vocab_size))
        return layers + gradients + 2 * stream + 2 * 4 * slice_tokens * dims.vocab_size

    def _score_bytes(self, rows: int, length: int) -> int:
        of_query = 4 if self.attention == "fused" else length * (4 + self.activation_bytes)
        return rows * length * self.dims.heads * of_query

    def peak_bytes(self, rows: int, length: int) -> int:
        """State and activations of a chunk [rows, length]."""
        return self.state_bytes + self.chunk_bytes(rows, length)

    def usable_bytes(self, budget_gib: float) -> float:
        """Returns what of a budget is left after the reserve.

        Raises:
            ValueError: If the budget is not positive, or below the model's own state.
        """
        if not budget_gib > 0:
            raise ValueError(f"the memory budget must be positive, got {budget_gib!r} GiB")
        usable = (1 - self.reserve) * budget_gib * GIB
        if usable <= self.state_bytes:
            raise ValueError(
                f"a budget of {budget_gib:g} GiB is below the model's own size: parameters, gradients and optimizer "
                f"state take {self.state_bytes / GIB:.1f} GiB, and {self.reserve:.0%} of the budget is kept in "
                "reserve; raise the budget, take a smaller model, keep the state in fewer bytes, or shard it"
            )
        return usable

    def fits(self, rows: int, length: int, budget_gib: float) -> bool:
        """Whether a chunk [rows, length] fits a budget, the reserve kept.

        Raises:
            ValueError: As `usable_bytes`.
        """
        return self.peak_bytes(rows, length) <= self.usable_bytes(budget_gib)

    def most_rows(self, length: int, budget_gib: float) -> int:
        """Returns the most rows of `length` that a chunk may have; 0 where not even one fits.

        Raises:
            ValueError: As `usable_bytes`.

        Complexity: O(log of the answer).
        """
        if not self.fits(1, length, budget_gib):
            return 0
        rows = 1
        while self.fits(2 * rows, length, budget_gib):
            rows *= 2
        step = rows
        while step := step // 2:
            rows += step if self.fits(rows + step, length, budget_gib) else 0
        return rows

    def longest_row(self, budget_gib: float, *, multiple_of: int = 128) -> int:
        """Returns the longest row of a chunk [1, length] that fits, a multiple of `multiple_of`; 0 where none does.

        Raises:
            ValueError: As `usable_bytes`.
        """
        if not self.fits(1, multiple_of, budget_gib):
            return 0
        units = 1
        while self.fits(1, 2 * units * multiple_of, budget_gib):
            units *= 2
        step = units
        while step := step // 2:
            units += step if self.fits(1, (units + step) * multiple_of, budget_gib) else 0
        return units * multiple_of
