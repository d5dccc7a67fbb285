"""Merges adapters into their model: `python -m train.merge --model=MODEL --adapters=runs/X/adapters --out=DIRECTORY`.

The result is a Hugging Face model directory that servers load without knowing of adapters. Every matrix W becomes
W + alpha / rank * A B, W being rounded to bfloat16 as it was while the adapters were trained. Exit codes: 0, or 2 for
bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from train.answers import OpenedModel, open_model
from train.exporting import write_model
from train.lora import FROZEN_DTYPE, merge_adapters
from train.model import Params
from train.parameter_names import Leaf, leaves
from train.peft_adapters import TEMPLATE_FILE, load_adapters
from train.pretrained import Pretrained, read_parameter

EXIT_DONE, EXIT_BAD_INPUT = 0, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Does what the arguments say; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m train.merge", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="a Hugging Face directory or a GGUF file")
    parser.add_argument("--adapters", required=True, help="a directory of adapters in PEFT's format")
    parser.add_argument("--out", required=True, help="a new directory for the merged model")
    parser.add_argument(
        "--dtype",
        choices=("F32", "BF16", "F16"),
        help="type of the tensors; default: as the model's directory has them, F32 for a GGUF file",
    )
    options = parser.parse_args(argv)
    try:
        merge(options.model, options.adapters, options.out, dtype=options.dtype)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(f"merged: {options.out}")
    return EXIT_DONE


def merge(model: str, adapters: str, out: str, *, dtype: str | None = None) -> None:
    """Writes a model with its adapters merged into it.

    Memory: one parameter in float32, all layers of it, beside the adapters.

    Args:
        model: A Hugging Face directory or a GGUF file.
        adapters: A directory of adapters in PEFT's format.
        out: A directory that must not exist yet, or be empty.
        dtype: Type of the tensors, see `train.exporting.write_model`; "F32" keeps all that the adapters learnt.

    Raises:
        ValueError: If something can't be read or does not fit, or `out` is not empty.
    """
    opened = open_model(model, adapters=adapters)
    template = opened.chat_format.template.source if os.path.exists(os.path.join(adapters, TEMPLATE_FILE)) else None
    write_model(out, _merged(opened, adapters), opened.pretrained, opened.chat_format, template=template, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class _Merged:
    """A parameter that is read and merged when it is written: np.asarray makes it."""

    pretrained: Pretrained
    leaf: Leaf
    factors: dict[str, Any] | None
    scale: float

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        value = read_parameter(self.pretrained, self.leaf, FROZEN_DTYPE).astype(np.float32)
        if self.factors is None:
            return value
        return np.asarray(merge_adapters({"kernel": value, **self.factors}, self.scale)["kernel"])


def _merged(opened: OpenedModel, adapters: str) -> Params:
    assert opened.config.lora is not None
    factors, scale = load_adapters(adapters, opened.config)["layers"], opened.config.lora.scale
    params: Params = {}
    for leaf in leaves(opened.config):
        branch = params
        for key in leaf.path[:-1]:
            branch = branch.setdefault(key, {})
        adapted = leaf.path[0] == "layers" and leaf.path[-1] == "kernel"
        branch[leaf.path[-1]] = _Merged(opened.pretrained, leaf, factors.get(leaf.path[1]) if adapted else None, scale)
    return params


if __name__ == "__main__":
    sys.exit(main())
