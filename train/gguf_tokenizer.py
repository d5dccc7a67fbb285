"""The tokenizer and the chat template inside a GGUF file.

A GGUF file lists tokens and merges, and only names the rule by which text is cut into words before merging. The rules
of the model families that the trainer knows are written out here; another name is an error, because a wrong rule gives
plausible tokens that the model was not trained on. Reading takes some 2 seconds, for 50,000 tokens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import gguf
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from train.chat import ChatFormat
from train.chat_template import ChatTemplate
from train.tokenizers import FileTokenizer

_CONTROL, _USER_DEFINED = 3, 4

# Both families cut contractions, words with one leading character that is no letter, digits, runs of other characters
# with their line breaks, and blanks. They differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def gguf_tokenizer(path: str | os.PathLike[str]) -> FileTokenizer:
    """Returns the tokenizer of a GGUF file.

    Raises:
        ValueError: If the file can't be read, or its tokenizer is of a kind that is not known here.
    """
    return _tokenizer(_Metadata(path))


def gguf_chat_format(
    path: str | os.PathLike[str],
    *,
    chat_template: str | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> ChatFormat:
    """Returns the tokenizer and the chat template of a GGUF file.

    Args:
        path: The file.
        chat_template: A template in Jinja's language instead of the file's own.
        template_options: Names that the template looks at, such as {"enable_thinking": False}.

    Raises:
        ValueError: As `gguf_tokenizer`; or if there is no chat template.
    """
    metadata = _Metadata(path)
    tokenizer = _tokenizer(metadata)
    source = metadata.get("tokenizer.chat_template") if chat_template is None else chat_template
    if source is None:
        raise ValueError(f"{metadata.name} has no chat template; give one, or train on prompt and response without")
    tokens = metadata.need("tokenizer.ggml.tokens")
    special = {
        f"{role}_token": tokens[metadata.token_id(f"{role}_token_id")]
        for role in ("bos", "eos")
        if metadata.get(f"tokenizer.ggml.{role}_token_id") is not None
    }
    template = ChatTemplate(
        source=source,
        tool_source=metadata.get("tokenizer.chat_template.tool_use") if chat_template is None else None,
        variables={**special, **(template_options or {})},
    )
    return ChatFormat(tokenizer=tokenizer, template=template)


class _Metadata:
    """The key-value part of a GGUF file; its errors name the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = repr(os.fspath(path))
        try:
            self._fields = gguf.GGUFReader(path).fields
        except OSError as error:
            raise ValueError(f"can't read {self.name}: {error.strerror or error}; give a GGUF file") from error
        except Exception as error:  # a damaged file makes the reader fail in many ways
            raise ValueError(f"{self.name} is no GGUF file, or a damaged one ({error}); fetch it again") from error

    def get(self, key: str) -> Any:
        return self._fields[key].contents() if key in self._fields else None

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.name} has no {key!r}; convert the model again, with its tokenizer")
        return value

    def token_id(self, role: str) -> int:
        value = int(self.need(f"tokenizer.ggml.{role}"))
        size = len(self.need("tokenizer.ggml.tokens"))
        if not 0 <= value < size:
            raise ValueError(f"{self.name}: {role} {value} is not in [0, {size}); convert the model again")
        return value


def _tokenizer(metadata: _Metadata) -> FileTokenizer:
    tokens: list[str] = metadata.need("tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"{metadata.name} has {len(tokens) - len(set(tokens))} tokens twice; convert the model again")
    eos_id = metadata.token_id("eos_token_id")
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if adds_bos is None:
        adds_bos = metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    has_pad = metadata.get("tokenizer.ggml.padding_token_id") is not None
    return FileTokenizer(
        backend=_backend(metadata, tokens),
        vocab_size=len(tokens),
        pad_id=metadata.token_id("padding_token_id") if has_pad else eos_id,
        bos_id=metadata.token_id("bos_token_id") if adds_bos else None,
        eos_id=eos_id,
    )


def _backend(metadata: _Metadata, tokens: list[str]) -> tokenizers.Tokenizer:
    kind = metadata.need("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"{metadata.name}: tokenizer model {kind!r} is not known here, only 'gpt2' (byte-level BPE) is; take the "
            "tokenizer.json of the model's Hugging Face directory"
        )
    rule = metadata.get("tokenizer.ggml.pre")
    merges = [tuple(merge.split(" ")) for merge in metadata.need("tokenizer.ggml.merges")]
    try:
        # Llama 3 takes a word that is a token as it is, whatever the merges would make of it.
        model = models.BPE(
            dict(zip(tokens, range(len(tokens)), strict=True)), merges, ignore_merges=rule == "llama-bpe"
        )
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{metadata.name}: tokens and merges don't fit ({error}); convert the model again") from error
    backend = tokenizers.Tokenizer(model)
    _set_rule(backend, rule, metadata.name)
    backend.decoder = decoders.ByteLevel()
    types = metadata.need("tokenizer.ggml.token_type")
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        backend.add_tokens(
            [
                tokenizers.AddedToken(token, special=special, normalized=False)
                for token, token_type in zip(tokens, types, strict=True)
                if token_type == wanted
            ]
        )
    backend.encode_special_tokens = True
    return backend


def _set_rule(backend: tokenizers.Tokenizer, rule: str | None, name: str) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    steps: list[pre_tokenizers.PreTokenizer]
    if rule == "gpt-2":
        steps = [gpt2]
    elif rule == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), gpt2]
    elif rule == "llama-bpe":
        steps = [_split(_WORDS.replace("DIGITS", "{1,3}")), byte_level]
    elif rule == "qwen2":
        backend.normalizer = normalizers.NFC()
        steps = [_split(_WORDS.replace("DIGITS", "")), byte_level]
    else:
        raise ValueError(
            f"{name}: the rule {rule!r} for cutting text into words is not known here, only 'gpt-2', 'smollm', "
            "'llama-bpe' and 'qwen2' are; take the tokenizer.json of the model's Hugging Face directory"
        )
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
