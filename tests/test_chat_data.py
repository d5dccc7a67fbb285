"""Rows become records, broken ones are named together with their places, and sources are mixed by weight."""

from __future__ import annotations

import json
import pathlib
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat_formats import CHATML_TOOLS, FORGETFUL, chat_format, learned, text_data, text_of
from train.chat_corpus import read_chat_corpus
from train.chat_data import Block, DataError, RowReader, mixture, read_block, times_read
from train.config import CorpusConfig
from train.conversations import Columns
from train.sources import open_source
from train.token_table import TokenTable

FORM = chat_format(CHATML_TOOLS)
SEEDS = st.integers(0, 2**31 - 1)
READER = RowReader(chat_format=FORM)
GOOD = b'{"prompt": "hi", "response": "yo"}\n'


def read(path: pathlib.Path, reader: RowReader = READER) -> Block:
    source = open_source(path)
    return read_block(source, range(len(source)), reader, folder=str(path.parent))


def table(block: Block) -> TokenTable:
    return TokenTable((block.values,), block.entries)


def corpus(*paths: pathlib.Path, lines: list[str] | None = None, **settings: Any) -> tuple[TokenTable, TokenTable]:
    """Both parts of a corpus; `lines` gets what the user is told."""
    config = CorpusConfig(chat_paths=tuple(map(str, paths)), **{"eval_share": 0.3, **settings})
    told = [] if lines is None else lines
    return read_chat_corpus(config, FORM, seed=0, token_cache=None, workers=1, say=told.append)


BROKEN: dict[bytes, str] = {
    b'{"prompt": "hi", "response": "yo"\n': "not valid JSON",
    b'{"prompt": "hi"}\n': "'response' is missing",
    b'{"prompt": "hi", "response": "  "}\n': "'response' is empty",
    b'{"prompt": ["hi"], "response": "yo"}\n': "'prompt' must be a string",
    b'{"prompt": "hi", "response": "' + b"x" * 5_000_000 + b'"}\n': "over the limit",
    b'\xef\xbb\xbf{"prompt": "hi", "response": "yo"}\n': "byte order mark in the middle",
    b'{"prompt": "h\0i", "response": "yo"}\n': "NUL byte",
    b'{"prompt": "hi", "response": "a\\u0000"}\n': "NUL at character 1",
    b'{"prompt": "hi", "response": "\xff"}\n': "not UTF-8",
    b'["hi", "yo"]\n': "want a JSON object",
    b'{"messages": [{"role": "user", "content": "hi"}]}\n': "no message of the assistant",
}


@pytest.fixture
def broken(tmp_path: pathlib.Path) -> pathlib.Path:
    """Each broken line after a good one; the file begins with a byte order mark, and some lines end in CRLF."""
    path = tmp_path / "broken.jsonl"
    good = GOOD.replace(b"\n", b"\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + b"".join(good + line for line in BROKEN) + b"\n" + good)
    return path


def test_all_broken_lines_are_in_one_report(broken: pathlib.Path) -> None:
    with pytest.raises(DataError) as caught:
        corpus(broken)
    first, *shown, more, remedy = str(caught.value).splitlines()
    assert first == f"{broken}: 12 of 23 rows can be used"
    assert more == "  and 1 more"
    assert remedy == "repair or remove them, or set corpus.on_bad_row=skip to leave them out"
    for line, (text, problem) in enumerate(zip(shown, BROKEN.values(), strict=False), start=1):
        assert text.startswith(f"  {broken}, line {2 * line}: ")
        assert problem in text
        assert len(text) < 400


def test_broken_lines_can_be_skipped_and_are_counted(broken: pathlib.Path) -> None:
    block = read(broken)
    assert (block.num_rows, block.num_broken, len(block.entries)) == (23, len(BROKEN), 12)
    assert [problem.place for problem in block.problems] == [f"{broken}, line {2 * i}" for i in range(1, 11)]
    assert [learned(FORM, record) for record in table(block)] == [["yo<|im_end|>"]] * 12
    lines: list[str] = []
    with pytest.raises(ValueError, match=r"all .* held-out records stand in the training part, too: remove repeated"):
        corpus(broken, on_bad_row="skip", lines=lines)
    assert lines[0].startswith(f"corpus: {broken}: 12 of 23 rows can be used\n")


def test_nothing_usable_is_an_error_even_when_skipping(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"chosen": "a", "rejected": "b"}\n' * 3)
    with pytest.raises(DataError) as caught:
        corpus(tmp_path / "a.jsonl", on_bad_row="skip")
    first, second, *_, remedy = str(caught.value).splitlines()
    assert (first.endswith("0 of 3 rows can be used"), remedy) == (True, "repair or remove them")
    assert "line 1: a preference pair" in second


def test_columns_may_have_other_names(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"question": "a" * n, "answer": "b"}) for n in (1, 50, 7)))
    block = read(path, RowReader(chat_format=FORM, columns=Columns(prompt="question", response="answer")))
    assert block.num_broken == 0
    assert [learned(FORM, record) for record in table(block)] == [["b<|im_end|>"]] * 3
    assert table(block).sizes.tolist() == [len(record["tokens"]) for record in table(block)]
    assert (table(block).sizes[1:] - table(block).sizes[:-1]).tolist() == [49, -43]


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [("assistant", [["a0"], ["a1"], ["a2"], ["a0"]]), ("last", [["a2"], ["a0"]])],
)
def test_each_answer_can_be_a_record_of_its_own(tmp_path: pathlib.Path, train_on: Any, expected: Any) -> None:
    messages = [{"role": role, "content": f"{role[0]}{i}"} for i in range(3) for role in ("user", "assistant")]
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps({'messages': messages})}\n{json.dumps({'messages': messages[:2]})}\n")
    form = chat_format(FORGETFUL)
    together = read(path, RowReader(chat_format=form))
    assert together.num_broken == 1
    assert "corpus.split_answers" in together.problems[0].reason
    block = read(path, RowReader(chat_format=form, train_on=train_on, by_answer=True))
    thought = "<think>\n\n</think>\n\n"
    assert [learned(form, record) for record in table(block)] == [
        [f"{thought}{answer}<|im_end|>" for answer in answers] for answers in expected
    ]
    assert len(set(block.fractions)) == 2, "the answers of a row are held out together"
    path.write_text(json.dumps({"messages": messages[:1]}))
    (problem,) = read(path, RowReader(chat_format=form, by_answer=True)).problems
    assert "no message of the assistant" in problem.reason


def numbered(directory: pathlib.Path, name: str, count: int) -> pathlib.Path:
    path = directory / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{name}{i}", "response": "x"}) for i in range(count)))
    return path


def names(records: TokenTable) -> list[str]:
    """The prompts of the records."""
    return [text_of(FORM, record["tokens"]).split("user\n")[1].split("<|im_end|>")[0] for record in records]


def test_the_split_depends_on_names_and_rows_alone(tmp_path: pathlib.Path) -> None:
    """Other data beside a source, more rows behind, or another folder: what was held out still is."""
    (tmp_path / "moved").mkdir()
    first, other = numbered(tmp_path, "a", 40), numbered(tmp_path, "b", 40)
    _, held_out = corpus(first)
    assert 4 < len(held_out) < 20
    train, both = corpus(other, first)
    assert set(names(held_out)) == {name for name in names(both) if name[0] == "a"}
    assert sorted(names(train) + names(both)) == sorted(f"{name}{i}" for name in "ab" for i in range(40))
    assert names(corpus(numbered(tmp_path / "moved", "a", 60))[1])[: len(held_out)] == names(held_out)


def test_what_is_learnt_from_is_not_held_out(tmp_path: pathlib.Path) -> None:
    path = numbered(tmp_path, "a", 40)
    train, held_out = map(names, corpus(path))
    again = tmp_path / "again.jsonl"
    again.write_text("\n".join(10 * [path.read_text().splitlines()[int(held_out[1][1:])]]))
    lines: list[str] = []
    more, left = map(names, corpus(path, again, lines=lines))
    assert left == [name for name in held_out if name != held_out[1]]
    assert set(more) == {*train, held_out[1]}
    num_leaked = 40 + 10 - len(more) - len(left)
    assert lines[-1] == f"held-out: {num_leaked} records left out because the training part has the same"


def test_a_corpus_is_mixed_by_weight(tmp_path: pathlib.Path) -> None:
    """Sources of 28 and 9 training records, three to one."""
    paths = numbered(tmp_path, "a", 40), numbered(tmp_path, "b", 12)
    plain, held_out = corpus(*paths)
    lines: list[str] = []
    mixed, same = corpus(*paths, chat_weights=(3.0, 1.0), lines=lines)
    assert names(same) == names(held_out)
    assert len(mixed) == len(plain)
    assert set(names(mixed)) <= set(names(plain))
    shares = [sum(name[0] == letter for name in names(mixed)) / len(mixed) for letter in "ab"]
    assert shares == pytest.approx([0.75, 0.25], abs=1 / len(mixed))
    assert sum("is read" in line for line in lines) == 2


def test_mixtures_keep_their_shares_and_read_every_record_equally_often() -> None:
    parts = [[f"a{i}" for i in range(30)], [f"b{i}" for i in range(5)]]
    names = [*parts[0], *parts[1]]

    def mixed(seed: int) -> list[str]:
        return [names[row] for row in mixture([30, 5], [3, 1], num_records=40, seed=seed)]

    order = mixed(1)
    assert len(order) == 40
    assert sorted(name for name in order if name[0] == "a") == sorted(parts[0])
    assert sorted(name for name in order if name[0] == "b") == sorted(2 * parts[1])
    for start in range(0, 40, 4):
        assert sum(name[0] == "b" for name in order[start : start + 4]) == 1
    first, second = ([name for name in order if name[0] == "b"][half] for half in (slice(5), slice(5, None)))
    assert sorted(first) == sorted(second)
    assert first != second  # shuffled anew
    assert mixed(1) == order
    assert mixed(2) != order
    assert times_read([30, 5], [3, 1], num_records=40) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("weights", "problem"),
    [([1], "one weight for each of 2 sources"), ([1, 0], "must be positive"), ([1, float("nan")], "must be positive")],
)
def test_weights_are_checked(weights: list[float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        mixture([1, 1], weights, num_records=4, seed=0)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.floats(1e-9, 1e9)), min_size=1, max_size=5), st.integers(1, 300), SEEDS
)
def test_every_beginning_of_a_mixture_has_the_shares_of_the_weights(
    parts: list[tuple[int, float]], num_records: int, seed: int
) -> None:
    lengths, weights = zip(*parts, strict=True)
    rows = mixture(lengths, weights, num_records=num_records, seed=seed)
    assert len(rows) == num_records
    start = 0
    for length, weight in parts:
        own = (rows >= start) & (rows < start + length)
        expected = np.arange(1, num_records + 1) * weight / sum(weights)
        assert np.abs(np.cumsum(own) - expected).max() <= (1 + len(parts)) / 2 + 1e-6
        whole = rows[own][: own.sum() // length * length].reshape(-1, length)
        assert (np.sort(whole) == np.arange(start, start + length)).all(), "a record comes again before all have come"
        start += length
    assert rows.max() < start


def test_errors_survive_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(DataError("a.jsonl, line 3: broken")))
    assert isinstance(error, ValueError)
    assert str(error) == "a.jsonl, line 3: broken"


@pytest.mark.parametrize("name", ["gsm8k", "medquad"])
def test_real_text_is_sound(name: str) -> None:
    block = read(text_data(f"{name}.jsonl"))
    assert block.num_broken == 0
    assert len(block.entries) == block.num_rows > 1000
