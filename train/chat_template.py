"""Chat templates: a conversation becomes text the way the model's own tokenizer says.

A template is a program that came with a model. It runs in Jinja's sandbox: it can read what it is given and write
text, and reaches neither Python's objects nor files. Its loops and calls are counted, and what it multiplies, pads or
joins is limited, so that it ends. It sees what Hugging Face's renderer offers it: `messages`, `tools`, `documents`,
`add_generation_prompt`, the special tokens' texts, `raise_exception`, `strftime_now`, the filter `tojson` (plain JSON,
nothing escaped for HTML), `break` and `continue`, and the block `{% generation %}` that marks what the model writes.

Marks travel through the template as lone surrogates, characters that no valid text holds, and are taken out of the
result again. So a mark is found where it came out, also from inside macros and captured blocks.
"""

from __future__ import annotations

import contextvars
import dataclasses
import datetime
import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

Span = tuple[int, int]
"""First character, and one after the last."""

LITERAL, CALL = "\ud802", "\ud803"
"""Put into a message's text, they come back in `Rendered.literals` and `Rendered.calls`."""

_BEGIN, _END = "\ud800", "\ud801"
_MARK = re.compile(f"([{_BEGIN}{_END}{LITERAL}{CALL}])")

MAX_TURNS = 300_000
"""Turns of loops and calls that one rendering may take; a long conversation takes some thousand."""

MAX_CHARACTERS = 2**24
"""Of a text that a template makes by multiplying, padding or joining."""

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
        token = _turns_left.set([MAX_TURNS])
        try:
            return template.render(names)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
        except Exception as error:  # someone else's program: it may raise anything
            raise ValueError(f"the chat template fails on the conversation: {type(error).__name__}: {error}") from error
        finally:
            _turns_left.reset(token)


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


_turns_left: contextvars.ContextVar[list[int]] = contextvars.ContextVar("turns left")


def _take_turn() -> None:
    left = _turns_left.get()
    left[0] -= 1
    if left[0] < 0:
        raise jinja2.TemplateError(f"more than {MAX_TURNS:,} turns of loops and calls: repair the template")


def _check_size(size: float) -> None:
    if size > MAX_CHARACTERS:
        raise jinja2.TemplateError(f"a text of more than {MAX_CHARACTERS:,} characters: repair the template")


class _Counted:
    """What a loop runs over; each turn counts."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            _take_turn()
            yield value

    def __len__(self) -> int:
        return len(self._values)


def _joined(values: list[Any]) -> str:
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Counts what a template does: the sandbox itself bounds only `range`."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def _generate(self, source: jinja2.nodes.Template, *given: Any, **keywords: Any) -> str:
        for loop in source.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, "counted", [], [], None, None).set_lineno(loop.lineno)
        for concat in source.find_all(jinja2.nodes.Concat):
            parts = jinja2.nodes.List(concat.nodes, lineno=concat.lineno)
            concat.nodes = [jinja2.nodes.Filter(parts, "joined", [], [], None, None, lineno=concat.lineno)]
        return super()._generate(source, *given, **keywords)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.TemplateError("powers are not computed here: repair the template")
        if operator == "%" and isinstance(left, str):
            raise jinja2.TemplateError("text % values is not computed here: use ~ or format")
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(times, int):
                    _check_size(len(text) * times)
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *given: Any, **keywords: Any) -> Any:  # noqa: N805 - as in Jinja
        _take_turn()
        for value in (*given, *keywords.values()):
            if isinstance(value, int):  # a width, a count
                _check_size(value)
        return super().call(__context, __obj, *given, **keywords)


@functools.cache
def _environment(marked: bool) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_MarkedGeneration if marked else _Generation, jinja2.ext.loopcontrols],
    )
    environment.filters |= {"tojson": _tojson, "counted": _Counted, "joined": _joined}
    for name in ("center", "indent", "batch", "slice", "format", "wordwrap"):
        environment.filters[name] = _limited(environment.filters[name])
    del environment.globals["lipsum"]
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


def _limited(function: Any) -> Any:
    """Returns a filter that takes no width or count beyond the limit."""

    @functools.wraps(function)  # keeps also what Jinja noted on it
    def limited(*given: Any, **keywords: Any) -> Any:
        for value in (*given, *keywords.values()):
            if isinstance(value, int):
                _check_size(value)
        return function(*given, **keywords)

    return limited


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
