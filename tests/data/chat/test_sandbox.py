"""Templates that loop for ever, fill the memory or compute without end: each is stopped, in any thread."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import resource
import signal
import threading
import time
from decimal import Decimal

import numpy
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.support import make_tokenizer
from trainer.data.chat.sandbox import BrokenTemplate, Limits, RanAway, Sandbox, TemplateRefuses, sandbox

DOUBLING = "{{% set ns = namespace(x={first}) %}}{{% for i in range(60) %}}{{% set ns.x = {again} %}}{{% endfor %}}"
LONG = "{% set x = 'a' * 100000 %}"
HELD = "{% set ns = namespace(big='x' * 1000000) %}"

HOSTILE = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a long text many times": "{% for i in range(99999) %}" + "x" * 5000 + "{% endfor %}",
    "text times": "{{ 'a' * 10**10 }}",
    "times text": "{{ 10**10 * 'a' }}",
    "list times": "{{ ([1] * 10**9) | length }}",
    "power": "{{ 9 ** 9 ** 9 % 10 ** 100000 }}",
    "products": DOUBLING.format(first="10", again="ns.x * ns.x"),
    "sums of texts": DOUBLING.format(first="'ab'", again="ns.x + ns.x"),
    "joined texts": DOUBLING.format(first="'ab'", again="ns.x ~ ns.x"),
    "block texts": DOUBLING.replace("{{% set ns.x = {again} %}}", "{again}").format(
        first="'ab'", again="{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "lists of lists": DOUBLING.format(first="['ab']", again="[ns.x, ns.x]") + "{{ ns.x }}",
    "tuples of tuples": DOUBLING.format(first="('ab',)", again="(ns.x, ns.x)") + "{{ ns.x }}",
    "dicts of dicts": DOUBLING.format(first="{}", again="{'a': ns.x, 'b': ns.x}") + "{{ ns.x }}",
    "dict() of dict()": DOUBLING.format(first="{}", again="dict(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "join filter": LONG + "{{ range(99999) | join(x) }}",
    "join method": LONG + "{{ x.join(range(99999) | map('string') | list) }}",
    "replace filter": LONG + "{{ x | replace('a', x) }}",
    "replace method": LONG + "{{ x.replace('a', x) }}",
    "translate": LONG + "{{ x.translate({97: x}) }}",
    "center": "{{ 'a' | center(10 ** 9) }}",
    "center by name": "{{ ['a'] | map('center', 1000000000) | list }}",
    "constant center": "{{ 'a' | center(1000000000) }}",
    "many centers": "{{ range(99999) | map('center', 9999) | list }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "round": "{{ 1.5 | round(100000000, 'ceil') }}",
    "indent of tojson": "{{ [1] | tojson(indent=1000000000) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent with a value": "{{ '%*d' % (1000000000, 1) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "str.format": "{{ '{:>1000000000}'.format('a') }}",
    "str.format with a value": "{{ '{:>{}}'.format('a', 1000000000) }}",
    "str.format, one value often": LONG + "{{ ('{0}' * 100000).format(x) }}",
    "percent, one value often": LONG + "{{ ('%(x)s' * 100000) % {'x': x} }}",
    "sum of lists": "{{ (('a,' * 500000).split(',') | map('list')) | sum(start=[]) }}",
    "percent with zeros": "{{ '%000000001000000000d' % 1 }}",
    "percent, measured": "{{ ('%000000001000000000d' % 1) | length }}",
    "percent of a test": "{{ '%1000000000d' is odd }}{{ ['%1000000000d'] | select('divisibleby', 1) | list }}",
    "str.format with zeros": "{{ '{:000000001000000000d}'.format(1) }}",
    "str.format with other digits": "{{ '{:١٠٠٠٠٠٠٠٠٠}'.format('a') }}",
    "str.format by another way": "{{ ('{:1000000000}' | map(attribute='format') | first)(1) }}",
    "replace by name": "{{ (('a' * 100000) | replace(new='b' * 10000, old='a')) | length }}",
    "replace in map by name": LONG + "{{ [x] | map('replace', new='b' * 10000, old='a') | list | length }}",
    "replace by far": "{{ ('a' * 100000) | replace(new='b' * 10000000, old='a') }}",
    "join of an attribute": HELD + "{{ ([ns] * 1000) | join(attribute='big') | length }}",
    "join of an attribute by map": HELD + "{{ ([ns] * 1000) | map(attribute='big') | join | length }}",
    "sum of an attribute": "{% set ns = namespace(l=[0] * 100000) %}{{ ([ns] * 1000) | sum(attribute='l', start=[]) }}",
    "lists in a namespace": "{% set ns = namespace(l=[0] * 100000) %}{{ [ns] * 1000 }}",
    "indent by much": "{{ ('a\n' * 100000) | indent(10000) | length }}",
    "indent by a text": "{{ ('a\n' * 1000) | indent('x' * 1000000) | length }}",
    "indent of many lines": "{{ ('\n' * 2000000) | indent(16, blank=true) | length }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(10000) }}",
    "wordwrap": "{{ ('a ' * 1000) | wordwrap(1, true, 'x' * 1000000) }}",
    "urlize": "{{ ('http://a.bc ' * 1000) | urlize(rel='x' * 1000000) }}",
    "groupby": HELD + "{{ ([ns] * 3000) | groupby('big') }}",
    "long numbers": "{{ ([10 ** 4000] * 60000) | join | length }}",
    "long numbers of a float": "{% set x = 1e308 | int %}{{ ([x * x] * 60000) | join }}",
    "long numbers of a row": "{{ ([long] * 60000) | join | length }}",
    "long division": "{{ (10 ** 4000) // 3 }}",
    "sums of numbers": DOUBLING.format(first="1", again="ns.x + ns.x").replace("60", "999"),
    "differences": DOUBLING.format(first="1", again="ns.x - (0 - ns.x)").replace("60", "999"),
    "separators": "{{ range(9999) | list | tojson(separators=('x' * 1000000, ':')) }}",
    "tojson's indent as text": "{{ range(9999) | list | tojson(indent='x' * 1000000) }}",
    "deep indents": "{% set ns = namespace(x=range(90000) | list) %}{% for i in range(400) %}"
    "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson(indent=16) | length }}",
    "slices": "{% set x = 'a' * 8000000 %}{% set ns = namespace() %}"
    + "".join(f"{{% set ns.x{i} = x[{i + 1}:] %}}" for i in range(99)),
    "characters": "{{ ('日' * 8000000) | list | length }}",
    "words": "{{ ('ab ' * 3000000).split() | length }}",
    "words at a comma": "{{ ('ab,' * 3000000).split(',') | length }}",
    "words of a title": "{{ ('a ' * 4000000) | title | length }}",
    "joined characters": "{{ '日'.join('日' * 8000000) | length }}",
    "search from the right": "{% set x = 'a' * 1000000 %}{{ x.rfind(x[700000:] + 'b' + x[700000:]) }}",
    "strip of many": "{{ ('a' * 1000000).strip('b' * 1000000 ~ 'a') }}",
    "trim of many": "{{ ('a' * 1000000) | trim('b' * 1000000 ~ 'a') }}",
    "marked text": "{{ ('<' * 5000000) | safe ~ '' }}{{ ('' | safe) + '<' * 5000000 }}",
    "autoescape": "{% autoescape true %}{{ '<' * 5000000 }}{% endautoescape %}",
    "random": "{{ [1, 2] | random }}",
    "an address": "{{ [1] | map('string') }}",
    "an address in a list": "{{ [[1] | map('string')] }}",
    "an address in a text": "{{ 'a' ~ joiner(',') }}",
    "an address as a text": "{{ range | string }}",
    "an address in a format": "{{ '%s' % ([1] | map('string')) }}",
    "an address of a method": "{{ 'a'.upper }}",
    "comments": "{{ ('<!-- -->' * 1000000) | striptags }}",
    "punycode": "{{ ('ü' * 1000000).encode('punycode') }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "calls": "{% macro f(n) %}{{ caller(n) }}{% endmacro %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% call(n) f(1) %}x{% endcall %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for i in range(10) recursive %}{{ loop(range(10)) if loop.depth < 40 }}{% endfor %}",
    "filtered loop": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "selected": "{% for i in range(99999) %}{{ range(99999) | select('odd') | first }}"
    "{{ range(99999) | reject('integer') | list }}{% endfor %}",
    "search": "{% set x = 'a' * 10000000 %}{% for i in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "search in a filter": "{% set x = 'a' * 10000000 %}{% for i in range(99999) if 'b' in x %}{% endfor %}",
    "comparison": "{% set x = 'a' * 4000000 %}{% set y = x[1:] + 'a' %}"
    "{% for i in range(99999) %}{% if x == y %}{% endif %}{% endfor %}",
}
REFUSED = ("str.format by another way", "punycode", "random")
"""By name, as they are met: what Jinja's sandbox or this one does not have."""

LIMITS = Limits(cpu_seconds=0.3)


def outcome(box: Sandbox, name: str) -> str:
    try:
        return box.render(HOSTILE[name], {"x": "y", "long": 10**4000})
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def quick() -> Sandbox:
    return Sandbox(LIMITS)


@pytest.fixture(scope="module")
def usual() -> Sandbox:
    return Sandbox()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(quick, name):
    said = outcome(quick, name)
    assert said.startswith(("TemplateRefuses", "BrokenTemplate") if name in REFUSED else "RanAway"), said[:200]
    assert quick.render("{{ 1 }}", {}) == "1"


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped_by_the_limits_that_runs_have(usual, name):
    """Each by itself: one that works without end takes its whole time, seconds of a CPU."""
    said = outcome(usual, name)
    assert said.startswith(("TemplateRefuses", "BrokenTemplate") if name in REFUSED else "RanAway"), said[:200]
    assert usual.render("{{ 1 }}", {}) == "1"
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2**20, "kilobytes of the largest"


@pytest.mark.parametrize(
    "value", [threading.Lock(), pathlib.Path("x"), numpy.int64(3)], ids=lambda value: type(value).__name__
)
def test_no_object_with_methods_of_its_own_is_let_in(usual, value):
    with pytest.raises(TemplateRefuses, match="cannot be given|templates cannot use"):
        usual.render("{{ x }}", {"x": value})


def test_no_file_can_be_opened_even_by_python_itself(usual):
    """Which has not imported this codec yet."""
    with pytest.raises(TemplateRefuses, match="Too many open files"):
        usual.render("{{ 'a'.encode('idna') }}", {})


def test_the_environment_with_its_secrets_stays_outside(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    box = Sandbox()
    box.check("x")
    with open(f"/proc/{box._process.pid}/environ", "rb") as file:
        assert b"hf_secret" not in file.read()


def test_dates_and_decimals_of_tables_can_be_written(usual):
    row = {
        "day": datetime.date(2024, 2, 29),
        "price": Decimal("1.50"),
        "raw": b"x",
        "at": datetime.datetime(2024, 1, 2),
    }
    assert usual.render("{{ day.year }} {{ price }} {{ raw }} {{ at.isoformat() }}", row) == (
        "2024 1.50 b'x' 2024-01-02T00:00:00"
    )


def test_a_template_that_is_slow_on_every_row_is_stopped():
    """On average over its renders: one slow row among quick ones is none."""
    box = Sandbox(Limits(cpu_seconds=0.5, mean_cpu_seconds=0.001))
    slow = "{% for i in range(20000) %}{% for j in range(n) %}{% endfor %}{% endfor %}"
    box.render(slow, {"n": 20})
    for _ in range(100):
        box.render(slow.replace("20000", "2"), {"n": 2})
    with pytest.raises(RanAway, match="or 0.001 on average"):
        for _ in range(1000):
            box.render(slow, {"n": 20})


def test_templates_are_stopped_in_any_thread(quick):
    said: list[str] = []

    def render(name: str) -> None:
        said.append(outcome(quick, name))

    threads = [threading.Thread(target=render, args=(name,)) for name in ("search", "text times", "comparison")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(said) == 3 and all(text.startswith("RanAway") for text in said), said


def test_what_a_template_may_do_grows_with_what_it_is_given(usual):
    """A dialogue of 2,000 messages that a template walks in two nested loops is no attack; nor is a row of 20 MB."""
    nested = "{% for m in a %}{% for n in a %}{% endfor %}{% endfor %}{{ a | length }}"
    assert usual.render(nested, {"a": ["some words of a message"] * 2000}) == "2000"
    long = "x" * 20_000_000
    copying = "{% set y = '[' + a + ']' %}{{ y | trim }}{{ y ~ '.' }}"
    assert len(usual.render(copying, {"a": long})) == 2 * len(long) + 5
    assert usual.render("{{ a }}", {"a": "short again"}) == "short again"


def test_what_an_earlier_row_left_behind_stops_no_later_one(usual):
    """The verdict is of the template and the row: a process that has no memory left is begun anew, once."""
    usual.check("x")
    used = usual._process
    resource.prlimit(used.pid, resource.RLIMIT_AS, (1, 1))  # its own call cannot raise it any more
    assert usual.render("{{ a * 1000000 }}", {"a": "x"}) == "x" * 1_000_000
    assert usual._process is not used


def test_a_process_that_is_killed_from_outside_is_begun_anew(usual):
    usual.check("x")
    os.kill(usual._process.pid, signal.SIGKILL)
    assert usual.render("{{ a }}", {"a": "x"}) == "x"


def test_a_fork_has_a_process_of_its_own():
    here = sandbox()
    here.check("x")
    read, write = os.pipe()
    if not (pid := os.fork()):
        there = sandbox()
        os.write(write, json.dumps([there.render("{{ 1 + 1 }}", {}), there._process.pid]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    text, other = json.loads(os.read(read, 1000))
    assert text == "2" and other != here._process.pid and here.render("{{ 3 }}", {}) == "3"


@pytest.mark.parametrize(
    "text, said",
    [
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
        ("{% for i in [1] %}" * 60 + "{% endfor %}" * 60, "cannot be compiled"),
        ("x" * 2_000_000, "2,000,000 characters long"),
        ("a\n{% for %}", "line 2"),
        ("{{ [1] | random }}", "line 1: No filter named 'random'"),
    ],
)
def test_what_cannot_be_compiled(usual, text, said):
    with pytest.raises(BrokenTemplate, match=said):
        usual.check(text)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ range.__call__.__self__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ strftime_now.__globals__ }}",
        "{{ joiner.__init__.__globals__['__builtins__'].open('/etc/passwd').read() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ('{0.__class__.__mro__}' | map(attribute='format') | first)('') }}",
        "{{ namespace(__init__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ dict.mro() }}",
        "{{ ([] | map(attribute='append') | list)(1) }}",
        "{{ lipsum() }}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{{ messages.append(1) }}",
    ],
)
def test_python_stays_out_of_reach(usual, text):
    with pytest.raises(TemplateRefuses):
        usual.render(text, {"messages": [1]}, strict=True)


FEATURES = """{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}
|{% for i in l if i > 1 %}{{ loop.index }}/{{ loop.length }}
{{ loop.last }}{{ loop.revindex }}{% else %}none{% endfor %}
|{% for i in l | select('gt', 1) %}{{ loop.length }}{{ loop.last }}
{{ loop.nextitem }}{% endfor %}
|{% for x in t recursive %}<{{ x.n }}{{ loop(x.c) if x.c }}>{% endfor %}
|{{ [l, d, (1, s)] }}
{{ {'a': l} }}|{{ s ~ 1 ~ none ~ l }}|{{ '%s-%d%%%.2f' % (s, 3, 1.5) }}|{{ '%s' | format(l) }}|
{{ s * 3 }}{{ 2 ** 5 }}{{ 7 % 4 }}
{{ s + 'x' }}{{ [1] + [2] }}|{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}
{% call m(3) %}in{% endcall %}|{% set ns = namespace(n=0) %}{% for i in l %}{% set ns.n = ns.n + i %}{% endfor %}
{{ ns.n }}
{% set b %}block {{ s }}{% endset %}{{ b | upper }}|{{ l | join(', ') }}{{ l | sum }}{{ l | map('string') | list }}
{{ s | replace('b', 'c') }}{{ s.replace('b', 'd', 1) }}{{ 1.256 | round(2) }}{{ l | unique | reverse | list }}
{{ [3, 1] | sort }}
{{ s | indent(2) }}{{ 'b' in s }}{{ 3 not in l }}{{ missing }}{{ missing is defined }}{{ s.upper().split('B') }}
{{ d | dictsort }}{{ l | first }}
{{ l | last }}{{ l | min }}{{ l | map('string') | join }}{{ d.items() }}{{ s | int(7) }}{{ s | safe }}
{{ l[::-1] }}{{ range(3) | list }}{{ -l[0] }}
{{ 1 if s else 2 }}
{% filter upper %}a{{ s }}{% endfilter %}{{ joiner(',')() }}{{ l | tojson }}{{ s | tojson(indent=2) }}
{{ s is string }}"""


def test_what_templates_do_comes_out_as_in_plain_jinja(usual):
    """What this environment adds and takes away against jinja2's own sandbox."""
    values = {"s": "abc", "l": [1, 2, 3], "d": {"y": 1, "x": [2]}, "t": [{"n": 1, "c": [{"n": 2}]}, {"n": 3}]}
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert usual.render(FEATURES, values) == plain.from_string(FEATURES).render(values)


def test_what_an_error_in_a_template_says_is_transformers_own(usual):
    tokenizer = make_tokenizer("{{ raise_exception('only 日本 here') }}")
    with pytest.raises(Exception, match="only 日本 here") as expected:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    with pytest.raises(TemplateRefuses) as refused:
        usual.render(tokenizer.chat_template, {})
    assert str(refused.value) == str(expected.value)


def test_the_clock_is_that_of_the_cpu():
    """A machine that is busy with other work does not stop a template: waiting is no CPU time."""
    box = Sandbox(Limits(cpu_seconds=0.3))
    box.check("x")
    os.kill(box._process.pid, signal.SIGSTOP)
    threading.Timer(0.6, os.kill, (box._process.pid, signal.SIGCONT)).start()
    begun = time.monotonic()
    assert box.render("{% for i in range(200) %}{% endfor %}done", {}) == "done"
    assert time.monotonic() - begun > 0.5, "it was stopped meanwhile"
