"""What a pretrained model's run leaves for others to load: a model directory, or adapters beside the model."""

from __future__ import annotations

import os
from pathlib import Path

from train.answers import end_ids
from train.chat import ChatFormat
from train.generation_config import GENERATION_FILE, changed_text
from train.hf_weights import HfModel
from train.model import Params
from train.peft_adapters import TEMPLATE_FILE, export_adapters
from train.prepare import Prepared
from train.pretrained import Pretrained, export_model
from train.tokenizer_files import tokenizer_files

MODEL_DIR, ADAPTERS_DIR = "model", "adapters"


def export(prepared: Prepared, trained: Params, run_dir: Path) -> Path:
    """Writes the model as Hugging Face's files, or its adapters as PEFT's; returns where.

    A directory that an earlier end of the same run has written is left as it is: a run ends in one state only.

    Args:
        prepared: A run with a pretrained model.
        trained: A state's parameters.
        run_dir: The run's directory.
    """
    assert prepared.pretrained is not None
    assert prepared.chat_format is not None
    directory = run_dir / (MODEL_DIR if prepared.model.lora is None else ADAPTERS_DIR)
    if directory.exists():
        return directory
    # A template of the run's own is what was learnt: it must be there to ask by.
    template = None if prepared.config.corpus.chat_template is None else prepared.chat_format.template.source
    if prepared.model.lora is None:
        write_model(directory, trained, prepared.pretrained, prepared.chat_format, template=template)
    else:
        assert prepared.config.pretrained is not None
        base_model = prepared.config.pretrained
        export_adapters(directory, prepared.model, trained, base_model=base_model, template=template)
    return directory


def write_model(
    directory: str | os.PathLike[str],
    params: Params,
    pretrained: Pretrained,
    chat_format: ChatFormat,
    *,
    template: str | None = None,
    dtype: str | None = None,
) -> None:
    """Writes a model directory from which servers answer, and stop, as `train.ask` does; in whole or not at all.

    Args:
        directory: Must not exist yet, or be empty.
        params: Without adapters; see `train.pretrained.export_model`.
        pretrained: The model that they came from.
        chat_format: How it is asked.
        template: The chat template, if it is not the model's own.
        dtype: Type of the tensors; default: as the model directory has them. Those of a GGUF file were quantised, and
            in bfloat16 the new ones would lose part of what was learnt: they come out as float32.

    Raises:
        ValueError: If `directory` is not empty.
    """
    ends = end_ids(pretrained, chat_format)
    if isinstance(pretrained, HfModel):
        changed = {
            GENERATION_FILE: changed_text(pretrained.directory, ends, known=pretrained.end_ids),
            TEMPLATE_FILE: template,
        }
        texts = {name: text for name, text in changed.items() if text is not None}
        export_model(directory, params, like=pretrained, dtype=dtype, beside=texts)
        return
    tokenizer = chat_format.tokenizer
    special_ids = {
        "eos_token_id": tokenizer.eos_id,
        "bos_token_id": tokenizer.bos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    export_model(
        directory,
        params,
        config=pretrained.config,
        dtype=dtype,
        max_tokens=pretrained.context_tokens,
        beside=tokenizer_files(chat_format, eos_ids=ends),
        special_ids={name: value for name, value in special_ids.items() if value is not None},
    )
