"""The embedded corpus: the interpreter's own standard library as a completion task. It needs no download.

The prompt is the signature and docstring of a function, the response is the body that its authors wrote:

    # shapes.Circle                              prompt: where the function lives,
    def area(self):                              its decorators and signature
        '''Returns the area.'''                  and its docstring
        return math.pi * self.radius**2          response

Prompt and response joined are the function's source, moved to column 0. The lengths are those that people wrote, heavy
tail included: nothing here caps them.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import os
import pathlib
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator

from train.corpus import Pair

_TESTS = frozenset({"test", "tests", "idle_test"})

# Linux distributions leave these out, have them in packages of their own or add them; Python 3.12 and 3.13 dropped two.
# Without them the installations of one version give one corpus, a distribution's patches aside.
_NOT_EVERYWHERE = frozenset(
    {"distutils", "ensurepip", "idlelib", "lib2to3", "macholib", "sitecustomize", "tkinter", "turtledemo"}
)

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """The pairs of a source tree, and what was left out of them.

    Attributes:
        pairs: Sorted by module path, then by line; no pair occurs twice.
        num_files: Files that were read.
        unreadable_files: Those among them that are not valid Python source, relative to the root.
        num_undocumented: Functions without docstring, whose task nobody could tell.
        num_bodiless: Functions that end on the line of their docstring, or go on there.
        num_duplicates: Pairs left out because an earlier module has the same prompt and response.
    """

    pairs: tuple[Pair, ...]
    num_files: int
    unreadable_files: tuple[str, ...]
    num_undocumented: int
    num_bodiless: int
    num_duplicates: int

    def __str__(self) -> str:
        return (
            f"{len(self.pairs):,} pairs from {self.num_files} files ({len(self.unreadable_files)} unreadable); "
            f"left out: {self.num_undocumented:,} functions without docstring, {self.num_bodiless} without body, "
            f"{self.num_duplicates} duplicates"
        )


def library_pairs(root: str | os.PathLike[str] | None = None) -> Library:
    '''Returns the instruction pairs of the functions and methods below `root`, in one pass over its sources.

    Functions nested in another function belong to that one's body. The result depends on the files alone. About
    2 seconds for the whole standard library.

    Args:
        root: A directory of Python packages; default: this interpreter's standard library.

    Raises:
        ValueError: If there is no documented function below `root`.

    >>> import json
    >>> library = library_pairs(pathlib.Path(json.__file__).parent)
    >>> pair = next(pair for pair in library.pairs if "def decode(" in pair.prompt)
    >>> print(pair.prompt)
    # decoder.JSONDecoder
    def decode(self, s, _w=WHITESPACE.match):
        """Return the Python representation of ...
        """
    >>> print(pair.response)
        obj, end = self.raw_decode(s, idx=_w(s, 0).end())
        ...
        return obj
    '''
    directory = pathlib.Path(sysconfig.get_path("stdlib") if root is None else root)
    pairs: dict[tuple[str, str], Pair] = {}
    unreadable: list[str] = []
    num_files = num_undocumented = num_bodiless = num_duplicates = 0
    for path in _source_files(directory):
        num_files += 1
        try:
            lines, tree = _parse(path)
        except (OSError, SyntaxError, ValueError, RecursionError):
            unreadable.append(path.relative_to(directory).as_posix())
            continue
        module = _module_name(path.relative_to(directory))
        for function, classes in _functions(tree, ()):
            if not ast.get_docstring(function):
                num_undocumented += 1
            elif not _has_body(function):
                num_bodiless += 1
            else:
                pair = _pair(function, lines, module, classes)
                # The first line names the module: a copy is a copy under whatever name it stands.
                num_duplicates += pairs.setdefault((pair.prompt.split("\n", 1)[1], pair.response), pair) is not pair
    if not pairs:
        raise ValueError(
            f"no documented Python function in {num_files} source files below {str(directory)!r}: this interpreter "
            "seems to come without its library's sources; use another one, or give a JSONL file of pairs"
        )
    return Library(
        pairs=tuple(pairs.values()),
        num_files=num_files,
        unreadable_files=tuple(unreadable),
        num_undocumented=num_undocumented,
        num_bodiless=num_bodiless,
        num_duplicates=num_duplicates,
    )


def _source_files(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the library's source files, sorted by path; what is not a package (site-packages) is not entered."""
    skipped = _TESTS | _NOT_EVERYWHERE
    found = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name.isidentifier() and name not in skipped]
        found += [pathlib.Path(directory, name) for name in names if name.endswith(".py")]
    yield from sorted(path for path in found if path.stem not in skipped)


def _parse(path: pathlib.Path) -> tuple[list[str], ast.Module]:
    with tokenize.open(path) as file:  # heeds the encoding that the source declares
        text = file.read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape in someone else's source
        tree = ast.parse(text)
    # Not splitlines(): it also splits at form feeds, which the library's sources have, and which ast does not count.
    return text.split("\n"), tree


def _module_name(relative: pathlib.Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _functions(node: ast.AST, classes: tuple[str, ...]) -> Iterator[tuple[_Function, tuple[str, ...]]]:
    """Yields every function that is not inside another one, with the classes around it, in source order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield child, classes
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, (*classes, child.name))
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _functions(child, classes)


def _has_body(function: _Function) -> bool:
    docstring, *rest = function.body
    # A statement on the docstring's own line can't be told apart from it by lines.
    return bool(rest) and rest[0].lineno > _end(docstring)


def _pair(function: _Function, lines: list[str], module: str, classes: tuple[str, ...]) -> Pair:
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    docstring_end = _end(function.body[0])
    indent = function.col_offset
    kept = _string_interiors(function.body[1:], lines)
    moved = [
        line if number in kept else line[:indent].lstrip() + line[indent:]
        for number, line in enumerate(lines[first - 1 : _end(function)], start=first)
    ]
    header, body = moved[: docstring_end - first + 1], moved[docstring_end - first + 1 :]
    body = list(itertools.dropwhile(lambda line: not line.strip(), body))
    place = ".".join((module, *classes))
    return Pair("\n".join((f"# {place}", *header, "")), "\n".join(body), module)


def _string_interiors(statements: list[ast.stmt], lines: list[str]) -> frozenset[int]:
    """Returns the numbers of the lines that begin inside a string, whose indentation is part of its value."""
    first, last = statements[0].lineno, _end(statements[-1])
    if not any(_may_span_lines(line) for line in lines[first - 1 : last]):
        return frozenset()  # nearly always: saves the walk
    return frozenset(
        number
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        # Without one of the two it is a row of adjacent literals, whose indentation means nothing.
        if any(_may_span_lines(line) for line in lines[node.lineno - 1 : _end(node)])
        for number in range(node.lineno + 1, _end(node) + 1)
    )


def _may_span_lines(line: str) -> bool:
    return '"""' in line or "'''" in line or line.endswith("\\")


def _end(node: ast.stmt | ast.expr) -> int:
    assert node.end_lineno is not None  # only hand-made trees lack it
    return node.end_lineno
