"""Record lengths from what a user has at hand: a workload's name, or a file of lengths or of texts."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bcl_grain.json_files import MAX_BYTES, parse_json
from bcl_grain.workloads import load_workload

IntArray = npt.NDArray[np.int64]
Place = Callable[[int], str]
"""What record i's place in its file is called."""
Column = tuple[npt.NDArray[Any], Place]

LENGTH_COLUMNS = ("len", "length", "lengths", "tokens", "num_tokens", "n_tokens", "seq_len", "input_length")
"""Names that a column of lengths may have, the first found is taken; else `prompt_len` + `response_len`."""

_MAX_UNPACKED_BYTES = 2**33  # of an .npz: a thousand million lengths
_SUFFIXES = (".npz", ".npy", ".csv", ".parquet", ".jsonl")
_TEXT_KEYS = ("system", "prompt", "instruction", "input", "question", "response", "output", "answer", "text", "content")
_HALVES = ("prompt_len", "response_len")


@dataclasses.dataclass(frozen=True, eq=False)
class Lengths:
    """The lengths of a corpus.

    Attributes:
        name: What the user called it.
        values: [n] lengths, each at least 1. Those of a workload are its table's, ascending.
        unit: What a length counts.
        has_order: Whether the order is the corpus's own; a workload's table knows none.
    """

    name: str
    values: IntArray
    unit: str
    has_order: bool


def read_lengths(data: str, *, column: str | None = None, tokenizer: str | None = None) -> Lengths:
    """Returns the record lengths of DATA.

    Args:
        data: The name of a workload (`bcl_grain.workloads`), or a file:
            `.npz` with `len`, or `prompt_len` and `response_len`; `.npy` with a vector; `.csv` or `.parquet` with a
            column of lengths; `.jsonl` with a record's texts in each line, as messages or under keys like "prompt",
            "response" and "text". Without a tokenizer a text's length is its UTF-8 bytes.
        column: Name of the array or column; default: see `LENGTH_COLUMNS`.
        tokenizer: A Hugging Face `tokenizer.json` that counts the texts of a `.jsonl`. No special tokens, and no chat
            template, are counted.

    Raises:
        ValueError: If there is no such file or workload, the file has no usable column, or a length is not a positive
            integer; the message names the line, and the remedy.
        ModuleNotFoundError: If reading needs an optional package; the message names it.

    >>> int(read_lengths("gsm8k_train").values.sum())
    1356239
    """
    path = Path(data)
    if path.suffix not in _SUFFIXES:
        if path.exists():
            raise ValueError(f"{data!r} is none of the kinds of file that are read: convert it to one of {_SUFFIXES}")
        _only_for(".jsonl", data, tokenizer=tokenizer)
        _only_for("files", data, column=column)
        workload = load_workload(data)
        middle = (np.arange(workload.records) + 0.5) / workload.records
        values = np.rint(workload.quantile(middle)).astype(np.int64)
        return Lengths(data, np.maximum(values, 1), workload.unit, has_order=False)
    if not path.is_file():
        raise ValueError(f"no file {data!r}: check the path, or pass a workload's name")
    if path.suffix != ".jsonl":
        _only_for(".jsonl", data, tokenizer=tokenizer)
    else:
        _only_for("files with columns", data, column=column)
        unit = "UTF-8 bytes" if tokenizer is None else f"tokens ({tokenizer})"
        lengths = _jsonl_lengths(path, tokenizer)
        return Lengths(data, _checked(lengths, data, lambda i: f"line {i + 1}"), unit, has_order=True)
    values, place = _READERS[path.suffix](path, column)
    return Lengths(data, _checked(values, data, place), "tokens", has_order=True)


def _only_for(kind: str, data: str, **options: str | None) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} is for {kind}, not for {data!r}: leave it out")


def _checked(values: npt.NDArray[Any], data: str, place: Place) -> IntArray:
    """Returns positive int64 lengths, or raises an error that names the first that is none."""
    if values.ndim != 1 or not values.size:
        raise ValueError(
            f"{data!r} holds no vector of lengths, but an array of shape {values.shape}: give one a record"
        )
    if values.dtype.kind not in "iuf":
        raise ValueError(f"{data!r} holds {values.dtype} where lengths should be: pass the column of the lengths")
    wrong = np.flatnonzero(~((values >= 1) & (values < 2**53) & (values == np.floor(values))))
    if wrong.size:
        i = int(wrong[0])
        raise ValueError(
            f"length {values[i]} in {place(i)} of {data!r}, but lengths are positive integers: remove or mend "
            f"the record ({wrong.size} such in all)"
        )
    return values.astype(np.int64)


def _npz_lengths(path: Path, column: str | None) -> Column:
    with _opened(path, lambda: zipfile.ZipFile(path)) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > _MAX_UNPACKED_BYTES:
        raise ValueError(
            f"{str(path)!r} unpacks to {size:,} bytes, over the limit of {_MAX_UNPACKED_BYTES:,}: cut it up"
        )
    with _opened(path, lambda: np.load(path, allow_pickle=False)) as arrays:
        values = _pick(list(arrays), lambda name: _opened(path, lambda: np.asarray(arrays[name])), column, str(path))
    return values, _record


def _npy_lengths(path: Path, column: str | None) -> Column:
    _only_for("files with columns", str(path), column=column)
    return np.asarray(_opened(path, lambda: np.load(path, allow_pickle=False))), _record


def _record(i: int) -> str:
    return f"record {i}"


def _opened(path: Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # zipfile, numpy and pyarrow raise half a dozen kinds
        raise ValueError(f"can't read {str(path)!r} ({error}): is it a whole {path.suffix} file?") from error


def _csv_lengths(path: Path, column: str | None) -> Column:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8 text ({error}): convert it") from error
    rows = csv.reader(io.StringIO(text, newline=""))
    head = next(rows, [])
    if not head or (len(head) == 1 and _is_number(head[0])):
        raise ValueError(f"{str(path)!r} does not start with a line of column names, but with {head}: add one")
    lines: list[int] = []
    cells: list[list[str]] = []
    for row in rows:
        if row:
            lines.append(rows.line_num)
            cells.append(row)

    def read(name: str) -> npt.NDArray[Any]:
        at = head.index(name)
        column = [row[at] if at < len(row) else "" for row in cells]
        wrong = next((i for i, cell in enumerate(column) if not _is_number(cell)), None)
        if wrong is not None:
            raise ValueError(
                f"{column[wrong]!r} in line {lines[wrong]} of {str(path)!r}, column {name!r}, is no number: mend "
                "it, or pass the column of the lengths"
            )
        return np.array(column, np.float64)

    return _pick(head, read, column, str(path)), lambda i: f"line {lines[i]}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parquet_lengths(path: Path, column: str | None) -> Column:
    parquet = _optional("pyarrow.parquet", "pyarrow", "reading .parquet")
    names = list(_opened(path, lambda: parquet.read_schema(path)).names)

    def read(name: str) -> npt.NDArray[Any]:
        table = _opened(path, lambda: parquet.read_table(path, columns=[name]))
        array = table[name]
        if array.null_count:
            row = array.is_null().to_pylist().index(True)
            raise ValueError(f"row {row} of {str(path)!r}, column {name!r}, is null: remove or mend the record")
        return np.asarray(array.to_numpy())

    return _pick(names, read, column, str(path)), lambda i: f"row {i}"


def _choose(names: list[str], origin: str) -> list[str]:
    """Returns the columns to take when none was named."""
    for name in LENGTH_COLUMNS:
        if name in names:
            return [name]
    if all(half in names for half in _HALVES):
        return list(_HALVES)
    if len(names) == 1:
        return names
    raise ValueError(
        f"{origin!r} has no usable column among {names[:20]}: pass the one with the lengths, or name it "
        f"{LENGTH_COLUMNS[0]!r} (or {' and '.join(map(repr, _HALVES))})"
    )


def _pick(
    names: list[str], read: Callable[[str], npt.NDArray[Any]], column: str | None, origin: str
) -> npt.NDArray[Any]:
    if column is not None and column not in names:
        raise ValueError(f"{origin!r} has no column {column!r}: pass one of {names[:20]}")
    parts = [read(name) for name in ([column] if column is not None else _choose(names, origin))]
    return parts[0] if len(parts) == 1 else np.add(*parts)


def _jsonl_lengths(path: Path, tokenizer: str | None) -> IntArray:
    count = _byte_counter() if tokenizer is None else _token_counter(tokenizer)
    lengths = []
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_BYTES + 1), b""), start=1):
            if len(line) > MAX_BYTES:
                raise ValueError(f"line {number} of {str(path)!r} has more than {MAX_BYTES:,} bytes: cut it up")
            if not line.strip():
                raise ValueError(f"line {number} of {str(path)!r} is empty: remove it")
            try:
                record = parse_json(line)
            except ValueError as error:
                raise ValueError(f"line {number} of {str(path)!r} is not JSON ({error}): mend it") from error
            texts = list(_texts(record)) if isinstance(record, dict) else []
            if not texts:
                raise ValueError(
                    f"line {number} of {str(path)!r} has no text: want an object with 'messages' or with keys among "
                    f"{_TEXT_KEYS}"
                )
            lengths.append(count(texts))
    return np.array(lengths, np.int64)


def _texts(record: dict[str, Any]) -> Iterator[str]:
    """Yields everything in a record that a model reads."""
    messages = record.get("messages", record.get("conversations"))
    if isinstance(messages, list):
        for message in messages:
            if isinstance(message, dict):
                content = message.get("content", message.get("value"))
                calls = [message[key] for key in ("tool_call", "tool_calls", "function_call") if message.get(key)]
                yield from (part for part in (content, *calls) if isinstance(part, str))
                yield from (json.dumps(part, ensure_ascii=False) for part in (content, *calls) if _nested(part))
        return
    yield from (record[key] for key in _TEXT_KEYS if isinstance(record.get(key), str))


def _nested(value: Any) -> bool:
    return isinstance(value, dict | list)


def _byte_counter() -> Callable[[list[str]], int]:
    return lambda texts: sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def _token_counter(path: str) -> Callable[[list[str]], int]:
    tokenizers = _optional("tokenizers", "tokenizers", "counting tokens with a tokenizer.json")
    if not Path(path).is_file():
        raise ValueError(f"no tokenizer {path!r}: pass a tokenizer.json, or leave it out to count bytes")
    try:
        backend = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path!r} is not a Hugging Face tokenizer.json ({error}): pass one") from error
    backend.no_truncation()
    backend.no_padding()
    return lambda texts: sum(len(backend.encode(text, add_special_tokens=False).ids) for text in texts)


def _optional(module: str, package: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{purpose} needs the package {package!r}: pip install {package}") from error


_READERS: dict[str, Callable[[Path, str | None], Column]] = {
    ".npz": _npz_lengths,
    ".npy": _npy_lengths,
    ".csv": _csv_lengths,
    ".parquet": _parquet_lengths,
}
