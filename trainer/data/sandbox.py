"""Jinja that can neither reach Python nor run away: what a template makes and how long it works is counted.

A template comes with a model folder or a data set, so it is someone else's program. Jinja's sandbox keeps it from
Python, but not from nested loops, from `'a' * 10**10`, or from lists of lists that double. Here every turn of a loop
and every call is a step, and every text, list or number that the template makes is measured before or after it is
made. The limits hold in any thread and process, need no signal, and are the same on every machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import wraps
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from trainer.data.meter import (
    ASKED_TO_PAD,
    QUADRATIC,
    SIZE,
    Meter,
    RanAway,
    before_format,
    before_method,
    before_replace,
    check_number,
    check_padding,
    size_of,
)
from trainer.data.rewrite import Counting

__all__ = ["BoundedEnvironment", "RanAway"]

TEMPLATE_BYTES = 1 << 20
"""Characters of a template."""


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
        self._running.meter = Meter(values)
        try:
            return template.render(values)
        finally:
            del self._running.meter

    @property
    def meter(self) -> Meter:
        """Of the render under way in this thread; AttributeError while a template is compiled."""
        return self._running.meter

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(Counting(self).visit(source), *args, **kwargs)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902 (as in jinja2)
        if type(__obj) is _Hook:
            return __obj.function(*args)
        meter = __self.meter
        meter.step()
        if isinstance(__obj, BuiltinMethodType):
            before_method(meter, __obj, args, kwargs)
        elif isinstance(__obj, LoopContext):
            args = tuple(__self._counted(value) for value in args)
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = self.meter
        if operator == "+":
            if not isinstance(left, (int, float)):
                meter.step(size_of(left, SIZE) + size_of(right, SIZE))
        elif isinstance(left, int) and isinstance(right, int):
            check_number(operator, left, right)
        elif operator == "%":
            before_format(meter, left, (right,))
        elif operator == "*":
            length, times = (left, right) if isinstance(right, int) else (right, left)
            meter.step(size_of(length, SIZE) * max(0, times) if isinstance(times, int) else 0)
        return self.binop_table[operator](left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatting = super().wrap_str_format(value)
        if formatting is None:
            return None

        @wraps(formatting)
        def checked(*args: Any, **kwargs: Any) -> str:
            before_format(self.meter, value.__self__, (args, kwargs))
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
                check_padding(settings)
            elif name in QUADRATIC:
                meter.step(size_of(value, SIZE) ** 2 >> 10)
            elif name == "replace":
                before_replace(meter, str(value), settings)
            elif name == "format":
                before_format(meter, str(value), settings)
            elif name in ("join", "sum"):
                value = list(self._each(value))
                between = size_of(settings, SIZE) if name == "join" else len(value)
                meter.step(size_of(value, SIZE) + len(value) * between)
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
