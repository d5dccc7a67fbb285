"""Chunks: arrays of a fixed shape, filled with a pack's records where a layout has placed them.

A chunk of shape [rows, length] is a dict. For records with the features "tokens" and "loss_mask" it holds

    tokens              the tokens; `pad_id` in between
    tokens_segment_ids  int32, numbers the records of a row from 1; 0 is padding
    tokens_positions    int32, counts the tokens of a record from 0
    loss_mask           the record's; 0 at padding

and every further 1-D feature of the records, at the same spots and with its dtype kept.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Record = Mapping[str, Any]
Chunk = dict[str, npt.NDArray[Any]]


class Block(NamedTuple):
    """Rows of one length, cut from top to bottom into chunks of the given heights.

    Attributes:
        length: Tokens in a row.
        heights: Rows of each chunk; rows beyond `rows` are padding.
        rows: For each row the positions, in the pack, of the records placed in it, left to right.
    """

    length: int
    heights: tuple[int, ...]
    rows: Sequence[Sequence[int]]


class Column(NamedTuple):
    """One feature of a pack: its dtype, and an array [n_i] for each record i."""

    dtype: np.dtype[Any]
    arrays: list[npt.NDArray[Any]]


def pack_columns(pack: Sequence[Record], size_feature: str) -> dict[str, Column]:
    """Returns the features of a pack of at least one record, checked.

    Raises:
        ValueError: If records have different features or dtypes, or a feature that is not 1-D or not as long as
            `size_feature`; the message names the record's place in the pack and the remedy.
    """
    if not all(isinstance(record, Mapping) for record in pack):
        i = next(i for i, record in enumerate(pack) if not isinstance(record, Mapping))
        raise ValueError(
            f"record {i} of the pack is a {type(pack[i]).__name__}, not a dict of arrays: convert it upstream (ds.map)"
        )
    names = pack[0].keys()
    for i, record in enumerate(pack):
        if size_feature not in record:
            raise ValueError(
                f"record {i} of the pack has no feature {size_feature!r}, only {sorted(record)}: pass size_feature= to "
                "the layout"
            )
        if record.keys() != names:
            raise ValueError(
                f"record {i} of the pack has the features {sorted(record)}, but record 0 has {sorted(names)}: "
                "make them alike upstream (ds.map)"
            )
    for name in (segment_ids_of(size_feature), positions_of(size_feature)):
        if name in names:
            raise ValueError(
                f"records of the pack have a feature {name!r}, which the layout makes: rename it upstream (ds.map)"
            )
    columns = {name: _column(name, pack) for name in names}
    sizes = [len(values) for values in columns[size_feature].arrays]
    for name, column in columns.items():
        lengths = [len(values) for values in column.arrays]
        if lengths != sizes:
            i = next(i for i in range(len(pack)) if lengths[i] != sizes[i])
            raise ValueError(
                f"record {i} of the pack has {lengths[i]} values in {name!r}, but {sizes[i]} in {size_feature!r}: "
                "make them equal upstream (ds.map)"
            )
    return columns


def _column(name: str, pack: Sequence[Record]) -> Column:
    arrays = [np.asarray(record[name]) for record in pack]
    dtype = arrays[0].dtype
    for i, values in enumerate(arrays):
        if values.ndim != 1:
            raise ValueError(
                f"feature {name!r} of record {i} of the pack has shape {values.shape}, but only 1-D features can be "
                "laid out: remove it upstream (ds.map)"
            )
        if values.dtype != dtype:
            raise ValueError(
                f"feature {name!r} of record {i} of the pack has dtype {values.dtype}, but {dtype} in record 0: "
                "make them alike upstream (ds.map)"
            )
    return Column(dtype, arrays)


def fill_chunks(block: Block, columns: Mapping[str, Column], size_feature: str, pad_id: int) -> list[Chunk]:
    """Copies the block's records into fresh arrays and cuts these into chunks (views), top to bottom.

    Complexity: one slice assignment per record and feature, on arrays allocated once for the block.
    """
    length, heights, rows = block
    total_rows = sum(heights)
    total = total_rows * length
    segment_ids, positions = np.zeros(total, np.int32), np.zeros(total, np.int32)
    sources = columns[size_feature].arrays
    count = _arange(length)
    spots = []  # (record, start, stop) in the flattened block
    for row, members in enumerate(rows):
        start = row * length
        for segment, i in enumerate(members, start=1):
            size = len(sources[i])
            stop = start + size
            segment_ids[start:stop] = segment
            positions[start:stop] = count[:size]
            spots.append((i, start, stop))
            start = stop
    filled = {segment_ids_of(size_feature): segment_ids, positions_of(size_feature): positions}
    for name, (dtype, arrays) in columns.items():
        values = np.zeros(total, dtype)
        if name == size_feature and pad_id:
            values.fill(pad_id)
        for i, start, stop in spots:
            values[start:stop] = arrays[i]
        filled[name] = values
    whole = {name: values.reshape(total_rows, length) for name, values in filled.items()}
    chunks, top = [], 0
    for height in heights:
        chunks.append({name: values[top : top + height] for name, values in whole.items()})
        top += height
    return chunks


def segment_ids_of(feature: str) -> str:
    """Returns the name, in Grain's manner, of the feature that numbers a row's records."""
    return f"{feature}_segment_ids"


def positions_of(feature: str) -> str:
    """Returns the name, in Grain's manner, of the feature that counts a record's tokens."""
    return f"{feature}_positions"


@functools.lru_cache(maxsize=64)
def _arange(length: int) -> npt.NDArray[np.int32]:
    count = np.arange(length, dtype=np.int32)
    count.flags.writeable = False
    return count
