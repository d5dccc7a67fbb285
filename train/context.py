"""The length of the sequences that a pretrained model can read: what is asked of it must fit, what it learns should."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def check_context(prompt_tokens: int, new_tokens: int, context_tokens: int | None, *, setting: str) -> None:
    """Checks that a prompt and its answer are no longer than what a model can read.

    Args:
        prompt_tokens: Length of the prompt.
        new_tokens: Longest answer.
        context_tokens: Length of the model's context; None for unknown, which fits everything.
        setting: What sets `new_tokens`.

    Raises:
        ValueError: If they are longer.

    >>> check_context(500, 128, 512, setting="--max_tokens")
    Traceback (most recent call last):
    ...
    ValueError: 500 tokens, 628 with an answer of 128, but the model's context is 512: shorten the prompt to 384 tokens,
    or lower --max_tokens to 12
    """
    if context_tokens is None or prompt_tokens + new_tokens <= context_tokens:
        return
    remedies = []
    if new_tokens < context_tokens:
        remedies.append(f"shorten the prompt to {context_tokens - new_tokens:,} tokens")
    if prompt_tokens < context_tokens:
        remedies.append(f"lower {setting} to {context_tokens - prompt_tokens:,}")
    raise ValueError(
        f"{prompt_tokens:,} tokens, {prompt_tokens + new_tokens:,} with an answer of {new_tokens:,}, but the model's "
        f"context is {context_tokens:,}: {', or '.join(remedies) or f'shorten the prompt, and lower {setting}'}"
    )


def context_warning(sizes: npt.NDArray[np.integer[Any]], max_tokens: int, context_tokens: int | None) -> str | None:
    """Returns a line about records beyond a model's context, None if the cap allows none.

    A warning only: rotary positions can be trained past it, and some want to.

    Args:
        sizes: [n] lengths of the records to train on, in tokens.
        max_tokens: Their cap.
        context_tokens: Length of the model's context; None for unknown.

    >>> context_warning(np.array([300, 700, 520]), 1024, 512)
    "warning: corpus.max_tokens 1,024 is above the model's context of 512: 2 of 3 records are longer, ..."
    """
    if context_tokens is None or max_tokens <= context_tokens:
        return None
    longer = int((sizes > context_tokens).sum())
    beginning = f"warning: corpus.max_tokens {max_tokens:,} is above the model's context of {context_tokens:,}"
    if not longer:
        return f"{beginning}; no record is longer"
    return (
        f"{beginning}: {longer:,} of {len(sizes):,} records are longer, the longest has {sizes.max():,} tokens. The "
        "model has never seen such positions, and servers stop at its context: lower corpus.max_tokens, or, to stretch "
        "the model, raise max_position_embeddings in the exported config.json"
    )
