"""What a pretrained model's run leaves for others to load: a model directory, or adapters beside the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from train.hf_weights import HfModel
from train.model import Params
from train.peft_adapters import export_adapters
from train.prepare import Prepared
from train.pretrained import export_model
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
    if prepared.model.lora is not None:
        assert prepared.config.pretrained is not None
        export_adapters(directory, prepared.model, trained, base_model=prepared.config.pretrained)
    elif isinstance(prepared.pretrained, HfModel):
        export_model(directory, trained, like=prepared.pretrained)
    else:
        # A GGUF file's parameters were quantised; in bfloat16 the new ones would lose part of what was learnt.
        tokenizer = prepared.chat_format.tokenizer
        special_ids = {
            "eos_token_id": tokenizer.eos_id,
            "bos_token_id": tokenizer.bos_id,
            "pad_token_id": tokenizer.pad_id,
        }
        export_model(
            directory,
            trained,
            config=prepared.model,
            dtype="F32",
            max_tokens=int(np.max([length for _, length in prepared.lay_out.layout.shapes])),
            beside=tokenizer_files(prepared.chat_format),
            special_ids={name: value for name, value in special_ids.items() if value is not None},
        )
    return directory
