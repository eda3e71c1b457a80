"""What one render of a template may do: steps, sizes and time, counted before or after each is spent."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from types import BuiltinMethodType
from typing import Any

STEPS = 1_000_000
"""Turns of loops, calls and filters in one render; for large inputs STEPS_A_CHARACTER more."""
STEPS_A_CHARACTER = 100
SIZE = 1 << 24
"""Characters and items that one render may make; for large inputs SIZE_A_CHARACTER more."""
SIZE_A_CHARACTER = 32
CPU_SECONDS = 5
"""Of one render: what single steps on large values can add up to."""

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


class Meter:
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
        self.step(size_of(value, self.size + SIZE))
        return value

    def _refill(self) -> None:
        if not self._refilled:
            self._refilled = True
            inputs = size_of(self._inputs, 1 << 40)
            self.steps += STEPS_A_CHARACTER * inputs
            self.size += SIZE_A_CHARACTER * inputs
        if self.steps < 0:
            raise RanAway("it took too many steps: loops in loops, or calls of calls")
        if self.size < 0:
            raise RanAway("it makes too much text, or too large lists or numbers")


def size_of(value: Any, limit: int) -> int:
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


def before_method(meter: Meter, method: BuiltinMethodType, args: tuple, kwargs: dict) -> None:
    """Counts what a method of a text or number is about to make."""
    name, owner = method.__name__, method.__self__
    settings = (*args, *kwargs.values())
    if name in ASKED_TO_PAD:
        check_padding(settings)
    elif name in ("encode", "decode"):
        if any(isinstance(value, str) and value.lower() not in CODECS for value in settings[:1]):
            raise RanAway(f"it uses the codec {settings[0]!r}; allowed are {', '.join(CODECS)}")
    elif name == "replace" and isinstance(owner, str):
        before_replace(meter, owner, settings)
    elif name == "join" and settings and hasattr(settings[0], "__len__"):
        meter.step(size_of(settings[0], SIZE) + len(settings[0]) * len(owner))
    elif name == "join":
        raise RanAway("it joins what has no length: use the filter join")
    elif name == "translate":
        meter.step(len(owner) * size_of(settings, SIZE))


def before_replace(meter: Meter, text: str, settings: tuple) -> None:
    if len(settings) >= 2:
        old, new = str(settings[0]), str(settings[1])
        meter.step(len(text) + text.count(old) * len(new))


def before_format(meter: Meter, template: Any, values: Any) -> None:
    """Counts what `%` or str.format is about to make: fields, as wide as the template says or the values are."""
    if not isinstance(template, str):
        return
    widths = [int(digits) for digits in re.findall(r"[0-9]{1,9}", template)]
    fields = template.count("%") + template.count("{")
    if re.search(r"%[^a-zA-Z%]*\*|:[^{}]*\{", template):
        raise RanAway("it formats with a width that is a value")
    meter.step(len(template) + fields * (max(widths, default=0) + size_of(values, SIZE)))


def check_padding(settings: Iterable[Any]) -> None:
    wide = [value for value in settings if isinstance(value, int) and abs(value) > PADDING]
    if wide:
        raise RanAway(f"it asks for {wide[0]} characters, digits or parts at once; at most {PADDING} are allowed")


def check_number(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() + right.bit_length()
    if operator == "**":
        bits = left.bit_length() * abs(right)
    if bits > BITS:
        raise RanAway(f"it computes a number of more than {BITS} bits")
