"""Templates that loop for ever, fill the memory or compute without end: each is stopped, in any thread."""

from __future__ import annotations

import resource
import threading
import time

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainer.data import meter
from trainer.data.sandbox import BoundedEnvironment, RanAway

DOUBLING = "{{% set ns = namespace(x={first}) %}}{{% for i in range(60) %}}{{% set ns.x = {again} %}}{{% endfor %}}"
LONG = "{% set x = 'a' * 100000 %}"

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
    "comments": "{{ ('<!-- -->' * 1000000) | striptags }}",
    "punycode": "{{ ('ü' * 1000000).encode('punycode') }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "calls": "{% macro f(n) %}{{ caller(n) }}{% endmacro %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% call(n) f(1) %}x{% endcall %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for i in range(10) recursive %}{{ loop(range(10)) if loop.depth < 40 }}{% endfor %}",
    "filtered loop": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "selected": "{% for i in range(99999) %}{{ range(99999) | select('odd') | first }}"
    "{{ range(99999) | reject('integer') | list }}{% endfor %}",
}
SLOW_STEPS = {
    "search": "{% set x = 'a' * 10000000 %}{% for i in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "search in a filter": "{% set x = 'a' * 10000000 %}{% for i in range(99999) if 'b' in x %}{% endfor %}",
    "comparison": "{% set x = 'a' * 8000000 %}{% set y = x[1:] + 'a' %}"
    "{% for i in range(99999) %}{% if x == y %}{% endif %}{% endfor %}",
}


@pytest.fixture(scope="module")
def environment() -> BoundedEnvironment:
    return BoundedEnvironment({})


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped_in_little_memory(environment, name, monkeypatch):
    """With a tenth of the steps, so that the tests are quick; what is made at once is as large as ever."""
    monkeypatch.setattr(meter, "STEPS", 100_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RanAway):
        environment.render(environment.compiled(HOSTILE[name], "it"), {"x": "y"})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10  # KiB


@pytest.mark.parametrize("name", SLOW_STEPS)
def test_steps_that_take_long_are_stopped_by_the_clock_in_any_thread(environment, name, monkeypatch):
    monkeypatch.setattr(meter, "CPU_SECONDS", 0.2)
    said: list[str] = []

    def render():
        try:
            environment.render(environment.compiled(SLOW_STEPS[name], "it"), {})
        except RanAway as error:
            said.append(str(error))

    threads = [threading.Thread(target=render) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert said == ["it worked for more than 0.2 seconds of CPU on one row"] * 2


def test_what_a_template_may_do_grows_with_what_it_is_given(environment):
    """A dialogue of 2,000 messages that a template walks in two nested loops is no attack; nor is a row of 20 MB."""
    nested = environment.compiled("{% for m in a %}{% for n in a %}{% endfor %}{% endfor %}{{ a | length }}", "it")
    assert environment.render(nested, {"a": ["some words of a message"] * 2000}) == "2000"
    with pytest.raises(RanAway):
        environment.render(nested, {"a": range(2000)})
    long = "x" * 20_000_000
    copying = environment.compiled("{% set y = '[' + a + ']' %}{{ y | trim }}{{ y ~ '.' }}", "it")
    assert len(environment.render(copying, {"a": long})) == 2 * len(long) + 5


def test_a_stopped_render_leaves_nothing_to_the_next(environment):
    endless = environment.compiled(HOSTILE["loops in loops"], "it")
    with pytest.raises(RanAway):
        environment.render(endless, {})
    short = environment.compiled("{% for i in range(9) %}{{ i }}{% endfor %}", "it")
    assert environment.render(short, {}) == "012345678"


@pytest.mark.parametrize(
    "text, said",
    [
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
        ("{% for i in [1] %}" * 60 + "{% endfor %}" * 60, "cannot be compiled"),
        ("x" * 2_000_000, "2,000,000 characters long"),
        ("a\n{% for %}", "it, line 2"),
    ],
)
def test_what_cannot_be_compiled(environment, text, said):
    with pytest.raises(ValueError, match=said):
        environment.compiled(text, "it")


@pytest.mark.parametrize(
    "text", ["{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}", "{{ [].append(1) }}"]
)
def test_python_stays_out_of_reach(environment, text):
    with pytest.raises(jinja2.TemplateError):
        environment.render(environment.compiled(text, "it"), {})


FEATURES = """{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}
|{% for i in l if i > 1 %}{{ loop.index }}/{{ loop.length }}
{{ loop.last }}{{ loop.revindex }}{% else %}none{% endfor %}
|{% for i in l | select('gt', 1) %}{{ loop.length }}{{ loop.last }}
{{ loop.nextitem }}{% endfor %}
|{% for x in t recursive %}<{{ x.n }}{{ loop(x.c) if x.c }}>{% endfor %}
|{{ [l, d, (1, s)] }}
{{ {'a': l} }}|{{ s ~ 1 ~ none ~ l }}|{{ '%s-%d' % (s, 3) }}|{{ '{:>5}{}'.format(s, 1) }}|
{{ s * 3 }}{{ 2 ** 5 }}{{ 7 % 4 }}
{{ s + 'x' }}{{ [1] + [2] }}|{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}
{% call m(3) %}in{% endcall %}|{% set ns = namespace(n=0) %}{% for i in l %}{% set ns.n = ns.n + i %}{% endfor %}
{{ ns.n }}
{% set b %}block {{ s }}{% endset %}{{ b | upper }}|{{ l | join(', ') }}{{ l | sum }}{{ l | map('string') | list }}
{{ s | replace('b', 'c') }}{{ s.replace('b', 'd') }}{{ s | center(9) }}{{ 1.256 | round(2) }}{{ l | batch(2) | list }}
{{ s | indent(2) }}{{ 'b' in s }}{{ 3 not in l }}{{ missing }}{{ missing is defined }}{{ s.upper().split('B') }}
{{ d | dictsort }}{{ l | first }}{{ '<b>x</b>' | striptags }}{{ l[::-1] }}{{ range(3) | list }}{{ -l[0] }}
{{ 1 if s else 2 }}
{% filter upper %}a{{ s }}{% endfilter %}{{ joiner(',')() }}{{ l | tojson }}{{ s | tojson(indent=2) }}
{{ s is string }}"""


def test_what_templates_do_comes_out_as_in_plain_jinja():
    """The rewritten template and the wrapped filters against jinja2's own sandbox."""
    values = {"s": "abc", "l": [1, 2, 3], "d": {"y": 1, "x": [2]}, "t": [{"n": 1, "c": [{"n": 2}]}, {"n": 3}]}
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    bounded = BoundedEnvironment({})
    assert bounded.render(bounded.compiled(FEATURES, "it"), values) == plain.from_string(FEATURES).render(values)


def test_the_clock_is_that_of_the_thread(environment, monkeypatch):
    """Other work on the machine does not stop a template: waiting is no CPU time."""
    monkeypatch.setattr(meter, "CPU_SECONDS", 0.2)

    def wait():
        time.sleep(0.3)
        return ""

    waits = environment.compiled("{{ wait() }}{% for i in range(200) %}{% endfor %}done", "it")
    assert environment.render(waits, {"wait": wait}) == "done"
