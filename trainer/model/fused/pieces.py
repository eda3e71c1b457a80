"""Loops over pieces of a row. A plan, whose tensors have no values, runs those that can differ in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

_shortened = ContextVar("shortened", default=False)


@contextmanager
def shortened() -> Iterator[None]:
    """Within it a loop is its first pieces and its last one: the others are as long as the first and repeat the second,
    which finds what the first has left behind. Its results are of no use, its memory is that of the whole loop."""
    token = _shortened.set(True)
    try:
        yield
    finally:
        _shortened.reset(token)


def is_shortened() -> bool:
    """Whether what runs now has no values: a plan."""
    return _shortened.get()


def pieces(found: Sequence[T]) -> Sequence[T]:
    """What to loop over: all of `found`, whose members but for the last are equally long."""
    return [*found[:2], found[-1]] if is_shortened() and len(found) > 3 else found
