"""Templates render as Hugging Face's renderer does, can't reach Python, and their marks are found."""

from __future__ import annotations

import datetime
import json
import pickle
from typing import Any

import jinja2
import pytest

from tests.chat_formats import CHATML_MARKED, CHATML_TOOLS, FORGETFUL, HEADERS
from train import chat_template
from train.chat_template import CALL, LITERAL, ChatTemplate, Rendered

HI = [{"role": "user", "content": "hi"}]


def text(source: str, messages: list[dict[str, Any]] | None = None, **keywords: Any) -> str:
    return ChatTemplate(source=source).text(HI if messages is None else messages, **keywords)


def test_block_lines_leave_no_blanks() -> None:
    assert text("  {% for m in messages %}\n  {{ m.role }}\n  {% endfor %}\nend") == "  user\nend"


def test_loops_can_be_left_and_cut_short() -> None:
    assert text("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}"
                "{{ i }}{% endfor %}") == "02"  # fmt: skip


def test_json_is_plain() -> None:
    value = {"b": "<é & 'ü'>", "a": [1, None, True]}
    messages = [{"role": "user", "content": "", "value": value}]
    assert text("{{ messages[0].value | tojson }}", messages) == json.dumps(value, ensure_ascii=False)
    assert text("{{ messages[0].value | tojson(indent=2) }}", messages) == json.dumps(
        value, ensure_ascii=False, indent=2
    )


def test_names_that_templates_look_for() -> None:
    seen = (
        "{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }} {{ nothing is defined }}{{ nothing }}"
    )
    assert text(seen) == "True True False False"
    assert (
        text("{{ tools | length }} {{ add_generation_prompt }}", tools=[{}, {}], add_generation_prompt=True) == "2 True"
    )


def test_options_and_special_tokens_are_names_too() -> None:
    template = ChatTemplate(
        source="{{ bos_token }}{{ enable_thinking }}", variables={"bos_token": "<s>", "enable_thinking": 0}
    )
    assert template.text(HI) == "<s>0"


def test_another_template_for_conversations_with_tools() -> None:
    template = ChatTemplate(source="plain", tool_source="with {{ tools | length }}")
    assert (template.text(HI), template.text(HI, tools=[{}])) == ("plain", "with 1")
    assert template.shows_tools()
    assert not ChatTemplate(source="plain").shows_tools()


def test_the_date_is_fixed_unless_given() -> None:
    source = "{{ strftime_now('%d %b %Y') }}"
    assert ChatTemplate(source=source).text(HI) == "01 Jan 2026"
    assert ChatTemplate(source=source, date=datetime.datetime(2030, 7, 4)).text(HI) == "04 Jul 2030"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the conversation: roles must alternate"),
        ("{{ messages[9].role }}", "refuses the conversation: .*no element 9"),
        ("{{ messages[0].content + 1 }}", "fails on the conversation: TypeError"),
        ("{{ 1 // 0 }}", "fails on the conversation: ZeroDivisionError"),
        ("{{ messages | tojson(separators=1) }}", "fails on the conversation: TypeError"),
    ],
)
def test_a_failing_template_is_a_value_error(source: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        text(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'assistant'}) }}",
        "{{ strftime_now.__self__.today() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_a_template_stays_in_its_sandbox(source: str) -> None:
    with pytest.raises(ValueError, match=r"unsafe|repair the template"):
        text(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * 'x' }}",
        "{{ [0] * 10000000000 }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ 'x\\ny' | indent(10000000000) }}",
        "{{ [1] | batch(10000000000, 0) | list }}",
        "{{ lipsum(n=1000000) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_comes_to_an_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_TURNS", 3000)
    with pytest.raises(ValueError, match=r"repair the template|not computed here|RecursionError|'lipsum' is undefined"):
        text(source)


def test_what_counts_and_limits_changes_no_text() -> None:
    source = (
        "{% for m in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}"
        "{% for m in [1, 2] %}{{ loop.previtem }}{{ loop.revindex }}{{ loop.nextitem }}{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k ~ v ~ none ~ '!' }}{% else %}no{% endfor %}"
        "{% for x in [] %}{% else %}empty{% endfor %}{{ 'ab' * 2 + 'c' }}{{ [1] + [2] }}{{ 7 % 4 }}"
        "{{ 'a\\nb' | indent(2) }}{{ 'x' | center(3) }}{% for x in [1, 2] if x > 1 %}{{ x }}{% endfor %}"
        "{% for x in [1, 2, 3] recursive %}{{ x }}{% if x == 1 %}{{ loop([8, 9]) }}{% endif %}{% endfor %}"
    )
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source).render()
    assert text(source) == plain


def test_formats_show_nothing_of_python() -> None:
    assert text("{{ '{0.__class__}'.format(messages) }}") == ""


def test_files_are_out_of_reach() -> None:
    with pytest.raises(ValueError, match="no loader"):
        text("{% include '/etc/passwd' %}")


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate(source="ok\n{% for %}")
    with pytest.raises(ValueError, match="valid Jinja"):
        ChatTemplate(source="ok", tool_source="{% generation %}")


@pytest.mark.parametrize(
    ("source", "marked"),
    [
        (CHATML_TOOLS, False),
        (HEADERS, False),
        (FORGETFUL, False),
        (CHATML_MARKED, True),
        ("a generation {{ generation }}", False),
        ("{%- generation -%}x{%- endgeneration -%}", True),
    ],
)
def test_marks_are_known_from_the_source(source: str, marked: bool) -> None:
    assert ChatTemplate(source=source).marks_generation() is marked


@pytest.mark.parametrize(
    "source",
    [
        "q:[a b];[][c]",
        "{% macro say() %}[a b];{% endmacro %}q:{{ say() }}[c]",
        "{% set kept %}[a b];{% endset %}q:{{ kept }}[c]",
        "q:[[a] b];{% for i in range(1) %}[c]{% endfor %}",
    ],
)
def test_marked_spans(source: str) -> None:
    template = ChatTemplate(source=source.replace("[", "{% generation %}").replace("]", "{% endgeneration %}"))
    assert template.render(HI) == Rendered("q:a b;c", ((2, 5), (6, 7)))
    assert template.text(HI) == "q:a b;c"


def test_assignments_stay_in_a_marked_block() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert ChatTemplate(source=source).text(HI) == "21"


@pytest.mark.parametrize(
    ("after", "difference"),
    [("trim", "'a' became ' a '"), ("length", "'3' became '5'"), ("last | upper", "' ' became ''")],
)
def test_marks_that_a_template_sees_are_refused(after: str, difference: str) -> None:
    kept = "{% set kept %}{% generation %} a {% endgeneration %}{% endset %}"
    with pytest.raises(ValueError, match=f"can't be followed: at character 0 {difference}"):
        ChatTemplate(source=f"{kept}{{{{ kept | {after} }}}}").render(HI)


def test_marks_put_into_messages_come_back_as_positions() -> None:
    messages = [{"role": "user", "content": f"a{LITERAL}<x> {CALL}b"}]
    rendered = ChatTemplate(source="{{ messages[0] | tojson }}").render(messages)
    plain = json.dumps({"role": "user", "content": "a<x> b"})
    assert rendered == Rendered(plain, literals=(plain.index("<x>"),), calls=(plain.index('b"}'),))


def test_a_template_can_be_sent_to_another_process() -> None:
    template = ChatTemplate(source=CHATML_TOOLS)
    expected = template.text(HI)
    assert pickle.loads(pickle.dumps(template)).text(HI) == expected
