"""What templates may use of Jinja and Python, and what each costs before it is done.

The lists hold what chat templates of real models use. All else is refused by name: a filter that nobody needs is
one more way to fill the memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import date, datetime
from typing import Any

from trainer.data.chat.meter import OBJECT, POINTER, SIZE, Meter, RanAway, size_of

TEXT_FILTERS = ("capitalize", "format", "indent", "join", "lower", "replace", "safe", "string", "title", "trim")
TEXT_FILTERS += ("upper",)
ITEM_FILTERS = ("dictsort", "join", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select")
ITEM_FILTERS += ("selectattr", "sort", "sum", "unique")
"""Filters that walk through what they are given."""
FILTERS = {*TEXT_FILTERS, *ITEM_FILTERS, "abs", "count", "d", "default", "first", "float", "int", "items", "last"}
FILTERS |= {"length", "round", "tojson"}

NUMBER_TESTS = ("divisibleby", "even", "odd")
"""Tests that compute `%`, which formats a text."""
TESTS = {*NUMBER_TESTS, "!=", "<", "<=", "==", ">", ">=", "boolean", "callable", "defined", "eq", "equalto", "false"}
TESTS |= {"float", "ge", "greaterthan", "gt", "in", "integer", "iterable", "le", "lessthan", "lt", "mapping", "ne"}
TESTS |= {"none", "number", "sameas", "sequence", "string", "true", "undefined"}

GLOBALS = ("dict", "joiner", "namespace", "range")


class Dict:
    """dict() and dict.fromkeys(), and no other attribute of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict:
        return dict.fromkeys(*args, **kwargs)


_DATES = frozenset(("day", "hour", "isoformat", "minute", "month", "second", "weekday", "year"))
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        "capitalize count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace "
        "isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip "
        "split splitlines startswith strip title upper".split()
    ),
    dict: frozenset(("get", "items", "keys", "values")),
    list: frozenset(("count", "index")),
    tuple: frozenset(("count", "index")),
    Dict: frozenset(("fromkeys",)),
    date: _DATES,
    datetime: _DATES,
}
LOOP = frozenset(
    "changed cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0".split()
)
CALLED = LOOP.union(*METHODS.values(), ("append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"))
"""Names that a template may call of a value; those that change a list or dict are the sandbox's to refuse when they
are used, as in transformers: some templates hold one where they never come to."""

BITS = 128
"""Of a whole number that a template computes."""
SHORT = 16
"""Characters of an indent or a separator."""
DIGITS = 10
"""Of a rounded number."""
PLAIN = re.compile(r"(?:[^%]|%%|%(?:\.[0-9])?[sdf])*")
"""A text that `%` may fill in."""


def before_filter(meter: Meter, name: str, value: Any, settings: tuple, named: dict[str, Any]) -> None:
    """Counts what a filter is about to make. Raises RanAway, and TypeError for settings that it does not have."""
    if name in TEXT_FILTERS:
        meter.step(size_of((value, *settings, *named.values()), SIZE, writing=True))
    if name in ITEM_FILTERS and hasattr(value, "__len__"):
        meter.steps -= len(value)
        meter.step(len(value) * (OBJECT if isinstance(value, str) else POINTER))
    if name in _FILTER_COSTS:
        _FILTER_COSTS[name](meter, value, *settings, **named)


def before_method(meter: Meter, owner: Any, name: str, args: tuple) -> None:
    """Counts what a method is about to make, and how long it may search."""
    if not isinstance(owner, str):
        return
    texts = sum(len(value) for value in args if isinstance(value, str))
    meter.step(len(owner) * texts >> 10)  # searches from the right and strips are products of both lengths
    if name in _METHOD_COSTS:
        _METHOD_COSTS[name](meter, owner, *args)


def before_operator(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """Counts what an operator is about to make."""
    if type(left) is str and type(right) is str and operator == "+":  # most of what templates do
        meter.step(len(left) + len(right))
        return
    meter.step()
    if hasattr(left, "__html__") or hasattr(right, "__html__"):
        raise RanAway("it computes with a text that the filter safe has marked")
    if isinstance(left, int) and isinstance(right, int):
        bits = (left.bit_length(), right.bit_length())
        made = bits[0] * abs(right) if operator == "**" else sum(bits) if operator == "*" else max(bits)
        if made > BITS:
            raise RanAway(f"it computes a number of more than {BITS} bits")
    elif operator == "+":
        if not isinstance(left, (int, float)):
            meter.step(size_of(left, SIZE) + size_of(right, SIZE))
    elif operator == "%":
        if isinstance(left, (str, bytes)):
            _format(meter, left, right)
    elif operator == "*":
        several, times = (left, right) if isinstance(right, int) else (right, left)
        meter.step(size_of(several, SIZE) * max(0, times) if isinstance(times, int) else 0)


def to_json(
    meter: Meter,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps, counted."""
    small = [indent is None or (isinstance(indent, int) and 0 <= indent <= SHORT)]
    small += [isinstance(text, str) and len(text) <= SHORT for text in separators or ()]
    if not all(small):
        raise RanAway(f"it asks tojson for an indent or separators of more than {SHORT} characters")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        size = size_of(value, SIZE)
        meter.step(12 * size if ensure_ascii else 2 * size + 16)  # 12: a pair of \uXXXX
        return encoder.encode(value)
    parts = []
    for part in encoder.iterencode(value):
        meter.step(len(part))
        parts.append(part)
    return "".join(parts)


def check_number(value: Any) -> Any:
    """The value. Raises RanAway for a whole number that is too long."""
    if isinstance(value, int) and value.bit_length() > BITS:
        raise RanAway(f"it computes a number of more than {BITS} bits")
    return value


def _replace(meter: Meter, value: Any, old: Any, new: Any, count: int | None = None) -> None:
    text = str(value)
    meter.step(len(text) + text.count(str(old)) * len(str(new)))


def _join(meter: Meter, value: Any, d: str = "") -> None:
    if hasattr(value, "__len__"):
        meter.step(len(value) * size_of(d, SIZE))


def _sum(meter: Meter, value: Any) -> None:
    """It has neither attribute= nor start=."""


def _trim(meter: Meter, value: Any, chars: str | None = None) -> None:
    meter.step(len(str(value)) * len(chars or "") >> 10)


def _indent(meter: Meter, value: Any, width: int = 4, first: bool = False, blank: bool = False) -> None:
    if not isinstance(width, int) or not 0 <= width <= SHORT:
        raise RanAway(f"it indents by {str(width)[:SHORT]}: a whole number up to {SHORT} is allowed")
    meter.step((width + OBJECT) * (_lines(str(value)) + 1))


def _title(meter: Meter, value: Any) -> None:
    meter.step(len(str(value)) * OBJECT // 2)  # it takes the text apart, at worst every other character


def _round(meter: Meter, value: Any, precision: int = 0, method: str = "common") -> None:
    if not isinstance(precision, int) or abs(precision) > DIGITS:
        raise RanAway(f"it rounds to more than {DIGITS} digits")


def _format(meter: Meter, value: Any, *values: Any) -> None:
    if not isinstance(value, str) or hasattr(value, "__html__") or PLAIN.fullmatch(value) is None:
        raise RanAway("it formats with more than %s, %d and %.1f, such as a width")
    meter.step(len(value) + size_of(values, SIZE, writing=True) + 320 * value.count("%"))  # a float has 309 digits


def _split(meter: Meter, text: str, sep: str | None = None, maxsplit: int = -1) -> None:
    meter.step(OBJECT * (_lines(text) if sep is None else text.count(sep)))


def _splitlines(meter: Meter, text: str, keepends: bool = False) -> None:
    meter.step(OBJECT * _lines(text))


def _join_method(meter: Meter, text: str, values: Any) -> None:
    if not isinstance(values, (str, list, tuple, dict)):
        raise RanAway("it joins what is no list: use the filter join")
    size = OBJECT * len(values) if isinstance(values, str) else size_of(values, SIZE)
    meter.step(size + len(values) * len(text))


def _lines(text: str) -> int:
    """At least as many as the text has words or lines."""
    return sum(map(str.isspace, text))


_FILTER_COSTS: dict[str, Callable[..., None]] = {
    "replace": _replace,
    "join": _join,
    "sum": _sum,
    "trim": _trim,
    "indent": _indent,
    "title": _title,
    "round": _round,
    "format": _format,
}
_METHOD_COSTS: dict[str, Callable[..., None]] = {
    "replace": _replace,
    "split": _split,
    "rsplit": _split,
    "splitlines": _splitlines,
    "join": _join_method,
}
