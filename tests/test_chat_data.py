"""Data sets with broken rows give one report with places; the rest becomes records, at random and mixed by weight."""

from __future__ import annotations

import functools
import json
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import grain
import numpy as np
import pytest
from absl import flags

from tests.chat_formats import CHATML_TOOLS, FORGETFUL, chat_format, learned, text_data
from train.chat import chat_record, plain_record
from train.chat_data import DataError, Records, checked_records, mixed_records, times_read
from train.conversations import Columns, Conversation
from train.jsonl import index_lines
from train.sources import open_source
from train.tokenizers import ByteTokenizer, Record

FORM = chat_format(CHATML_TOOLS)
MAKE = functools.partial(chat_record, chat_format=FORM)
GOOD = b'{"prompt": "hi", "response": "yo"}\n'

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
        checked_records(open_source(broken), MAKE)
    first, *shown, more, remedy = str(caught.value).splitlines()
    assert first == "12 of 23 rows can be used"
    assert more == "  and 1 more"
    assert remedy == 'repair or remove them, or pass on_error="skip" to leave them out'
    for line, (text, problem) in enumerate(zip(shown, BROKEN.values(), strict=False), start=1):
        assert text.startswith(f"  {broken}, line {2 * line}: ")
        assert problem in text
        assert len(text) < 400


def test_broken_lines_can_be_skipped_and_are_counted(broken: pathlib.Path) -> None:
    records = checked_records(open_source(broken), MAKE, on_error="skip")
    assert (records.check.num_rows, records.check.num_broken) == (23, len(BROKEN))
    assert [problem.place for problem in records.check.problems] == [f"{broken}, line {2 * i}" for i in range(1, 11)]
    assert records.check.describe().startswith("12 of 23 rows can be used\n")
    assert len(records) == 12
    for index in range(12):
        assert learned(FORM, records[index]) == ["yo<|im_end|>"]


def test_a_sound_source_has_nothing_to_report(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD * 3)
    records = checked_records(open_source(tmp_path / "a.jsonl"), MAKE)
    assert records.check.describe() == "3 of 3 rows can be used"


def test_nothing_usable_is_an_error_even_when_skipping(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"chosen": "a", "rejected": "b"}\n' * 3)
    with pytest.raises(DataError) as caught:
        checked_records(open_source(tmp_path / "a.jsonl"), MAKE, on_error="skip")
    first, second, *_, remedy = str(caught.value).splitlines()
    assert (first, remedy) == ("0 of 3 rows can be used", "repair or remove them")
    assert "line 1: a preference pair" in second


@pytest.mark.parametrize("option", ["on_error", "depth"])
def test_options_are_checked(tmp_path: pathlib.Path, option: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    with pytest.raises(ValueError, match=f"{option} must be one of .*, got 'some'"):
        checked_records(open_source(tmp_path / "a.jsonl"), MAKE, **{option: "some"})  # type: ignore[arg-type]


def test_sizes_come_with_the_check(tmp_path: pathlib.Path) -> None:
    rows = [{"question": "a" * n, "answer": "b"} for n in (1, 50, 7)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    records = checked_records(open_source(path), MAKE, columns=Columns(prompt="question", response="answer"))
    assert records.sizes_tokens is not None
    assert records.sizes_tokens.tolist() == [len(records[index]["tokens"]) for index in range(3)]
    assert np.diff(records.sizes_tokens).tolist() == [49, -43]


def refuse_long(spoken: Conversation, *, make: Callable[[Conversation], Record] = MAKE) -> Record:
    """What a template does that refuses some conversations: here those of a long answer."""
    if len(spoken.messages[-1]["content"]) > 3:
        raise ValueError("the chat template refuses the conversation: too long")
    return make(spoken)


@pytest.fixture
def late(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file whose one bad row is well formed, and comes late."""
    path = tmp_path / "late.jsonl"
    path.write_bytes(GOOD * 120 + GOOD.replace(b"yo", b"much too long") + GOOD)
    return path


def test_a_full_check_finds_what_only_the_template_refuses(late: pathlib.Path) -> None:
    with pytest.raises(DataError, match=r"121 of 122 rows can be used\n.*late\.jsonl, line 121: .*refuses"):
        checked_records(open_source(late), refuse_long)


def test_a_check_of_shapes_leaves_it_to_the_reading(late: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    stopping = checked_records(open_source(late), refuse_long, depth="shape")
    assert (len(stopping), stopping.sizes_tokens) == (122, None)
    with pytest.raises(DataError, match=r"^.*late\.jsonl, line 121: .*too long$"):
        stopping[120]
    skipping = checked_records(open_source(late), refuse_long, depth="shape", on_error="skip")
    weightless = skipping[120]
    assert (weightless["tokens"].shape, weightless["loss_mask"].tolist()) == ((1,), [0.0])
    assert [(type(skipping[0][key]), skipping[0][key].dtype) for key in weightless] == [
        (type(value), value.dtype) for value in weightless.values()
    ]
    assert "left out: " in caplog.text
    assert "line 121" in caplog.text


def test_the_first_records_are_made_even_then(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD.replace(b"yo", b"much too long") + GOOD)
    with pytest.raises(DataError, match="line 1: the chat template refuses"):
        checked_records(open_source(tmp_path / "a.jsonl"), refuse_long, depth="shape")


@pytest.mark.parametrize("where", ["here", "threads", "worker"])
def test_readers_give_the_same_one_line(late: pathlib.Path, where: str) -> None:
    records = checked_records(open_source(late), refuse_long, depth="shape")
    threads = {"here": grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)}
    ds = records.dataset().to_iter_dataset(threads.get(where))
    if where == "worker":
        ds = in_a_worker(ds)
    with pytest.raises(DataError) as caught:
        list(ds)
    assert str(caught.value) == f"{late}, line 121: the chat template refuses the conversation: too long"


def in_a_worker(ds: grain.IterDataset[Record]) -> grain.IterDataset[Record]:
    flags.FLAGS.mark_as_parsed()  # Grain's worker processes ask for it
    return ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=1))


def test_worker_processes_read_the_same_records(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(GOOD.replace(b"yo", b"<|im_end|> " + b"yo" * n) for n in range(1, 9)))
    records = checked_records(open_source(path), MAKE)
    here = [records[index]["tokens"].tolist() for index in range(8)]
    assert [record["tokens"].tolist() for record in in_a_worker(records.dataset().to_iter_dataset())] == here


def test_each_answer_can_be_a_record_of_its_own(tmp_path: pathlib.Path) -> None:
    messages = [{"role": role, "content": f"{role[0]}{i}"} for i in range(3) for role in ("user", "assistant")]
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps({'messages': messages})}\n{json.dumps({'messages': messages[:2]})}\n")
    form = chat_format(FORGETFUL)
    with pytest.raises(DataError, match="split by answer"):
        checked_records(open_source(path), functools.partial(chat_record, chat_format=form))
    make = functools.partial(chat_record, chat_format=form, train_on="last")
    records = checked_records(open_source(path), make, by_answer=True)
    assert records.rows.tolist() == [0, 0, 0, 1]
    thought = "<think>\n\n</think>\n\n"
    expected = [[f"{thought}a{i}<|im_end|>"] for i in (0, 1, 2, 0)]
    assert [learned(form, records[index]) for index in range(4)] == expected
    path.write_text(json.dumps({"messages": messages[:1]}))
    with pytest.raises(DataError, match="line 1: no message of the assistant"):
        checked_records(open_source(path), make, by_answer=True)


def numbered(directory: pathlib.Path, name: str, count: int) -> Records:
    path = directory / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{name}{i}", "response": "x"}) for i in range(count)))
    return checked_records(open_source(path), functools.partial(plain_record, tokenizer=ByteTokenizer()))


def prompts(ds: grain.MapDataset[Record]) -> list[str]:
    return [ByteTokenizer().decode(ds[index]["tokens"]).removesuffix("x") for index in range(len(ds))]


def test_mixtures_keep_their_shares_and_read_every_record_equally_often(tmp_path: pathlib.Path) -> None:
    parts = [numbered(tmp_path, "a", 30), numbered(tmp_path, "b", 5)]
    mixed = mixed_records(parts, [3, 1], num_records=40, seed=1)
    read = prompts(mixed)
    assert len(read) == 40
    assert sorted(name for name in read if name[0] == "a") == sorted(f"a{i}" for i in range(30))
    assert sorted(name for name in read if name[0] == "b") == sorted(f"b{i}" for i in range(5) for _ in range(2))
    for start in range(0, 40, 4):
        assert sum(name[0] == "b" for name in read[start : start + 4]) == 1
    first, second = ([name for name in read if name[0] == "b"][half] for half in (slice(5), slice(5, None)))
    assert sorted(first) == sorted(second)
    assert first != second  # shuffled anew
    assert prompts(mixed_records(parts, [3, 1], num_records=40, seed=1)) == read
    assert prompts(mixed_records(parts, [3, 1], num_records=40, seed=2)) != read
    assert times_read([30, 5], [3, 1], num_records=40) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("weights", "problem"),
    [([1], "one weight for each of 2 sources"), ([1, 0], "must be positive"), ([1, float("nan")], "must be positive")],
)
def test_weights_are_checked(tmp_path: pathlib.Path, weights: list[float], problem: str) -> None:
    part = numbered(tmp_path, "a", 3)
    with pytest.raises(ValueError, match=problem):
        mixed_records([part, part], weights, num_records=4, seed=0)


def test_errors_survive_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(DataError("a.jsonl, line 3: broken")))
    assert isinstance(error, ValueError)
    assert str(error) == "a.jsonl, line 3: broken"


@pytest.mark.parametrize("name", ["gsm8k", "medquad", "taskmaster4"])
def test_real_text_is_sound(name: str) -> None:
    def make(spoken: Conversation) -> dict[str, Any]:
        return {"tokens": spoken.messages}

    records = checked_records(index_lines(text_data(f"{name}.jsonl")), make)
    assert records.check.num_broken == 0
    assert len(records) > 1000
