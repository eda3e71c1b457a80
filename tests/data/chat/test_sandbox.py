"""Templates that loop for ever, fill the memory or compute without end: each is stopped, in any thread."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import suppress

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainer.data.chat import meter
from trainer.data.chat.sandbox import BoundedEnvironment, RanAway

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
    "search from the right": "{% set x = 'a' * 1000000 %}{{ x.rfind('b' + x[500000:]) }}",
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
}
REFUSED_WHEN_USED = ("join of an attribute", "sum of an attribute", "str.format by another way", "percent of a test")
"""By jinja2's own kinds of error: settings that a filter here does not have, methods that are no text to find."""
SLOW_STEPS = {
    "search": "{% set x = 'a' * 10000000 %}{% for i in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "search in a filter": "{% set x = 'a' * 10000000 %}{% for i in range(99999) if 'b' in x %}{% endfor %}",
    "comparison": "{% set x = 'a' * 4000000 %}{% set y = x[1:] + 'a' %}"
    "{% for i in range(99999) %}{% if x == y %}{% endif %}{% endfor %}",
}


@pytest.fixture(scope="module")
def environment() -> BoundedEnvironment:
    return BoundedEnvironment()


IN_LITTLE_MEMORY = """
import json, resource, sys
from tests.data.chat.test_sandbox import HOSTILE
from trainer.data.chat import meter
from trainer.data.chat.sandbox import BoundedEnvironment

meter.STEPS = 100_000  # a tenth, so that it is quick; what is made at once is as large as ever
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (400 << 20),) * 2)
said = {}
for name, text in HOSTILE.items():
    environment = BoundedEnvironment()
    try:
        environment.render(environment.compiled(text, "it"), {"x": "y", "long": 10**4000})
        said[name] = "done"
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """How each hostile template ended in a process that has 400 MiB for it."""
    out = subprocess.run([sys.executable, "-c", IN_LITTLE_MEMORY], capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped_in_little_memory(said, name):
    """By a count or at once by the name of what it uses: none gets as far as the memory's or the clock's end."""
    kind, _, why = said[name].partition(": ")
    assert (
        (kind == "RanAway" and "memory" not in why and "CPU" not in why)
        or "not allowed in templates" in why
        or (kind in ("SecurityError", "TypeError") and name in REFUSED_WHEN_USED)
    ), said[name]


def test_no_memory_is_an_end_like_the_others(environment):
    def full():
        raise MemoryError

    with pytest.raises(RanAway, match="more memory than there is"):
        environment.render(environment.compiled("{{ full() }}", "it"), {"full": full})


def test_a_template_that_is_slow_on_every_row_is_stopped(environment, monkeypatch):
    """On average over its renders: one slow row among quick ones is none."""
    monkeypatch.setattr(meter, "CPU_SECONDS", 0.3)
    monkeypatch.setattr(meter, "CPU_SECONDS_A_ROW", 0.001)
    slow = environment.compiled("{% for i in range(20000 if n is divisibleby(every) else 1) %}{% endfor %}", "it")
    environment.render(slow, {"n": 0, "every": 1000})
    for n in range(1, 500):
        environment.render(slow, {"n": n, "every": 1000})
    with pytest.raises(RanAway, match="on a row, on average"):
        for n in range(1000):
            environment.render(slow, {"n": n, "every": 1})
    nested = "{% for i in range(2000) %}{% set ns.x = ns.x | map('string') %}{% endfor %}{{ ns.x | first }}"
    nested = environment.compiled("{% set ns = namespace(x=[1]) %}" + nested, "it")
    with pytest.raises(RanAway, match="on a row, on average"):
        for _ in range(1000):
            with suppress(RecursionError):  # a refused row is a row, too
                environment.render(nested, {})


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
    "text, said",
    [
        ("\n{{ 'a' | center(9) }}", "it, line 2: the filter center is not allowed in templates; allowed are abs, "),
        ("{{ [1] | map('random') }}", "the filter random "),
        ("{{ [1] | select('upper') | list }}", "the test upper "),
        ("{{ 'a' is escaped }}", "the test escaped "),
        ("{% if false %}{{ x.format(1) }}{% endif %}", "the method format "),
        ("{% include 'x' %}", "the statement include "),
    ],
)
def test_what_no_chat_template_needs_is_refused_by_name_before_any_render(environment, text, said):
    with pytest.raises(ValueError, match=said):
        environment.compiled(text, "it")


@pytest.mark.parametrize(
    "text",
    ["{{ ''.__class__.__mro__ }}", "{{ range.__call__.__self__ }}", "{{ ([] | map(attribute='append') | list)(1) }}"],
)
def test_python_stays_out_of_reach(environment, text):
    with pytest.raises((jinja2.TemplateError, TypeError)):
        environment.render(environment.compiled(text, "it"), {})


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


def test_what_templates_do_comes_out_as_in_plain_jinja():
    """The rewritten template and the wrapped filters against jinja2's own sandbox."""
    values = {"s": "abc", "l": [1, 2, 3], "d": {"y": 1, "x": [2]}, "t": [{"n": 1, "c": [{"n": 2}]}, {"n": 3}]}
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    bounded = BoundedEnvironment()
    assert bounded.render(bounded.compiled(FEATURES, "it"), values) == plain.from_string(FEATURES).render(values)


def test_the_clock_is_that_of_the_thread(environment, monkeypatch):
    """Other work on the machine does not stop a template: waiting is no CPU time."""
    monkeypatch.setattr(meter, "CPU_SECONDS", 0.2)

    def wait():
        time.sleep(0.3)
        return ""

    waits = environment.compiled("{{ wait() }}{% for i in range(200) %}{% endfor %}done", "it")
    assert environment.render(waits, {"wait": wait}) == "done"
