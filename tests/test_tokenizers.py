"""Tokenizers give text back, files that are none are named, and the loss counts the response and nothing else."""

from __future__ import annotations

import json
import pathlib
import pickle

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from train.corpus import Pair
from train.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer, to_record

TEXTS = ["def add(a, b):\n    return a + b\n", "the cat sat on the mat", "naïve café 東京 🙂"]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def write_tokenizer(directory: pathlib.Path, *, template: str = "$A") -> pathlib.Path:
    """Saves a small byte-level BPE that asks for truncation and padding, as published files do."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=8)
    path = directory / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.fixture(scope="module")
def file_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("bpe")), eos_token="</s>")


@settings(deadline=None)
@given(ANY_TEXT)
def test_bytes_give_text_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_byte_specials_are_distinct_and_fill_the_vocabulary() -> None:
    tokenizer = ByteTokenizer()
    specials = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.separator_id, tokenizer.eos_id}
    assert specials == set(range(256, tokenizer.vocab_size))
    assert tokenizer.decode([257, 0xC3, 259]) == "\ufffd", "a model may write half a character"


@pytest.mark.parametrize("wrong", [-1, 260])
def test_foreign_ids_are_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"id {wrong} is not in \[0, 260\)"):
        ByteTokenizer().decode([65, wrong])


@settings(deadline=None, max_examples=50)
@given(ANY_TEXT)
def test_file_tokenizer_gives_text_back(file_tokenizer: FileTokenizer, text: str) -> None:
    ids = file_tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert file_tokenizer.decode(ids) == text
    assert file_tokenizer.eos_id not in ids


def test_file_tokenizer_is_neither_cut_nor_padded_nor_fooled(file_tokenizer: FileTokenizer) -> None:
    text = TEXTS[0] * 20
    assert file_tokenizer.decode(file_tokenizer.encode(text)) == text
    assert len(file_tokenizer.encode("a")) == 1
    assert file_tokenizer.eos_id not in file_tokenizer.encode("it ends </s> here")
    assert file_tokenizer.decode([0, *file_tokenizer.encode("cat"), 1]) == "cat"


def test_file_tokenizer_survives_pickling(file_tokenizer: FileTokenizer) -> None:
    copy = pickle.loads(pickle.dumps(file_tokenizer))
    for text in (TEXTS[2], "it ends </s> here"):
        assert copy.encode(text).tolist() == file_tokenizer.encode(text).tolist()
    assert (copy.eos_id, copy.vocab_size) == (file_tokenizer.eos_id, file_tokenizer.vocab_size)


def test_ids_are_below_the_vocabulary_size_even_with_gaps(tmp_path: pathlib.Path) -> None:
    path = write_tokenizer(tmp_path)
    content = json.loads(path.read_text())
    content["model"]["vocab"]["zz"] = 5000
    path.write_text(json.dumps(content))
    assert load_tokenizer(path, eos_token="</s>").vocab_size == 5001


@pytest.mark.parametrize(("template", "bos_id"), [("$A", None), ("<s> $A", 0), ("<s> $A </s>", 0), ("$A </s>", None)])
def test_first_token_is_what_the_post_processor_puts_first(
    tmp_path: pathlib.Path, template: str, bos_id: int | None
) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=template), eos_token="</s>")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (bos_id, 1)
    assert tokenizer.decode(tokenizer.encode("cat")) == "cat"
    tokens = to_record(Pair("the cat", "sat", "m"), tokenizer)["tokens"].tolist()
    assert tokens.count(0) == (bos_id == 0)
    assert tokens.count(1) == 1


@pytest.mark.parametrize("entry", ["</s>", {"content": "</s>", "lstrip": False}])
def test_end_token_comes_from_the_configuration_beside_the_file(tmp_path: pathlib.Path, entry: object) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": entry}))
    assert load_tokenizer(tmp_path).eos_id == 1
    assert load_tokenizer(tmp_path, eos_token="<s>").eos_id == 0, "what the caller says goes first"


@pytest.mark.parametrize("config", [None, "{}", '{"eos_token": null}'])
def test_unknown_end_token_is_refused(tmp_path: pathlib.Path, config: str | None) -> None:
    path = write_tokenizer(tmp_path)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ValueError, match=r"unknown in tokenizer .*tokenizer\.json'.*eos_token.*\['</s>', '<s>'\]"):
        load_tokenizer(path)


def test_end_token_outside_the_vocabulary_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"no end token '<end>' in tokenizer"):
        load_tokenizer(write_tokenizer(tmp_path), eos_token="<end>")


@pytest.mark.parametrize("config", ["{", "[]", '{"eos_token": {"id": 1}}'])
def test_broken_configuration_is_named(tmp_path: pathlib.Path, config: str) -> None:
    path = write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json'.*pass eos_token"):
        load_tokenizer(path)


def test_missing_tokenizer_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"can't read tokenizer .*nowhere\.json': No such file.*byte tokenizer"):
        load_tokenizer(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match=r"can't read tokenizer .*tokenizer\.json': No such file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1}', b"[]", b"\x00\xff\xfe", b"word\nword\n"])
def test_file_that_is_no_tokenizer_is_named(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "vocabulary.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"vocabulary\.json' is not a Hugging Face tokenizer\.json .*converted"):
        load_tokenizer(path, eos_token="</s>")


def check_record(pair: Pair, tokenizer: Tokenizer) -> None:
    record = to_record(pair, tokenizer)
    tokens, mask = record["tokens"], record["loss_mask"]
    assert tokens.dtype == np.int32
    assert mask.dtype == np.float32
    assert tokens.shape == mask.shape
    counted = tokens[mask == 1]
    assert np.isin(mask, (0, 1)).all()
    assert counted[-1] == tokens[-1] == tokenizer.eos_id
    assert tokenizer.decode(counted) == pair.response
    assert tokenizer.decode(tokens[mask == 0]) == pair.prompt
    assert (np.diff(mask) >= 0).all(), "the response is one piece at the end"


@settings(deadline=None, max_examples=50)
@given(ANY_TEXT, ANY_TEXT.filter(len))
def test_loss_counts_exactly_the_response_and_its_end(
    file_tokenizer: FileTokenizer, prompt: str, response: str
) -> None:
    check_record(Pair(prompt, response, "m"), ByteTokenizer())
    check_record(Pair(prompt + "?", response, "m"), file_tokenizer)


def test_nothing_predicts_the_first_token(file_tokenizer: FileTokenizer) -> None:
    assert file_tokenizer.bos_id is None
    mask = to_record(Pair("", "cat", "m"), file_tokenizer)["loss_mask"]
    assert mask.tolist() == [0.0] + [1.0] * (len(mask) - 1)


def test_response_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="response of a pair from some_module has no tokens"):
        to_record(Pair("p", "", "some_module"), ByteTokenizer())
