"""Jinja that can neither reach Python nor run away: what a template makes and how long it works is counted.

A template comes with a model folder or a data set, so it is someone else's program. Jinja's sandbox keeps it from
Python, but not from nested loops, from `'a' * 10**10`, or from lists of lists that double. Here a template has only
what allowed.py lists, every turn of a loop and every call is a step, and every text, list or number that it makes is
measured before or after it is made. The limits hold in any thread and process, need no signal, and are the same on
every machine, but for those on the time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from trainer.data.chat import allowed, meter
from trainer.data.chat.meter import POINTER, SIZE, Meter, RanAway, size_of
from trainer.data.chat.rewrite import Counting

__all__ = ["BoundedEnvironment", "RanAway"]

TEMPLATE_BYTES = 1 << 20
"""Characters of a template."""


@dataclass
class Compiled:
    """A template, and what its renders took so far."""

    template: jinja2.Template
    num_renders: int = 0
    cpu_seconds: float = 0.0

    def took(self, seconds: float) -> None:
        """Counts a render. Raises RanAway where they are slow on average."""
        self.num_renders += 1
        self.cpu_seconds += seconds
        mean = meter.CPU_SECONDS_A_ROW
        if self.cpu_seconds > 2 * meter.CPU_SECONDS + mean * self.num_renders:
            raise RanAway(f"it works for more than {mean} seconds of CPU on a row, on average")


class _Hook:
    """A function of the environment that the rewritten template calls, without the sandbox's checks."""

    __slots__ = ("function",)

    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates stop. Render through `render`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options: Any):
        super().__init__(trim_blocks=True, lstrip_blocks=True, **options)
        filters = self.filters | {"tojson": lambda *args, **kwargs: allowed.to_json(self.meter, *args, **kwargs)}
        self.filters = {name: self._filter(name, filters[name]) for name in sorted(allowed.FILTERS)}
        self.tests = {name: self._test(name, self.tests[name]) for name in sorted(allowed.TESTS)}
        self.globals = {name: self.globals[name] for name in allowed.GLOBALS}
        self.globals |= {"dict": allowed.Dict(), "namespace": Names}
        self._running = threading.local()
        self.finalize = self._written
        self.passed, self.measured = _Hook(self._passed), _Hook(self._measured)
        self.counted, self.joined, self.seen = _Hook(self._counted), _Hook(self._joined), _Hook(self._seen)
        self.sliced = _Hook(self._sliced)

    def compiled(self, text: str, what: str) -> Compiled:
        """A template of this environment. Raises ValueError that names it and the line for what is no template."""
        if len(text) > TEMPLATE_BYTES:
            raise ValueError(f"{what}: is {len(text):,} characters long; at most {TEMPLATE_BYTES:,} are allowed")
        try:
            return Compiled(self.from_string(text))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{what}, line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError, MemoryError, ValueError, OverflowError) as error:
            raise ValueError(f"{what}: cannot be compiled: {error}") from None

    def render(self, compiled: Compiled, values: dict[str, Any]) -> str:
        """The template's text of these values. Raises RanAway and what jinja2 raises."""
        self._running.meter = Meter(values)
        try:
            return compiled.template.render(values)
        except MemoryError:
            raise RanAway("it needs more memory than there is") from None
        finally:
            seconds = time.thread_time() - self._running.meter.started
            del self._running.meter
            compiled.took(seconds)

    @property
    def meter(self) -> Meter:
        """Of the render under way in this thread; AttributeError while a template is compiled."""
        return self._running.meter

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(Counting(self).visit(source), *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, LoopContext):
            return attr in allowed.LOOP
        if type(obj) is Names:
            return not attr.startswith("_")
        return attr in allowed.METHODS.get(type(obj), ())

    def wrap_str_format(self, value: Any) -> None:
        """str.format is not among the methods, whatever would make it safe."""

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if type(__obj) is _Hook:
            return __obj.function(*args)
        meter = __self.meter
        meter.step()
        if isinstance(__obj, BuiltinMethodType):
            allowed.before_method(meter, __obj.__self__, __obj.__name__, (*args, *kwargs.values()))
        elif isinstance(__obj, LoopContext):
            args = tuple(__self._counted(value) for value in args)
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        allowed.before_operator(self.meter, operator, left, right)
        return self.binop_table[operator](left, right)

    def _written(self, value: Any) -> Any:
        """What is about to become text."""
        meter = getattr(self._running, "meter", None)
        size = size_of(value, SIZE, writing=True)
        if meter is not None:  # none while constants are put together
            meter.step(size)
        return value

    def _sliced(self, value: Any) -> Any:
        """A part of a text or list, whose items are those of the whole."""
        if hasattr(value, "__len__"):
            self.meter.step(len(value) * (1 if isinstance(value, str) else POINTER))
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
        self.meter.step(size_of(parts, self.meter.size + SIZE, writing=True))
        return "".join(map(str, parts))

    def _filter(self, name: str, function: Callable) -> Callable:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            meter = self.meter
            meter.step()
            value = args[first]
            if name in allowed.ITEM_FILTERS and not hasattr(value, "__len__") and value is not None:
                value = self._counted(value)
                value = list(value) if name == "join" else value  # its parts are measured first
                args = (*args[:first], value, *args[first + 1 :])
            allowed.before_filter(meter, name, value, args[first + 1 :], kwargs)
            found = function(*args, **kwargs)
            if isinstance(found, (str, list, tuple, dict)):
                return meter.made(found)
            return allowed.check_number(found) if name in ("int", "sum") else found

        return bounded

    def _test(self, name: str, function: Callable) -> Callable:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.meter.step()
            if name in allowed.NUMBER_TESTS and not all(isinstance(value, (int, float)) for value in args):
                raise TypeError(f"the test {name} is for numbers")
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
