"""A tokenizer out of a GGUF file gives the tokens that an independent, slow reading of the same file gives."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import pickle
import struct
import unicodedata
from typing import Any, BinaryIO

import gguf
import numpy as np
import pytest

from tests.chat_formats import learned, smollm2_path, text_data
from train.chat import ChatFormat, chat_prompt, chat_record
from train.conversations import conversation
from train.gguf_tokenizer import gguf_chat_format, gguf_tokenizer

# Unicode's White_Space; str.isspace() counts four separators more.
BLANKS = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(c) for c in range(0x2000, 0x200B)}
PIECES = """
7 93 1007 123456789012 3.14159 ½ ² Ⅷ ٣٤ 1,234.5e-6 0x1F 百二十三 $5 #1 v2.0
東京都 人工智能 안녕하세요 こんにちは ﾊﾝｶｸ 𠮷野家 Ω≈ç√ naïve שלום नमस्ते ไทย ß İ 🙂 🇫🇷 ❤️ 😀😀
a The it's we'll I'D 'tis they've'd '' rock'n'roll ... — {}[]() <b> a_b C++ http://x.y/z?q=1&r=2 <|im_end|
"""
CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


# An independent reading of the file, by the format's description.


def read_value(file: BinaryIO, kind: int) -> Any:
    formats = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    if kind in formats:
        return struct.unpack(f"<{formats[kind]}", file.read(struct.calcsize(formats[kind])))[0]
    (length,) = struct.unpack("<Q", file.read(8)) if kind == 8 else (0,)
    if kind == 8:
        return file.read(length).decode()
    assert kind == 9
    of, count = struct.unpack("<IQ", file.read(12))
    return [read_value(file, of) for _ in range(count)]


def read_metadata(path: pathlib.Path) -> dict[str, Any]:
    with path.open("rb") as file:
        magic, _, _, count = struct.unpack("<4sIQQ", file.read(24))
        assert magic == b"GGUF"
        metadata = {}
        for _ in range(count):
            key = read_value(file, 8)
            (kind,) = struct.unpack("<I", file.read(4))
            metadata[key] = read_value(file, kind)
    return metadata


def byte_characters() -> dict[int, str]:
    """How byte-level vocabularies write bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


class SlowTokenizer:
    """Byte-level BPE, word by word, merge by merge."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        tokens = metadata["tokenizer.ggml.tokens"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.control = [t for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 3]
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        self.characters = byte_characters()
        self.merged = functools.cache(self.merge)

    def encode(self, text: str, *, control: bool) -> list[int]:
        found = [(text.find(token), -len(token), token) for token in self.control if control and token in text]
        if not found:
            return [token for part in split_digits(text) for word in words(part) for token in self.merged(word)]
        position, _, token = min(found)
        after = text[position + len(token) :]
        return [*self.encode(text[:position], control=False), self.ids[token], *self.encode(after, control=True)]

    def merge(self, word: str) -> tuple[int, ...]:
        parts = [self.characters[byte] for byte in word.encode()]
        while len(parts) > 1:
            ranked = [(self.ranks.get(pair, 10**9), i) for i, pair in enumerate(itertools.pairwise(parts))]
            rank, i = min(ranked)
            if rank == 10**9:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return tuple(self.ids[part] for part in parts)


def kind_of(character: str) -> str:
    if character in BLANKS:
        return "blank"
    return {"L": "letter", "N": "digit"}.get(unicodedata.category(character)[0], "other")


def split_digits(text: str) -> list[str]:
    parts: list[str] = []
    for character in text:
        if kind_of(character) == "digit" or not parts or kind_of(parts[-1][-1]) == "digit":
            parts.append(character)
        else:
            parts[-1] += character
    return parts


def words(text: str) -> list[str]:
    """GPT-2's rule, by hand: contractions; a run of one kind with a blank before; blanks but for that one."""
    found = []
    position = 0
    while position < len(text):
        end = next((position + len(c) for c in CONTRACTIONS if text.startswith(c, position)), position)
        if end == position:
            start = position + (text[position] == " " and position + 1 < len(text))
            kind = kind_of(text[start])
            if kind == "blank":
                start, kind = position, kind_of(text[position])
            end = start
            while end < len(text) and kind_of(text[end]) == kind:
                end += 1
            if kind == "blank" and end < len(text) and end - position > 1:
                end -= 1
        found.append(text[position:end])
        position = end
    return found


def real_texts() -> list[str]:
    texts: list[str] = []
    for name, count in (("gsm8k", 700), ("medquad", 500), ("taskmaster4", 300)):
        with text_data(f"{name}.jsonl").open(encoding="utf-8") as lines:
            for line in itertools.islice(lines, count):
                row = json.loads(line)
                texts.append(row["response"] if "response" in row else "\n".join(m["content"] for m in row["messages"]))
    return texts


def made_texts(control: list[str]) -> list[str]:
    """Digits, scripts, emoji, blanks and control tokens in any order."""
    blanks = [" ", "  ", "   ", "\n", "\n\n", "\t", " \n ", "\r\n", "\u3000", "\xa0", "\u2009", "\n    return x"]
    odd = [
        "\x1c",
        "\x00",
        "\u200b",
        "\ufeff",
        "\uff11\uff12",
        "cafe\u0301",
        "👩\u200d👩\u200d👧",
        " the",
        "<|im_",
        "|>",
    ]
    pieces = [*PIECES.split(), *blanks, *odd, *control]
    rng = np.random.default_rng(5)
    return ["".join(rng.choice(pieces, size=rng.integers(1, 12))) for _ in range(800)]


@pytest.fixture(scope="module")
def smollm2() -> ChatFormat:
    return gguf_chat_format(smollm2_path())


def test_smollm2_equals_an_independent_reading(smollm2: ChatFormat) -> None:
    slow = SlowTokenizer(read_metadata(smollm2_path()))
    texts = [*real_texts(), *made_texts(slow.control)]
    assert len(texts) >= 2000
    for text in texts:
        assert smollm2.encoder.encode(text).ids.tolist() == slow.encode(text, control=True)
        ids = smollm2.tokenizer.encode(text)
        assert ids.tolist() == slow.encode(text, control=False)
        assert smollm2.tokenizer.decode(ids) == text


def test_smollm2_knows_its_special_tokens(smollm2: ChatFormat) -> None:
    metadata = read_metadata(smollm2_path())
    tokenizer = smollm2.tokenizer
    assert tokenizer.vocab_size == len(metadata["tokenizer.ggml.tokens"]) == 49152
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.separator_id) == (None, 2, 2, None)
    assert len(smollm2.encoder.control_tokens) == 17
    assert smollm2.template.source == metadata["tokenizer.chat_template"]
    spoken = conversation({"prompt": "What is the capital of France?", "response": "Paris."})
    prompt = chat_prompt(spoken, smollm2)
    assert prompt[:3].tolist() == [1, *tokenizer.encode("system\n").tolist()][:3]
    assert learned(smollm2, chat_record(spoken, smollm2)) == ["Paris.<|im_end|>"]
    assert (
        pickle.loads(pickle.dumps(tokenizer)).encode("a<|im_end|>").tolist() == tokenizer.encode("a<|im_end|>").tolist()
    )


# Small files, written here.


def write_gguf(path: pathlib.Path, *, rule: str, without: str = "", **changes: Any) -> pathlib.Path:
    """A file with a byte-level vocabulary, a few merges, two control tokens and one defined by the user."""
    characters = sorted(byte_characters().values())
    merges = ["1 2", "12 3", "123 4", "a b", "Ġ ab", "Ċ Ċ", "ab c"]
    merged = [merge.replace(" ", "") for merge in merges]
    fields: dict[str, Any] = {
        "tokenizer.ggml.tokens": [*characters, *merged, "abcd", "<s>", "</s>", "<think>"],
        "tokenizer.ggml.token_type": [1] * (len(characters) + len(merged) + 1) + [3, 3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.bos_token_id": len(characters) + len(merged) + 1,
        "tokenizer.ggml.eos_token_id": len(characters) + len(merged) + 2,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        **{f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()},
    }
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        if key == f"tokenizer.{without}":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("rule", "text", "tokens"),
    [
        ("gpt-2", "x1234 ab", ["x", "1234", "Ġab"]),
        ("smollm", "x1234 ab", ["x", "1", "2", "3", "4", "Ġab"]),
        ("qwen2", "x1234 ab", ["x", "1", "2", "3", "4", "Ġab"]),
        ("llama-bpe", "x1234 ab", ["x", "123", "4", "Ġab"]),
        # A word that is a token, though no merge leads to it.
        ("qwen2", "abcd", ["abc", "d"]),
        ("llama-bpe", "abcd", ["abcd"]),
        # Line breaks stay with the signs before them; with blanks before them they are a word.
        ("gpt-2", "!\n\nab", ["!", "Ċ", "Ċ", "ab"]),
        ("qwen2", "!\n\nab", ["!", "ĊĊ", "ab"]),
        ("llama-bpe", " \n\nab", ["Ġ", "ĊĊ", "ab"]),
        # Contractions in capitals too, and composed characters.
        ("qwen2", "cafe\u0301", ["c", "a", "f", "Ã", "©"]),
        ("llama-bpe", "e\u0301", ["e", "Ì", "ģ"]),
        ("smollm", "<think>ab</s>", ["<think>", "ab", "<", "/", "s", ">"]),
    ],
)
def test_rules_for_cutting_text(tmp_path: pathlib.Path, rule: str, text: str, tokens: list[str]) -> None:
    tokenizer = gguf_tokenizer(write_gguf(tmp_path / "a.gguf", rule=rule))
    assert [tokenizer.backend.id_to_token(token) for token in tokenizer.encode(text).tolist()] == tokens


def test_special_tokens_and_template(tmp_path: pathlib.Path) -> None:
    form = gguf_chat_format(write_gguf(tmp_path / "a.gguf", rule="smollm"))
    assert list(form.encoder.control_tokens) == ["<s>", "</s>"]
    assert form.template.text([{"role": "user", "content": "hi"}]) == "<s>hi</s>"
    tokenizer = form.tokenizer
    ids = form.encoder.control_tokens
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, ids["</s>"], ids["</s>"])
    assert gguf_tokenizer(write_gguf(tmp_path / "b.gguf", rule="llama-bpe")).bos_id == ids["<s>"]
    path = write_gguf(tmp_path / "c.gguf", rule="smollm", ggml__add_bos_token=True, ggml__padding_token_id=3)
    other = gguf_tokenizer(path)
    assert (other.bos_id, other.pad_id) == (ids["<s>"], 3)
    silent = gguf_tokenizer(write_gguf(tmp_path / "d.gguf", rule="llama-bpe", ggml__add_bos_token=False))
    assert silent.bos_id is None


def test_a_template_may_be_given(tmp_path: pathlib.Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", rule="smollm", chat_template__tool_use="{{ tools }}")
    assert gguf_chat_format(path).template.tool_source == "{{ tools }}"
    form = gguf_chat_format(path, chat_template="{{ eos_token }}{{ mood }}", template_options={"mood": "calm"})
    assert form.template.text([]) == "</s>calm"
    assert form.template.tool_source is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rule": "deepseek-llm"}, "the rule 'deepseek-llm' for cutting text into words is not known"),
        ({"rule": "x", "without": "ggml.pre"}, "the rule None for cutting"),
        ({"ggml__model": "llama"}, "tokenizer model 'llama' is not known .* tokenizer.json"),
        ({"ggml__tokens": ["a", "a"]}, "has 1 tokens twice"),
        ({"ggml__merges": ["a zz"]}, "tokens and merges don't fit"),
        ({"ggml__eos_token_id": 9999}, r"eos_token_id 9999 is not in \[0, "),
        ({"without": "ggml.eos_token_id"}, "has no 'tokenizer.ggml.eos_token_id'"),
        ({"without": "ggml.merges"}, "has no 'tokenizer.ggml.merges'"),
        ({"without": "chat_template"}, "has no chat template; give one"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: pathlib.Path, changes: dict[str, Any], problem: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", **{"rule": "smollm", **changes})
    with pytest.raises(ValueError, match=rf"a\.gguf'.*{problem}"):
        gguf_chat_format(path)


def test_files_that_are_none(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"can't read .*No such file"):
        gguf_tokenizer(tmp_path / "a.gguf")
    path = write_gguf(tmp_path / "a.gguf", rule="smollm")
    for content in (b"", b"GGUF", b"not at all a GGUF file", path.read_bytes()[:1000]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is no GGUF file, or a damaged one"):
            gguf_tokenizer(path)
