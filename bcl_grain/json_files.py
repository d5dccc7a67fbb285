"""Reading JSON that others wrote: data with limits, never more than data."""

from __future__ import annotations

import json
import os
from typing import Any

MAX_BYTES = 2**26
"""Of a file of settings, figures or states; a tokenizer's takes some 20 MB."""


def read_json(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Any:
    """Returns the value in a JSON file, UTF-8.

    Raises:
        OSError: If the file can't be read.
        ValueError: If it is larger than `max_bytes`, nests too deep, or is not JSON.
    """
    with open(path, "rb") as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes, which no such file needs")
    return parse_json(text)


def parse_json(text: bytes) -> Any:
    """Returns the value in a JSON text, UTF-8.

    Raises:
        ValueError: If it nests too deep, or is not JSON.

    >>> parse_json(b"[" * 10**6)
    Traceback (most recent call last):
    ...
    ValueError: it nests too deep
    """
    try:
        return json.loads(text.decode())
    except RecursionError:
        raise ValueError("it nests too deep") from None
