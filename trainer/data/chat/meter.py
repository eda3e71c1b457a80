"""What one render of a template may do: steps, sizes and time, counted before or after each is spent."""

from __future__ import annotations

import time
from datetime import date, timedelta
from datetime import time as clock
from decimal import Decimal
from typing import Any

from jinja2.runtime import Undefined
from jinja2.utils import Namespace

STEPS = 1_000_000
"""Turns of loops, calls and filters in one render; for large inputs STEPS_A_CHARACTER more."""
STEPS_A_CHARACTER = 100
SIZE = 1 << 24
"""Characters and items that one render may make; for large inputs SIZE_A_CHARACTER more."""
SIZE_A_CHARACTER = 32
CPU_SECONDS = 5
"""Of one render: what single steps on large values can add up to."""
CPU_SECONDS_A_ROW = 0.05
"""Of the renders of a template on average, beyond twice CPU_SECONDS for all."""

POINTER = 8
"""What an item of a list costs more than a character."""
OBJECT = 64
"""What a text costs that is made of a part of another."""
EVERY = 64
"""Steps between looks at the clock, which costs more than a step."""

VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
WRITTEN = (str, bytes, bool, int, float, type(None), Decimal, date, clock, timedelta, range, Undefined, Namespace)
"""What has a text that is the same in every run; other objects would show where in memory they are."""


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


def size_of(value: Any, limit: int, writing: bool = False) -> int:
    """Characters and items in a value, those in its items too; counts no further than the limit.

    `writing`: the value becomes text. Raises RanAway where that text is not the same in every run.
    """
    if isinstance(value, str):
        return len(value)
    total, left = 0, [value]
    while left and total <= limit:
        item = left.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            total += POINTER * (len(item) + 1)
            left += [*item, *item.values()]
        elif isinstance(item, (list, tuple, *VIEWS)):
            total += POINTER * (len(item) + 1)
            left += item
        elif isinstance(item, Namespace) and not writing:  # which is written without what it holds
            held = object.__getattribute__(item, "_Namespace__attrs")
            total += POINTER * (len(held) + 1)
            left += held.values()
        elif isinstance(item, int):
            total += 1 + (item.bit_length() >> 2)  # digits, roughly; a row's numbers may be long
        elif writing and not isinstance(item, WRITTEN):
            raise RanAway(f"it writes a {type(item).__name__}, which is no text, number, list or dict")
        else:
            total += len(item) if isinstance(item, bytes) else 1
    return total
