"""A row as it is read, whatever the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One row, or the reason why it is none."""

    where: str
    """file:line; file:row N where a file has no lines"""
    fields: dict[str, Any] | None
    problem: str | None = None


def without_nulls(value: Any) -> Any:
    """A value from a table: there, what a row does not have is a null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
