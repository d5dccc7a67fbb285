"""Which tensor of a Hugging Face model is which parameter of ours.

Theirs has a tensor for each layer and keeps a projection as [outputs, inputs]; ours has the layers' stacked, and
projections as [inputs, outputs]. Llama, Qwen 2, Qwen 3 and SmolLM 2 use the same names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy.typing as npt

from train.model import ModelConfig, init_params

PROJECTION_NAMES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""A layer's projections, ours to theirs."""

_NORM_NAMES = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
}
_NAMES = {
    ("embedding",): "model.embed_tokens.weight",
    ("norm", "scale"): "model.norm.weight",
    ("head", "kernel"): "lm_head.weight",
}

EMBEDDING, HEAD = _NAMES["embedding",], _NAMES["head", "kernel"]
FINAL_NORM = _NAMES["norm", "scale"]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter and the tensors that it is made of.

    Attributes:
        path: Keys in the nested dict of parameters.
        shape: Of the parameter, the layers' axis included.
        names: The tensors, one for each layer, or a single one.
        transposed: Whether they have their two axes the other way round.
        stacked: Whether the parameter's first axis is the layers'.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    names: tuple[str, ...]
    transposed: bool
    stacked: bool

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each of the tensors."""
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape

    def cut(self, value: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """Returns views of the parameter as the tensors that it is made of; writing to them fills it."""
        parts = value if self.stacked else value[None]
        return {name: part.T if self.transposed else part for name, part in zip(self.names, parts, strict=True)}


def leaves(config: ModelConfig) -> tuple[Leaf, ...]:
    """Returns all parameters of a model, its adapters left out. Computes nothing.

    >>> leaf = leaves(ModelConfig(vocab_size=10, layers=2, width=8))[1]
    >>> leaf.path, leaf.shape, leaf.names[0]
    (('layers', 'attention_norm', 'scale'), (2, 8), 'model.layers.0.input_layernorm.weight')
    """
    plain = dataclasses.replace(config, lora=None)
    shapes = jax.eval_shape(lambda: init_params(plain, jax.random.key(0)))
    found = []
    for keys, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]:
        path = tuple(str(key.key) for key in keys)
        stacked = path[0] == "layers"
        names: tuple[str, ...] = (_NAMES[path],) if not stacked else _layer_names(path, config.layers)
        found.append(Leaf(path, tuple(leaf.shape), names, transposed=path[-1] == "kernel", stacked=stacked))
    return tuple(found)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor that a model's files should have."""
    return {name: leaf.tensor_shape for leaf in leaves(config) for name in leaf.names}


def check_tensors(config: ModelConfig, found: Mapping[str, tuple[int, ...]], *, origin: str) -> None:
    """Compares the tensors of a model's files with those that its configuration calls for.

    Args:
        config: The model.
        found: Shapes by name.
        origin: Where they were found, for the message.

    Raises:
        ValueError: If one is missing, unknown or of another shape. The message names the first few.
    """
    wanted = tensor_shapes(config)
    problems = [f"{name!r} of shape {wanted[name]} is missing" for name in wanted if name not in found]
    problems += [f"{name!r} of shape {found[name]} is unknown" for name in found if name not in wanted]
    problems += [
        f"{name!r} has shape {found[name]}, the configuration calls for {wanted[name]}"
        for name in wanted
        if name in found and found[name] != wanted[name]
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"the tensors in {origin} are not those of its configuration: {'; '.join(problems[:5])}{more}. The files "
            "are of another model, or incomplete, or of an architecture that is not read here"
        )


def _layer_names(path: tuple[str, ...], layers: int) -> tuple[str, ...]:
    _, module, kind = path
    if module in PROJECTION_NAMES:
        name = f"{PROJECTION_NAMES[module]}.{'weight' if kind == 'kernel' else kind}"
    else:
        name = f"{_NORM_NAMES[module]}.weight"
    return tuple(f"model.layers.{i}.{name}" for i in range(layers))
