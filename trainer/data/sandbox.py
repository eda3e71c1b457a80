"""Jinja that can neither reach Python nor run away: what a template makes and how long it works is counted.

A template comes with a model folder or a data set, so it is someone else's program. Jinja's sandbox keeps it from
Python, but not from nested loops, from `'a' * 10**10`, or from lists of lists that double. Here every turn of a loop
and every call is a step, and every text, list or number that the template makes is measured before or after it is
made. The limits hold in any thread and process, need no signal, and are the same on every machine.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from functools import wraps
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

STEPS = 1_000_000
"""Turns of loops, calls and filters in one render; for large inputs STEPS_A_CHARACTER more."""
STEPS_A_CHARACTER = 100
SIZE = 1 << 24
"""Characters and items that one render may make; for large inputs SIZE_A_CHARACTER more."""
SIZE_A_CHARACTER = 32
CPU_SECONDS = 5
"""Of one render: what single steps on large values can add up to."""
TEMPLATE_BYTES = 1 << 20

POINTER = 8
"""What an item of a list costs more than a character."""
BITS = 100_000
"""Of a whole number."""
PADDING = 10_000
"""Of a width, an indent, a number of digits or parts."""
EVERY = 64
"""Steps between looks at the clock, which costs more than a step."""

ASKED_TO_PAD = ("center", "indent", "batch", "slice", "round", "tojson", "ljust", "rjust", "zfill", "expandtabs")
ASKED_TO_PAD += ("to_bytes",)
"""Filters and methods whose numbers decide how much they make, or how long they take."""
QUADRATIC = ("striptags", "urlize", "wordwrap", "pprint")
"""Filters whose time grows with the square of the text."""
CODECS = ("utf-8", "utf8", "ascii", "latin-1")


class RanAway(Exception):
    """A template went over a limit. No jinja2 error: a template must not be taken for one that refuses a row."""


class _Meter:
    """What one render may still do."""

    __slots__ = ("_inputs", "_refilled", "size", "started", "steps")

    def __init__(self, inputs: Any):
        self.steps, self.size, self.started = STEPS, SIZE, time.thread_time()
        self._inputs, self._refilled = inputs, False

    def step(self, size: int = 0) -> None:
        """Counts one step that makes `size` characters or items. Raises RanAway."""
        self.steps -= 1
        self.size -= size
        if self.steps < 0 or self.size < 0:
            self._refill()
        if not self.steps % EVERY and time.thread_time() - self.started > CPU_SECONDS:
            raise RanAway(f"it worked for more than {CPU_SECONDS} seconds of CPU on one row")

    def made(self, value: Any) -> Any:
        """The value, counted."""
        self.step(_size(value, self.size + SIZE))
        return value

    def _refill(self) -> None:
        if not self._refilled:
            self._refilled = True
            inputs = _size(self._inputs, 1 << 40)
            self.steps += STEPS_A_CHARACTER * inputs
            self.size += SIZE_A_CHARACTER * inputs
        if self.steps < 0:
            raise RanAway("it took too many steps: loops in loops, or calls of calls")
        if self.size < 0:
            raise RanAway("it makes too much text, or too large lists or numbers")


def _size(value: Any, limit: int) -> int:
    """Characters and items in a value, those in its items too; counts no further than the limit."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, (list, tuple, dict)):
        return len(value) if isinstance(value, bytes) else 1
    total, left = 0, [value]
    while left and total <= limit:
        item = left.pop()
        if isinstance(item, (list, tuple, dict)):
            total += POINTER * (len(item) + 1)
            left += [*item, *item.values()] if isinstance(item, dict) else item
        else:
            total += len(item) if isinstance(item, (str, bytes)) else 1
    return total


class _Hook:
    """A function of the environment that the rewritten template calls, without the sandbox's checks."""

    __slots__ = ("function",)

    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates stop. Render through `render`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: dict[str, Callable], **options: Any):
        super().__init__(trim_blocks=True, lstrip_blocks=True, **options)
        self.filters = {name: self._filter(name, function) for name, function in {**self.filters, **filters}.items()}
        self._running = threading.local()
        self.finalize = self._written
        self.passed, self.measured = _Hook(self._passed), _Hook(self._measured)
        self.counted, self.joined, self.seen = _Hook(self._counted), _Hook(self._joined), _Hook(self._seen)
        del self.globals["lipsum"]  # random text
        self.globals["namespace"] = Names
        self.tests = {name: self._test(test) for name, test in self.tests.items()}

    def compiled(self, text: str, what: str) -> jinja2.Template:
        """A template of this environment. Raises ValueError that names it and the line for what is no template."""
        if len(text) > TEMPLATE_BYTES:
            raise ValueError(f"{what}: is {len(text):,} characters long; at most {TEMPLATE_BYTES:,} are allowed")
        try:
            return self.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{what}, line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError, MemoryError, ValueError, OverflowError) as error:
            raise ValueError(f"{what}: cannot be compiled: {error}") from None

    def render(self, template: jinja2.Template, values: dict[str, Any]) -> str:
        """The template's text of these values. Raises RanAway and what jinja2 raises."""
        self._running.meter = _Meter(values)
        try:
            return template.render(values)
        finally:
            del self._running.meter

    @property
    def meter(self) -> _Meter:
        """Of the render under way in this thread; AttributeError while a template is compiled."""
        return self._running.meter

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Counting(self).visit(source), *args, **kwargs)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902 (as in jinja2)
        if type(__obj) is _Hook:
            return __obj.function(*args)
        meter = __self.meter
        meter.step()
        if isinstance(__obj, BuiltinMethodType):
            _before_method(meter, __obj, args, kwargs)
        elif isinstance(__obj, LoopContext):
            args = tuple(__self._counted(value) for value in args)
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = self.meter
        if operator == "+":
            if not isinstance(left, (int, float)):
                meter.step(_size(left, SIZE) + _size(right, SIZE))
        elif isinstance(left, int) and isinstance(right, int):
            _check_number(operator, left, right)
        elif operator == "%":
            _before_format(meter, left, (right,))
        elif operator == "*":
            length, times = (left, right) if isinstance(right, int) else (right, left)
            meter.step(_size(length, SIZE) * max(0, times) if isinstance(times, int) else 0)
        return self.binop_table[operator](left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatting = super().wrap_str_format(value)
        if formatting is None:
            return None

        @wraps(formatting)
        def checked(*args: Any, **kwargs: Any) -> str:
            _before_format(self.meter, value.__self__, (args, kwargs))
            return formatting(*args, **kwargs)

        return checked

    def _written(self, value: Any) -> Any:
        """What is about to become text."""
        meter = getattr(self._running, "meter", None)
        if meter is not None:  # none while constants are put together
            meter.made(value)
        return value

    def _passed(self, size: int) -> bool:
        """One turn of a loop or a macro, whose body holds `size` characters of text."""
        self.meter.step(size)
        return True

    def _measured(self, value: Any) -> Any:
        return self.meter.made(value)

    def _seen(self, value: Any) -> Any:
        self.meter.step()
        return value

    def _counted(self, values: Any) -> Any:
        """What a loop goes through; a generator's items are counted as they come."""
        if hasattr(values, "__len__") or isinstance(values, Undefined):
            return values
        return self._each(iter(values))

    def _each(self, values: Iterable[Any]) -> Iterable[Any]:
        for value in values:
            self.meter.step()
            yield value

    def _joined(self, *parts: Any) -> str:
        """The operator ~."""
        for part in parts:
            self.meter.made(part)
        return "".join(map(str, parts))

    def _filter(self, name: str, function: Callable) -> Callable:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            meter = self.meter
            value, settings = args[first], (*args[first + 1 :], *kwargs.values())
            meter.step()
            if name in ASKED_TO_PAD:
                _check_padding(settings)
            elif name in QUADRATIC:
                meter.step(_size(value, SIZE) ** 2 >> 10)
            elif name == "replace":
                _before_replace(meter, str(value), settings)
            elif name == "format":
                _before_format(meter, str(value), settings)
            elif name in ("join", "sum"):
                value = list(self._each(value))
                between = _size(settings, SIZE) if name == "join" else len(value)
                meter.step(_size(value, SIZE) + len(value) * between)
                args = (*args[:first], value, *args[first + 1 :])
            found = function(*args, **kwargs)
            return meter.made(found) if isinstance(found, (str, list, tuple, dict)) else found

        return bounded

    def _test(self, function: Callable) -> Callable:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.meter.step()
            return function(*args, **kwargs)

        return bounded


class Names(Namespace):
    """namespace(): transformers' rule against underscores; printing one, which could loop, prints no content."""

    def __init__(*args: Any, **kwargs: Any):  # so that namespace(self=...) works, as in jinja2
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: names do not begin with _")


class _Counting(NodeTransformer):
    """Rewrites a template so that it tells the environment what it does. The text it writes stays the same."""

    def __init__(self, environment: BoundedEnvironment):
        self.environment = environment

    def visit_For(self, node: nodes.For) -> nodes.For:
        size = _text_in(node.body)
        self.generic_visit(node)
        node.iter = self._hook("counted", node.iter, [node.iter])
        if node.test is not None:
            node.test = nodes.And(self._passing(node, 0), node.test, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(self._passing(node, size), lineno=node.lineno))
        return node

    def visit_Macro(self, node: Any) -> Any:
        size = _text_in(node.body)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._passing(node, size), lineno=node.lineno))
        return node

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._hook("joined", node, node.nodes)

    def visit_List(self, node: Any) -> nodes.Node:
        constant = all(isinstance(item, nodes.Const) for item in node.iter_child_nodes())
        self.generic_visit(node)
        stored = getattr(node, "ctx", "load") != "load"
        return node if constant or stored else self._hook("measured", node, [node])

    visit_Tuple = visit_List
    visit_Dict = visit_List

    def visit_Operand(self, node: nodes.Operand) -> nodes.Operand:
        """A search takes as long as what is searched."""
        self.generic_visit(node)
        if node.op in ("in", "notin") and not isinstance(node.expr, (nodes.Const, nodes.List, nodes.Tuple)):
            node.expr = self._hook("seen", node.expr, [node.expr])
        return node

    def _passing(self, node: nodes.Node, size: int) -> nodes.Node:
        return self._hook("passed", node, [nodes.Const(size, lineno=node.lineno)])

    def _hook(self, name: str, node: nodes.Node, values: list[nodes.Node]) -> nodes.Node:
        found = nodes.EnvironmentAttribute(name, lineno=node.lineno)
        call = nodes.Call(found, values, [], None, None, lineno=node.lineno)
        return call.set_environment(self.environment)


def _text_in(body: list[nodes.Node]) -> int:
    """Characters that stand in a body itself; those of loops in it are counted by their own turns."""
    total, left = 0, list(body)
    while left:
        node = left.pop()
        if isinstance(node, nodes.TemplateData):
            total += len(node.data)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            total += len(node.value)
        elif not isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock)):
            left += node.iter_child_nodes()
    return total


def _before_method(meter: _Meter, method: BuiltinMethodType, args: tuple, kwargs: dict) -> None:
    """Counts what a method of a text or number is about to make."""
    name, owner = method.__name__, method.__self__
    settings = (*args, *kwargs.values())
    if name in ASKED_TO_PAD:
        _check_padding(settings)
    elif name in ("encode", "decode"):
        if any(isinstance(value, str) and value.lower() not in CODECS for value in settings[:1]):
            raise RanAway(f"it uses the codec {settings[0]!r}; allowed are {', '.join(CODECS)}")
    elif name == "replace" and isinstance(owner, str):
        _before_replace(meter, owner, settings)
    elif name == "join" and settings and hasattr(settings[0], "__len__"):
        meter.step(_size(settings[0], SIZE) + len(settings[0]) * len(owner))
    elif name == "join":
        raise RanAway("it joins what has no length: use the filter join")
    elif name == "translate":
        meter.step(len(owner) * _size(settings, SIZE))


def _before_replace(meter: _Meter, text: str, settings: tuple) -> None:
    if len(settings) >= 2:
        old, new = str(settings[0]), str(settings[1])
        meter.step(len(text) + text.count(old) * len(new))


def _before_format(meter: _Meter, template: Any, values: Any) -> None:
    """Counts what `%` or str.format is about to make: fields, as wide as the template says or the values are."""
    if not isinstance(template, str):
        return
    widths = [int(digits) for digits in re.findall(r"[0-9]{1,9}", template)]
    fields = template.count("%") + template.count("{")
    if re.search(r"%[^a-zA-Z%]*\*|:[^{}]*\{", template):
        raise RanAway("it formats with a width that is a value")
    meter.step(len(template) + fields * (max(widths, default=0) + _size(values, SIZE)))


def _check_padding(settings: Iterable[Any]) -> None:
    wide = [value for value in settings if isinstance(value, int) and abs(value) > PADDING]
    if wide:
        raise RanAway(f"it asks for {wide[0]} characters, digits or parts at once; at most {PADDING} are allowed")


def _check_number(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() + right.bit_length()
    if operator == "**":
        bits = left.bit_length() * abs(right)
    if bits > BITS:
        raise RanAway(f"it computes a number of more than {BITS} bits")
