"""Chat templates: a conversation becomes text the way the model's own tokenizer says.

A template is a program that came with a model. It runs in Jinja's sandbox: it can read what it is given and write
text, and reaches neither Python's objects nor files. (Nothing bounds its running time: take models from those you
trust that far.) It sees what Hugging Face's renderer offers it: `messages`, `tools`, `documents`,
`add_generation_prompt`, the special tokens' texts, `raise_exception`, `strftime_now`, the filter `tojson` (plain JSON,
nothing escaped for HTML), `break` and `continue`, and the block `{% generation %}` that marks what the model writes.

Marks travel through the template as lone surrogates, characters that no valid text holds, and are taken out of the
result again. So a mark is found where it came out, also from inside macros and captured blocks.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Span = tuple[int, int]
"""First character, and one after the last."""

LITERAL, CALL = "\ud802", "\ud803"
"""Put into a message's text, they come back in `Rendered.literals` and `Rendered.calls`."""

_BEGIN, _END = "\ud800", "\ud801"
_MARK = re.compile(f"([{_BEGIN}{_END}{LITERAL}{CALL}])")

DEFAULT_DATE = datetime.datetime(2026, 1, 1)
"""What templates that print today's date are told. Fixed: another day must not change the records of a resumed run."""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: Without any mark.
        generated: Spans of `text` that the template marks with `{% generation %}`, in order; empty ones left out.
        literals: Positions in `text` at which a `LITERAL` stood.
        calls: The same of `CALL`.
    """

    text: str
    generated: tuple[Span, ...] = ()
    literals: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A chat template and what it is told besides the messages.

    Attributes:
        source: The template, in Jinja's language.
        tool_source: The variant for conversations that come with tools; default: the same one.
        variables: Further names the template sees: "bos_token", "eos_token", and options of its own.
        date: What `strftime_now` prints.

    >>> source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    >>> template = ChatTemplate(source=source, variables={"eos_token": "</s>"})
    >>> template.text([{"role": "user", "content": "hi"}])
    'user: hi</s>'
    """

    source: str
    tool_source: str | None = None
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    date: datetime.datetime = DEFAULT_DATE

    def __post_init__(self) -> None:
        for source in {self.source, self.tool_source or self.source}:
            _compiled(source, False)

    def marks_generation(self, *, tools: bool = False) -> bool:
        """Returns whether the template marks what the model writes."""
        return _marks_generation(self._source(tools))

    def shows_tools(self) -> bool:
        """Returns whether the template says anything about the tools it is given."""
        names = _environment(False).parse(self._source(True)).find_all(jinja2.nodes.Name)
        return any(name.name == "tools" for name in names)

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Returns the text of `messages`, with `add_generation_prompt` followed by what precedes an answer.

        Raises:
            ValueError: If the template refuses the conversation, or fails.
        """
        return self._render(messages, tools=tools, add_generation_prompt=add_generation_prompt, marked=False)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Returns what `text` returns, and the marks in it.

        Raises:
            ValueError: As `text`; or if the text would be another one without the marks, because the template looks
                at what it rendered (it trims or splits a marked block, say).
        """
        render = functools.partial(self._render, messages, tools=tools, add_generation_prompt=add_generation_prompt)
        rendered = _split_marks(render(marked=True))
        if self.marks_generation(tools=bool(tools)):
            plain = _MARK.sub("", render(marked=False))
            if plain != rendered.text:
                raise ValueError(
                    "the chat template changes what its {% generation %} blocks hold, so that they can't be followed: "
                    f"{first_difference(plain, rendered.text)}; put the blocks around what is finally written"
                )
        return rendered

    def _source(self, tools: bool) -> str:
        return self.tool_source if tools and self.tool_source is not None else self.source

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        marked: bool,
    ) -> str:
        template = _compiled(self._source(bool(tools)), marked)
        names = {
            **self.variables,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "raise_exception": _raise_exception,
            "strftime_now": self.date.strftime,
        }
        try:
            return template.render(names)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
        except Exception as error:  # someone else's program: it may raise anything
            raise ValueError(f"the chat template fails on the conversation: {type(error).__name__}: {error}") from error


def first_difference(wanted: str, got: str) -> str:
    """Returns where two different texts part, in words.

    >>> first_difference("abcd", "abx")
    "at character 2 'cd' became 'x'"
    """
    both = min(len(wanted), len(got))
    start = next((i for i in range(both) if wanted[i] != got[i]), both)
    return f"at character {start} {wanted[start : start + 30]!r} became {got[start : start + 30]!r}"


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}`, in a scope of its own; what stands in it is written, without marks."""

    tags = {"generation"}  # noqa: RUF012 - the base class asks for it
    marks = ("", "")

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in self.marks)
        return jinja2.nodes.Scope([begin, *body, end]).set_lineno(line)


class _MarkedGeneration(_Generation):
    marks = (_BEGIN, _END)


@functools.cache
def _environment(marked: bool) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_MarkedGeneration if marked else _Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    return environment


@functools.lru_cache(maxsize=32)
def _compiled(source: str, marked: bool) -> jinja2.Template:
    # Cached here and not in ChatTemplate, which travels to other processes, where compiled templates can't go.
    try:
        return _environment(marked).from_string(source)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ValueError(f"the chat template is not valid Jinja, line {line}: {error}; repair the template") from error


@functools.lru_cache(maxsize=32)
def _marks_generation(source: str) -> bool:
    tokens = [(kind, value) for _, kind, value in _environment(False).lex(source) if kind != "whitespace"]
    return any(
        kind == "block_begin" and following == ("name", "generation")
        for (kind, _), following in itertools.pairwise(tokens)
    )


def _split_marks(marked: str) -> Rendered:
    pieces = _MARK.split(marked)
    if len(pieces) == 1:
        return Rendered(marked)
    position = 0
    begun: list[int] = []
    generated: list[Span] = []
    stood: dict[str, list[int]] = {LITERAL: [], CALL: []}
    for piece in pieces:
        if piece == _BEGIN:
            begun.append(position)
        elif piece == _END and begun:
            start = begun.pop()
            # Of nested blocks the outer one holds the inner one.
            if position > start and not begun:
                generated.append((start, position))
        elif piece in stood:
            stood[piece].append(position)
        elif piece != _END:
            position += len(piece)
    return Rendered(_MARK.sub("", marked), tuple(generated), tuple(stood[LITERAL]), tuple(stood[CALL]))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
