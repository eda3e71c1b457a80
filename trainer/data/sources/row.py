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
