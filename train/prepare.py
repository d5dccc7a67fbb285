"""From a config to everything a run needs, before a device is touched: records, baseline, size, identity."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bcl_grain.cost_prior import CostPrior
from bcl_grain.cost_table import TableCost, read_cost_table
from bcl_grain.costs import TransformerCost
from bcl_grain.layouts import BucketedLayout, Layout, PaddedLayout, RowPackedLayout, RowPackedOneShapeLayout
from train.answers import sample_prompts
from train.bigram import fit_bigram
from train.chat import ChatFormat
from train.chat_corpus import open_chat_format, read_chat_corpus
from train.config import CorpusConfig, OptimizerConfig, TrainConfig
from train.context import context_warning
from train.corpus import Split, describe_sizes, load_pairs, split_by_module
from train.data import JobSize, LayOut, cap_records, cost_prior, job_size
from train.layout import choose_layout, rehearse
from train.library import library_pairs
from train.model import ModelConfig
from train.parameter_names import FINAL_NORM
from train.peft_adapters import WEIGHTS_FILE, read_lora_config
from train.pretrained import Pretrained, open_pretrained
from train.state import Optimizer, make_optimizer
from train.token_files import Say
from train.token_table import TokenTable
from train.tokenizers import ByteTokenizer, IntArray, Tokenizer, load_tokenizer, to_record
from train.topology import Topology, packs_per_step, settle_lanes

_CALIBRATE = "calibrate anew: python -m train.calibrate with this config"

BIGRAM_TOKENS = 20_000_000
"""That the baseline looks at, at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run before its first compilation.

    Attributes:
        config: What was asked for.
        topology: Who takes part.
        tokenizer: Text to ids and back.
        model: Dimensions, the vocabulary's size filled in.
        optimizer: Gradients to updates.
        lay_out: Records to chunks, with the model's cost.
        prior: What all ranks know of the mean cost of a record.
        train: Records to learn from.
        evaluation: Records of held-out modules.
        job: The run's size.
        pretrained: The model to start from, opened; None for fresh parameters.
        chat_format: Its tokenizer and chat template.
        sample_prompts: Tokens of the questions that it answers during the run.
        bigram_loss: Eval loss, in nats a token, of the bigram model fitted to the training records.
        identity: All that the result depends on, JSON-safe.
    """

    config: TrainConfig
    topology: Topology
    tokenizer: Tokenizer
    model: ModelConfig
    optimizer: Optimizer
    lay_out: LayOut
    prior: CostPrior | None
    train: TokenTable
    evaluation: TokenTable
    job: JobSize
    pretrained: Pretrained | None
    chat_format: ChatFormat | None
    sample_prompts: tuple[IntArray, ...]
    bigram_loss: float
    identity: dict[str, Any]

    @property
    def one_shape(self) -> tuple[int, int] | None:
        """The (rows, length) that every pack must fit; None if the layout has several shapes."""
        layout = self.lay_out.layout
        return (layout.rows, layout.length) if isinstance(layout, RowPackedOneShapeLayout) else None

    @property
    def spmd_packs(self) -> int | None:
        """Packs of each device in a step that is one program; None if the step is decoupled."""
        if self.config.step != "spmd":
            return None
        return packs_per_step(self.config.balance) // self.topology.ranks

    @property
    def eval_layout(self) -> Layout:
        """How packs that were not rehearsed become chunks: as in training, but of as many chunks as they need."""
        layout = self.lay_out.layout
        if not isinstance(layout, RowPackedOneShapeLayout):
            return layout
        return RowPackedLayout(length=layout.length, rows_per_chunk=layout.rows, pad_id=layout.pad_id)

    @property
    def one_record_rows(self) -> bool:
        """Whether no row holds two records: some attention kernels serve only those."""
        return isinstance(self.lay_out.layout, BucketedLayout | PaddedLayout)

    @property
    def expected_tokens(self) -> float | None:
        """Tokens that count in a step, on average; None where each step is divided by its own."""
        if not self.config.constant_denominator:
            return None
        return self.job.global_batch * float(self.train.loss_tokens.mean())


def prepare(config: TrainConfig, topology: Topology, say: Say = print) -> Prepared:
    """Reads the corpus and derives everything from it.

    Raises:
        ValueError: If an input is unreadable, or the settings don't fit the corpus; the message names the remedy.
    """
    config = dataclasses.replace(config, balance=settle_lanes(config.balance, topology))
    if config.steps is not None:
        _optimizer(config.optimizer, config.steps)  # what it refuses it refuses before the data is read
    pretrained = chat_format = None
    samples: tuple[IntArray, ...] = ()
    if config.pretrained is None:
        tokenizer = _tokenizer(config.corpus)
        split = _split(config.corpus, say)
        train, evaluation = (
            TokenTable.of(to_record(pair, tokenizer) for pair in part) for part in (split.train, split.evaluation)
        )
    else:
        pretrained = open_pretrained(config.pretrained)
        chat_format = open_chat_format(config.pretrained, template=config.corpus.chat_template)
        tokenizer, runtime = chat_format.tokenizer, config.runtime
        samples = sample_prompts(runtime.sample_prompts, pretrained, chat_format, new_tokens=runtime.sample_tokens)
        train, evaluation = _conversations(config, topology, chat_format, say)
    train = _capped(train, "training", config.corpus, say)
    evaluation = _capped(evaluation, "held-out", config.corpus, say)
    context = None if pretrained is None else pretrained.context_tokens
    if warning := context_warning(train.sizes, config.corpus.max_tokens, context):
        say(warning)
    job = job_size(
        len(train),
        pack_size=config.balance.pack_size,
        ranks=packs_per_step(config.balance),
        steps=config.steps,
        epochs=config.epochs,
    )
    model = _model(config, tokenizer, pretrained)
    longest = max(int(part.sizes.max()) for part in (train, evaluation))
    layout = choose_layout(config, train.sizes, model, topology, longest=longest)
    cost = _cost(config.balance.cost_table, model)
    prior = cost_prior(train, config.balance, cost, seed=config.seed)
    if isinstance(layout, RowPackedOneShapeLayout):
        layout = rehearse(config, layout, train.sizes, job, cost=cost, prior=prior, progress=topology.is_main)
    if isinstance(cost, TableCost) and (missing := set(layout.shapes) - dict(cost.chunk_seconds).keys()):
        raise ValueError(
            f"balance.cost_table {config.balance.cost_table!r} has no time for chunks of shape {sorted(missing)}: "
            f"{_CALIBRATE}"
        )
    if layout is not config.layout:
        shapes = ", ".join(f"{rows} x {length}" for rows, length in layout.shapes)
        say(f"layout: chunks of {shapes} tokens, chosen for these records")
    lay_out = LayOut(dataclasses.replace(layout, pad_id=tokenizer.pad_id), cost)
    identity: dict[str, Any] = {
        "config": config.identity(),
        "data": {"train_checksum": train.checksum, "eval_checksum": evaluation.checksum},
        "job": dataclasses.asdict(job),
        "chunk_shapes": layout.shapes,
    }
    if pretrained is not None:
        # A later training of the same model has other norms, too.
        identity["pretrained"] = [dataclasses.asdict(model), zlib.crc32(pretrained.read(FINAL_NORM).tobytes())]
        if config.adapters is not None:
            identity["adapters"] = zlib.crc32(Path(config.adapters, WEIGHTS_FILE).read_bytes())
    if isinstance(lay_out.cost, TableCost):
        identity["cost"] = dataclasses.asdict(lay_out.cost)
    return Prepared(
        config=config,
        topology=topology,
        tokenizer=tokenizer,
        model=model,
        optimizer=_optimizer(config.optimizer, job.steps),
        lay_out=lay_out,
        prior=prior,
        train=train,
        evaluation=evaluation,
        job=job,
        pretrained=pretrained,
        chat_format=chat_format,
        sample_prompts=samples,
        bigram_loss=_bigram_loss(train, evaluation, model.vocab_size, say),
        identity=json.loads(json.dumps(identity)),
    )


def _optimizer(config: OptimizerConfig, steps: int) -> Optimizer:
    return make_optimizer(total_steps=steps, **dataclasses.asdict(config))


def _cost(table: str | None, model: ModelConfig) -> TransformerCost:
    if table is None:
        return model.cost()
    cost, about = read_cost_table(table)
    if about.get("model") != json.loads(json.dumps(dataclasses.asdict(model))):
        raise ValueError(f"balance.cost_table {table!r} was measured with a model of other dimensions: {_CALIBRATE}")
    return cost


def _tokenizer(corpus: CorpusConfig) -> Tokenizer:
    if corpus.tokenizer is None:
        return ByteTokenizer()
    return load_tokenizer(corpus.tokenizer, eos_token=corpus.eos_token)


def _split(corpus: CorpusConfig, say: Say) -> Split:
    if corpus.path is None:
        library = library_pairs()
        say(
            f"corpus: this Python's standard library, {library.num_files} files, {len(library.pairs):,} functions with "
            f"docstrings; left out: {library.num_undocumented:,} without, {library.num_bodiless} without a body, "
            f"{library.num_duplicates} duplicates, {len(library.unreadable_files)} unreadable files"
        )
        pairs: Sequence[Any] = library.pairs
    else:
        pairs = load_pairs(corpus.path)
        say(f"corpus: {corpus.path}, {len(pairs):,} pairs")
    split = split_by_module(pairs, eval_share=corpus.eval_share)
    if split.num_leaked:
        say(f"held-out: {split.num_leaked} pairs left out because their response also stands in the training part")
    return split


def _conversations(
    config: TrainConfig, topology: Topology, chat_format: ChatFormat, say: Say
) -> tuple[TokenTable, TokenTable]:
    return read_chat_corpus(
        config.corpus,
        chat_format,
        seed=config.seed,
        token_cache=config.runtime.token_cache,
        workers=config.runtime.data_workers,
        say=say,
        progress=topology.is_main,
    )


def _capped(records: TokenTable, part: str, corpus: CorpusConfig, say: Say) -> TokenTable:
    say(f"{part}: {describe_sizes(records.sizes)} (tokens)")
    try:
        capped = cap_records(records, max_tokens=corpus.max_tokens, on_oversize=corpus.on_oversize)
    except ValueError as error:
        if corpus.on_oversize != "error":
            raise
        raise ValueError(
            f"{part}: {error}: raise corpus.max_tokens, and the layout's rows, or set corpus.on_oversize to truncate "
            "or drop"
        ) from error
    say(f"{part}, capped at {corpus.max_tokens} ({corpus.on_oversize}): {capped.describe()}")
    return capped.records


def _bigram_loss(train: TokenTable, evaluation: TokenTable, vocab_size: int, say: Say) -> float:
    """Returns the baseline's loss; of a large corpus it sees evenly spread records, as it keeps all pairs in memory."""
    parts = []
    for part, records in (("training", train), ("held-out", evaluation)):
        every = -(-int(records.loss_tokens.sum(dtype=np.int64)) // BIGRAM_TOKENS)
        if every > 1:
            say(f"bigram model: one of {every} {part} records")
        parts.append(records[::every])
    return fit_bigram(parts[0], vocab_size).nats_per_token(parts[1])


def _model(config: TrainConfig, tokenizer: Tokenizer, pretrained: Pretrained | None) -> ModelConfig:
    if config.adapters is not None and (made := read_lora_config(config.adapters)) != config.model.lora:
        raise ValueError(f"the adapters {config.adapters!r} were made with {made}, model.lora is {config.model.lora}")
    if pretrained is None:
        return dataclasses.replace(config.model, vocab_size=_vocab_size(config.model.vocab_size, tokenizer))
    model = dataclasses.replace(pretrained.config, lora=config.model.lora, remat=config.model.remat)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer of {config.pretrained!r} has {tokenizer.vocab_size} tokens, the model {model.vocab_size}: "
            "they don't belong together"
        )
    return model


def _vocab_size(asked: int, tokenizer: Tokenizer) -> int:
    if asked == 1:
        return tokenizer.vocab_size
    if asked < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size {asked} is below the tokenizer's {tokenizer.vocab_size}: leave it out, or raise it"
        )
    return asked
