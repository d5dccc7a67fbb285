"""The embedded corpus against the sources' own syntax trees; JSONL files good and bad; the split."""

from __future__ import annotations

import ast
import hashlib
import os
import pathlib
import subprocess
import sys
import sysconfig
import textwrap
from collections import Counter, defaultdict

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from train.corpus import Pair, describe_sizes, load_pairs, split_by_module
from train.library import Library, library_pairs

Function = ast.FunctionDef | ast.AsyncFunctionDef
SAMPLES = pathlib.Path(__file__).parents[2] / "shared" / "data" / "text"


@pytest.fixture(scope="module")
def stdlib() -> Library:
    return library_pairs()


def meaning(function: Function) -> str:
    """A function's syntax tree without positions; of its docstring the words alone, since its indentation may move."""
    docstring = ast.get_docstring(function)
    assert docstring is not None
    return ast.dump(function.returns or ast.Tuple([])) + " ".join(
        [function.name, ast.dump(function.args), *docstring.split(), *map(ast.dump, function.decorator_list)]
        + [ast.dump(statement) for statement in function.body[1:]]
    )


class Collector(ast.NodeVisitor):
    """Meanings of all documented functions that are not inside another one."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def visit_FunctionDef(self, node: Function) -> None:
        if ast.get_docstring(node):
            self.found[meaning(node)] += 1

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815


def digest(library: Library) -> str:
    return hashlib.sha256(repr(library.pairs).encode()).hexdigest()


def test_every_pair_is_a_function_of_its_module(stdlib: Library) -> None:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    by_module = defaultdict(list)
    for pair in stdlib.pairs:
        by_module[pair.module].append(pair)
    for module, pairs in list(by_module.items())[::2]:  # half of them, for time
        path = root / (module.replace(".", "/") + ".py")
        collector = Collector()
        collector.visit(ast.parse((path if path.exists() else path.with_suffix("") / "__init__.py").read_bytes()))
        for pair in pairs:
            (function,) = ast.parse(pair.prompt + pair.response).body
            assert isinstance(function, Function)
            assert collector.found[meaning(function)] > 0, f"{module}: {function.name} is not what its source says"


def test_stdlib_is_a_useful_corpus(stdlib: Library) -> None:
    sizes = [pair.size_bytes for pair in stdlib.pairs]
    assert len(sizes) > 4000
    assert len(set(stdlib.pairs)) == len(sizes)
    mean = sum(sizes) / len(sizes)
    deviation = (sum((size - mean) ** 2 for size in sizes) / len(sizes)) ** 0.5
    assert deviation / mean > 1, "the real lengths have a heavy tail"
    assert not any("test" in pair.module.split(".") for pair in stdlib.pairs)
    # The signature and the docstring are given, not asked for.
    assert not any(pair.response.lstrip().startswith(("def ", "async def ")) for pair in stdlib.pairs[:50])
    split = split_by_module(stdlib.pairs)
    assert 100 < len(split.evaluation) < len(split.train) / 10
    assert str(len(stdlib.unreadable_files)) in str(stdlib)


def test_stdlib_is_the_same_in_another_process(stdlib: Library) -> None:
    program = (
        "import hashlib\nfrom train.library import library_pairs\n"
        "print(hashlib.sha256(repr(library_pairs().pairs).encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == digest(stdlib)


def library_of(tmp_path: pathlib.Path, files: dict[str, str | bytes]) -> Library:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else textwrap.dedent(content).encode())
    return library_pairs(tmp_path)


def test_prompt_is_signature_and_docstring_and_response_the_body(tmp_path: pathlib.Path) -> None:
    source = '''\
        import functools

        class Outer:
            class Inner:
                @functools.cache
                @staticmethod
                async def wait(seconds: float,
                               *, twice=False) -> None:
                    """Waits.

                    For long.
                    """

                    # The reason why.
                    def nested():
                        """Not a pair of its own."""
                        return 1
                    return nested()

        if True:
            def plain():
                "One line."
                return 2  # two
        '''
    library = library_of(tmp_path, {"pack/__init__.py": source})
    assert library.pairs == (
        Pair(
            "# pack.Outer.Inner\n@functools.cache\n@staticmethod\nasync def wait(seconds: float,\n"
            '               *, twice=False) -> None:\n    """Waits.\n\n    For long.\n    """\n',
            "    # The reason why.\n    def nested():\n"
            '        """Not a pair of its own."""\n        return 1\n    return nested()',
            "pack",
        ),
        Pair('# pack\ndef plain():\n    "One line."\n', "    return 2  # two", "pack"),
    )


def test_strings_keep_their_value_when_the_code_around_them_moves(tmp_path: pathlib.Path) -> None:
    source = '''\
        class Text:
            def value():
                """Returns text."""
                name = "x"
                formatted = f"""
                    one {name}
                        two {name}
                    three {name}
                """
                plain = """
        first
                second"""
                escaped = "one \\
                two"
                rows = ("adjacent "
                        "literals")
                return formatted, plain, escaped, rows
        '''
    (pair,) = library_of(tmp_path, {"text.py": source}).pairs
    original: dict[str, type] = {}
    exec(textwrap.dedent(source), original)
    moved: dict[str, object] = {}
    exec(pair.prompt + pair.response, moved)
    value = moved["value"]
    assert callable(value)
    assert value() == original["Text"].value()  # type: ignore[attr-defined]
    assert '\n            "literals")' in pair.response, "a literal on a line of its own moves with the code"
    assert pair.response.startswith('    name = "x"\n    formatted')


def test_form_feeds_and_line_ends_do_not_shift_lines(tmp_path: pathlib.Path) -> None:
    source = b'X = 1\n\x0c\ndef f():\r\n    """A\x0cdoc."""\r\n    return "\xc2\x85"\r\n'
    (pair,) = library_of(tmp_path, {"feed.py": source}).pairs
    assert pair == Pair('# feed\ndef f():\n    """A\x0cdoc."""\n', '    return "\x85"', "feed")


def test_what_is_left_out_is_counted(tmp_path: pathlib.Path) -> None:
    function = 'def f():\n    """Does."""\n    return 1\n'
    library = library_of(
        tmp_path,
        {
            "a.py": function + 'def g():\n    return 1\ndef h():\n    """Nothing else."""\ndef i(): "Doc."; return 1\n',
            "b.py": function,
            "broken.py": "def f(:\n",
            "nul.py": b"x = 1\0\n",
            "not_utf8.py": b"x = '\xe9'\n",
            "latin.py": b'# coding: latin-1\ndef f():\n    """Caf\xe9."""\n    return "\\d"\n',
            "test/test_a.py": function.replace("f", "t"),
            "pack/tests/test_b.py": function.replace("f", "u"),
            "site-packages/other.py": function.replace("f", "v"),
            "sitecustomize.py": function.replace("f", "w"),
            "notes.txt": function,
        },
    )
    assert [pair.module for pair in library.pairs] == ["a", "latin"]
    assert "Café" in library.pairs[1].prompt
    assert library.num_files == 6
    assert library.unreadable_files == ("broken.py", "not_utf8.py", "nul.py")
    assert (library.num_undocumented, library.num_bodiless, library.num_duplicates) == (1, 2, 1)


def test_library_without_sources_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"no documented Python function in 0 source files .*JSONL"):
        library_pairs(tmp_path)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.builds(Pair, st.just("p"), st.sampled_from("abcdef"), st.integers(0, 30).map(str)), max_size=40),
    st.floats(0.05, 0.95),
)
def test_split_does_not_leak(pairs: list[Pair], eval_share: float) -> None:
    try:
        split = split_by_module(pairs, eval_share=eval_share)
    except ValueError:
        reject()  # one side is empty: told of below
    train_modules = {pair.module for pair in split.train}
    assert train_modules.isdisjoint(pair.module for pair in split.evaluation)
    assert {pair.response for pair in split.train}.isdisjoint(pair.response for pair in split.evaluation)
    assert len(split.train) + len(split.evaluation) + split.num_leaked == len(pairs)
    # A module's side depends on no other module.
    assert [pair for pair in pairs if pair.module in train_modules] == list(split.train)


def test_split_holds_out_about_the_share_asked_for() -> None:
    pairs = [Pair("p", str(index), str(index)) for index in range(4000)]
    for eval_share in (0.1, 0.5):
        held_out = len(split_by_module(pairs, eval_share=eval_share).evaluation)
        sigma = (4000 * eval_share * (1 - eval_share)) ** 0.5
        assert abs(held_out - 4000 * eval_share) < 4 * sigma
    small = {pair.module for pair in split_by_module(pairs, eval_share=0.1).evaluation}
    assert small < {pair.module for pair in split_by_module(pairs, eval_share=0.5).evaluation}


def test_a_response_that_is_trained_on_is_not_evaluated() -> None:
    pairs = [Pair("p", str(index), str(index)) for index in range(200)]
    first = split_by_module(pairs).evaluation[0]
    copied = [*pairs, Pair("p", f" {first.response}\n", split_by_module(pairs).train[0].module)]
    split = split_by_module(copied)
    assert first not in split.evaluation
    assert split.num_leaked == 1


@pytest.mark.parametrize("eval_share", [0, 1, -0.5, float("nan")])
def test_bad_share_is_refused(eval_share: float) -> None:
    with pytest.raises(ValueError, match="eval_share must be between 0 and 1"):
        split_by_module([Pair("p", "r", "m")], eval_share=eval_share)


def test_one_module_can_not_be_split() -> None:
    with pytest.raises(ValueError, match="leaves 3 training and 0 evaluation pairs"):
        split_by_module([Pair("p", str(index), "m2") for index in range(3)], eval_share=0.01)


def test_load_pairs_reads_what_json_lines_allow(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [
        b'\xef\xbb\xbf{"q": "one", "a": "two\\n\\u00e9", "id": 7}\r',
        b"  ",
        '{"a": "\u2028 inside", "q": ""}'.encode(),
        b"",
    ]
    path.write_bytes(b"\n".join(lines))
    assert load_pairs(path, prompt_key="q", response_key="a") == (
        Pair("one", "two\né", "data.jsonl:1"),
        Pair("", "\u2028 inside", "data.jsonl:3"),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x", "response": ', "not valid JSON"),
        (b"\xff\xfe{}", "not UTF-8 at byte 0"),
        (b"[" * 100_000, "JSON that nests too deep"),
        (b'["prompt", "response"]', "want a JSON object, got a list"),
        (b'{"prompt": "x", "answer": "y"}', r"no key 'response' among \['answer', 'prompt'\]"),
        (b'{"messages": []}', r"no key 'prompt' among \['messages'\]"),
        (b'{"prompt": 3, "response": "y"}', "'prompt' must be a string, got a int: 3"),
        (b'{"prompt": "x", "response": null}', "'response' must be a string, got a NoneType: None"),
        (b'{"prompt": "x", "response": " \\n"}', "'response' is empty"),
        (b'{"prompt": "x\\ud800", "response": "y"}', "'prompt' has half of a surrogate pair at character 1"),
    ],
)
def test_bad_line_is_named(tmp_path: pathlib.Path, line: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "fine", "response": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"data\.jsonl, line 3: .*{message}"):
        load_pairs(path)


def test_missing_and_empty_files_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"can't read .*nowhere\.jsonl'"):
        load_pairs(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl' holds no row"):
        load_pairs(tmp_path / "empty.jsonl")


def test_real_file_loads() -> None:
    path = SAMPLES / "gsm8k.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    pairs = load_pairs(path)
    assert len(pairs) == len(path.read_text(encoding="utf-8").rstrip("\n").split("\n"))
    assert all("####" in pair.response for pair in pairs)


def test_sizes_of_equal_records_have_no_variation() -> None:
    assert describe_sizes([5, 5]) == "2 records, 10 in all, mean 5, CV 0.00, p10 5, p50 5, p90 5, p99 5, longest 5"
