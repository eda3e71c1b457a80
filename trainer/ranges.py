"""Ranges of settings, declared with the field: `r: Annotated[int, AT_LEAST_1]`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

COUNT_LIMIT = 2**31 - 1
MOST_TOKENS = 2**24
"""of a sample or a row: longer than any model's context, and its square still has a number"""


@dataclass(frozen=True)
class Range:
    """What a value must be; null is always let pass."""

    holds: Callable[[Any], bool]
    words: str
    """what is allowed: must be ..."""
    most: int | None = None
    """for counts, which otherwise have no end"""
    why: str = ""
    """what to do instead of more"""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """what it holds a number to, in JSON Schema's words"""

    def problem(self, value: Any) -> str | None:
        """Why a value does not stand in the range, or None."""
        if (isinstance(value, float) and not math.isfinite(value)) or not self.holds(value):
            return self.words
        return f"must be at most {self.most}{self.why}" if self.most is not None and value > self.most else None

    def up_to(self, most: int, why: str = "") -> Range:
        """The same with an upper end."""
        return replace(self, most=most, why=why)


COMPARE = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
}


def numbers(words: str, **bounds: float) -> Range:
    """Numbers within bounds, named as JSON Schema names them."""
    return Range(lambda v: all(COMPARE[name](v, bound) for name, bound in bounds.items()), words, bounds=bounds)


POSITIVE = numbers("must be above 0", exclusiveMinimum=0)
NOT_NEGATIVE = numbers("must be 0 or more", minimum=0)
AT_LEAST_1 = numbers("must be 1 or more", minimum=1).up_to(COUNT_LIMIT)
AT_LEAST_2 = numbers("must be 2 or more", minimum=2).up_to(COUNT_LIMIT)
BELOW_1 = numbers("must be from 0 to below 1", minimum=0, exclusiveMaximum=1)
SHARE = numbers("must be from 0 to 1", minimum=0, maximum=1)
POSITIVE_SHARE = numbers("must be above 0 and at most 1", exclusiveMinimum=0, maximum=1)


def ranges_of(cls: type) -> dict[str, Range]:
    """The ranges that a configuration dataclass declares, by field."""
    found = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        declared = [part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Range)]
        if declared:
            found[name] = declared[0]
    return found
