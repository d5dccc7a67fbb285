"""What a run is: one typed value, validated before anything is compiled or written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, Literal

from bcl_grain.layouts import Layout, RowPackedLayout, RowPackedOneShapeLayout
from bcl_grain.planner import Order, PlannerConfig, Policy
from bcl_grain.planner_config import OnChangedSettings
from train.attention import AttentionName
from train.conversations import DEFAULT_COLUMNS, Columns
from train.corpus import EVAL_SHARE
from train.model import ModelConfig


def _check_least(config: object, name: str, least: int) -> None:
    value = getattr(config, name)
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value >= 2**31:
        raise ValueError(f"{name} must be below {2**31:,}, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Text and how it becomes records.

    Attributes:
        path: A JSONL file of pairs; default: the interpreter's own standard library.
        chat_paths: Conversations instead: files, directories or patterns of JSONL, Parquet, ArrayRecord or saved
            `datasets`, for a pretrained model with a chat template.
        chat_weights: Their shares in training, one for each; default: all rows of all.
        train_on: What of a conversation counts in the loss: the "assistant"'s messages, its "last" one, or "all".
        on_bad_row: What happens to a row that can't be used: `stop`, after all such rows were named, or `skip`.
        tokenizer: A Hugging Face `tokenizer.json` or its directory; default: bytes.
        eos_token: The token that ends a response; default: what the tokenizer's configuration says.
        split_answers: Make each of the assistant's messages a record of its own, with all that precedes it: for
            templates that write an answer differently once others follow it.
        tool_format: Who writes tool calls: the chat `template`, or, where it does not know them, `text` in the content.
        chat_columns: The names of the rows' columns.
        chat_template: A file with a template in Jinja's language instead of the model's own; for models without one.
        eval_share: Share of modules, or of conversations, held out.
        max_tokens: Cap of a record.
        on_oversize: What happens to a record above it: `error`, `truncate` or `drop`.
    """

    path: str | None = None
    chat_paths: tuple[str, ...] = ()
    chat_weights: tuple[float, ...] | None = None
    train_on: Literal["assistant", "last", "all"] = "assistant"
    on_bad_row: Literal["stop", "skip"] = "stop"
    split_answers: bool = False
    tool_format: Literal["template", "text"] = "template"
    chat_columns: Columns = DEFAULT_COLUMNS
    chat_template: str | None = None
    tokenizer: str | None = None
    eos_token: str | None = None
    eval_share: float = EVAL_SHARE
    max_tokens: int = 1024
    on_oversize: Literal["error", "truncate", "drop"] = "error"

    def __post_init__(self) -> None:
        _check_least(self, "max_tokens", 2)
        if self.on_oversize not in ("error", "truncate", "drop"):
            raise ValueError(f"on_oversize must be 'error', 'truncate' or 'drop', got {self.on_oversize!r}")
        if self.train_on not in ("assistant", "last", "all"):
            raise ValueError(f"train_on must be 'assistant', 'last' or 'all', got {self.train_on!r}")
        if self.tool_format not in ("template", "text"):
            raise ValueError(f"tool_format must be 'template' or 'text', got {self.tool_format!r}")
        if self.on_bad_row not in ("stop", "skip"):
            raise ValueError(f"on_bad_row must be 'stop' or 'skip', got {self.on_bad_row!r}")
        if self.chat_paths and (self.path is not None or self.tokenizer is not None):
            raise ValueError(
                "corpus.chat_paths brings its own text, tokenized as the model says: drop path and tokenizer"
            )
        if self.chat_weights is not None and len(self.chat_weights) != len(self.chat_paths):
            raise ValueError(f"want one of chat_weights {self.chat_weights} for each of chat_paths {self.chat_paths}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How records become packs; see `bcl_grain.PlannerConfig`.

    Attributes:
        pack_size: Records that one device consumes in one step.
        lookahead: Pool length in steps.
        policy: `streaming`, `windowed`, or `arrival` for the baseline.
        order: In which order a cycle's steps come.
        prior_records: Records whose cost is looked at before the first step, so that all ranks know the mean: all of
            them where the corpus has no more, else a random sample. 0 for none.
        cost_table: A file that `python -m train.calibrate` wrote for this model and layout: costs are its seconds.
            Default: the model's FLOPs.
        lanes: Streams that the data is dealt out to, each balanced on its own; fixed for the life of a run, which may
            run on any number of processes that divides it. Default: one for each process at the first start.
        packs_per_step: Packs of a lane in one step. Default: one for each device that serves the lane at the first
            start. A step has `lanes * packs_per_step` packs, on however many devices.
    """

    pack_size: int = 16
    lookahead: int = 32
    policy: Policy = "streaming"
    order: Order = "aligned"
    prior_records: int = 100_000
    cost_table: str | None = None
    lanes: int | None = None
    packs_per_step: int | None = None

    def __post_init__(self) -> None:
        _check_least(self, "prior_records", 0)
        for name in ("lanes", "packs_per_step"):
            if getattr(self, name) is not None:
                _check_least(self, name, 1)
        PlannerConfig(pack_size=self.pack_size, lookahead=self.lookahead, policy=self.policy, order=self.order)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitRows:
    """In a layout's place: the row-packed layout that `bcl_grain.fit_rows` chooses for the run's records and costs.

    Attributes:
        most_shapes: Row lengths, each a program to compile. More of them execute less padding and less attention.
        multiple_of: Row lengths are multiples of it; some attention kernels of GPUs want 128.
    """

    most_shapes: int = 4
    multiple_of: int = 128

    def __post_init__(self) -> None:
        for name in ("most_shapes", "multiple_of"):
            _check_least(self, name, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up and cosine decay; see `train.state.make_optimizer`.

    Attributes:
        learning_rate: Its peak.
        warmup_steps: Updates until the peak.
        final_share: Last learning rate as a share of the peak.
        weight_decay: For matrices.
        b1: Decay of the gradient's running mean.
        b2: Decay of its running square.
        max_grad_norm: Gradients of a larger norm are scaled down to it.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 20
    final_share: float = 0.1
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        _check_least(self, "warmup_steps", 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How a run is fed, what it tells and what it keeps.

    None of it changes what is learned, but for `on_changed_balance` on request: a resumed run may have another.

    Attributes:
        token_cache: Directory that keeps the tokens of conversations, so that they are made once; None keeps them for
            this process alone, in the system's temporary directory.
        data_workers: Processes that make them; default: as many as there are CPUs, if it takes long.
        prefetch_steps: Steps whose packs a thread keeps ready; 0 for none.
        eval_every: Steps between evaluations; the start and the end are always evaluated.
        checkpoint_every: Steps between checkpoints; the end is always saved.
        keep_checkpoints: Checkpoints that stay.
        simulated_ranks: Ranks of the comparison of the policy with arrival; fewer if the corpus does not fill a step.
        simulated_steps: Its steps.
        zero1: Keep a part of the optimizer's state on each device instead of a copy on all (ZeRO-1): less memory.
        on_late_compilation: What a compilation after warm-up is: a `warn`ing or an `error`.
        on_changed_balance: What a resumed run does with another balance.lookahead, policy or order than it was started
            with: an `error`, or `finish_pool`: what the pool holds comes out as it was planned, then the new ones
            start. The run has the new ones for good then.
        attention: The kernel; `auto` takes the fastest that the device and the layout allow (docs/attention.md).
        memory_gib: What a device may take; default: what it has. A run that needs more is refused before it begins.
        sample_prompts: Questions that a pretrained model answers at every evaluation, into `samples.jsonl`.
        sample_tokens: Tokens of an answer, at most.
        export: Write the trained model, or its adapters, for others to load, at the end of a pretrained model's run.
    """

    token_cache: str | None = "runs/token-cache"
    data_workers: int | None = None
    prefetch_steps: int = 2
    eval_every: int = 50
    checkpoint_every: int = 50
    keep_checkpoints: int = 2
    simulated_ranks: int = 8
    simulated_steps: int = 160
    zero1: bool = False
    on_late_compilation: Literal["warn", "error"] = "warn"
    on_changed_balance: OnChangedSettings = "error"
    attention: AttentionName = "auto"
    memory_gib: float | None = None
    sample_prompts: tuple[str, ...] = ()
    sample_tokens: int = 128
    export: bool = True

    def __post_init__(self) -> None:
        _check_least(self, "prefetch_steps", 0)
        counts = ("eval_every", "checkpoint_every", "keep_checkpoints", "simulated_ranks", "simulated_steps")
        for name in (*counts, "sample_tokens"):
            _check_least(self, name, 1)
        if self.data_workers is not None:
            _check_least(self, "data_workers", 1)
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise ValueError(f"memory_gib must be positive, got {self.memory_gib!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run.

    Attributes:
        corpus: Text and how it becomes records.
        balance: How records become packs.
        layout: How packs become chunks: a layout of the library, whose `pad_id` follows the tokenizer, or `FitRows`.
        model: Dimensions. A `vocab_size` of 1 stands for the tokenizer's. Of a pretrained model's run only `lora` and
            `remat` are looked at.
        pretrained: A model to start from: a Hugging Face directory or a GGUF file. With `model.lora` it stays as it is
            and adapters are trained.
        adapters: Adapters to start from, a directory in PEFT's format; default: fresh ones.
        optimizer: How gradients become updates.
        runtime: What does not change the result.
        steps: Updates; default: as many as `epochs` fill.
        epochs: Times that the corpus is read, if `steps` is None.
        constant_denominator: Divide gradients by the *expected* number of tokens of a step instead of its own: then
            every token weighs the same, whatever the order of steps.
        step: `decoupled`: each device runs its own chunks, then all update. `spmd`: the whole step is one program for
            all devices; every pack must fit one shape, that of a `RowPackedOneShapeLayout` or one that `fit_shape`
            proposes for the length of a `RowPackedLayout`.
        seed: Key of the parameters, the shuffle and the order.

    Raises:
        ValueError: If a value is out of range; the message shows it.
    """

    corpus: CorpusConfig = CorpusConfig()
    balance: BalanceConfig = BalanceConfig()
    layout: Layout | FitRows = FitRows()
    model: ModelConfig = dataclasses.field(default_factory=lambda: ModelConfig(vocab_size=1))
    pretrained: str | None = None
    adapters: str | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    steps: int | None = None
    epochs: int = 1
    constant_denominator: bool = False
    step: Literal["decoupled", "spmd"] = "decoupled"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps is not None:
            _check_least(self, "steps", 1)
        _check_least(self, "epochs", 1)
        _check_least(self, "seed", 0)
        if self.step not in ("decoupled", "spmd"):
            raise ValueError(f"step must be 'decoupled' or 'spmd', got {self.step!r}")
        if self.step == "spmd" and not isinstance(self.layout, RowPackedLayout | RowPackedOneShapeLayout):
            raise ValueError(
                f"step 'spmd' needs packs of one shape, which {type(self.layout).__name__} does not give: use "
                "RowPackedOneShapeLayout, or RowPackedLayout for a shape that follows from the data"
            )
        if self.pretrained is None and (self.corpus.chat_paths or self.model.lora or self.runtime.sample_prompts):
            raise ValueError(
                "corpus.chat_paths, model.lora and runtime.sample_prompts need a pretrained model: set `pretrained` to "
                "a Hugging Face directory or a GGUF file"
            )
        if self.adapters is not None and self.model.lora is None:
            raise ValueError(f"adapters {self.adapters!r} are trained on as adapters: set model.lora as they were made")
        if self.pretrained is not None and not self.corpus.chat_paths:
            raise ValueError("a pretrained model learns from conversations: set corpus.chat_paths")
        if isinstance(self.layout, FitRows):
            return
        longest = max(length for _, length in self.layout.shapes)
        if self.corpus.max_tokens > longest:
            raise ValueError(
                f"corpus.max_tokens {self.corpus.max_tokens} is longer than the layout's longest row {longest}: such "
                "records would fit no chunk; lower the one or raise the other"
            )

    def identity(self) -> dict[str, Any]:
        """Returns all that the result depends on, JSON-safe: two runs with the same are the same run.

        Of data, a tokenizer, a chat template, a cost table, a model and adapters what they hold counts, not where they
        lie: `prepare` adds that.
        """
        values = dataclasses.asdict(self)
        del values["runtime"], values["balance"]["cost_table"], values["pretrained"], values["adapters"]
        for path in ("path", "chat_paths", "chat_template", "tokenizer"):
            del values["corpus"][path]
        values["layout"]["kind"] = type(self.layout).__name__
        return values


CHANGEABLE = ("lookahead", "policy", "order")
"""Fields of BalanceConfig that a resumed run may change, on request."""


def fingerprint(identity: dict[str, Any]) -> str:
    """Returns a short hash of a run's identity, but for what may change on its way; the same on every machine."""
    balance = {name: value for name, value in identity["config"]["balance"].items() if name not in CHANGEABLE}
    lasting = {**identity, "config": {**identity["config"], "balance": balance}}
    return hashlib.sha256(json.dumps(lasting, sort_keys=True).encode()).hexdigest()[:16]
