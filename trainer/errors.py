"""Errors that a user can cause, each with the exit code of the contract.

The message is the product: what is wrong (full key or file:line), the value seen, what is allowed, the fix.
Anything that is not a TrainerError is a bug and exits with 1.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from trainer.redact import redacted


class TrainerError(Exception):
    """Base of every error that is reported in one block, without a traceback."""

    exit_code = 1
    kind = "error"


class ConfigError(TrainerError):
    exit_code = 2
    kind = "configuration"


class DataError(TrainerError):
    exit_code = 3
    kind = "data"


class ModelError(TrainerError):
    exit_code = 4
    kind = "model"


class StorageError(TrainerError):
    exit_code = 5
    kind = "checkpoint or disk"


class NonFiniteError(TrainerError):
    exit_code = 6
    kind = "training became non-finite"


class OutOfMemoryError(TrainerError):
    exit_code = 7
    kind = "out of memory"


class Interrupted(TrainerError):
    """Raised by a signal; the exit code is 128 + the signal's number."""

    kind = "interrupted"

    def __init__(self, signum: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + signum


def closest(word: str, allowed: Iterable[str], cutoff: float = 0.6) -> str:
    """' (did you mean X?)' for the closest allowed word, or nothing."""
    candidates = [str(a) for a in allowed]
    match = difflib.get_close_matches(word, candidates, n=1, cutoff=cutoff)
    return f" (did you mean {match[0]}?)" if match else ""


def excerpt(text: str, most: int = 300) -> str:
    """The text, or its first characters and how many there are."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def listing(problems: list[str]) -> str:
    """One problem as it is, several as a bulleted list."""
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} problems:", *(f"  - {p}" for p in problems)])


_UNSHOWABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1: a terminal obeys these
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # bidirectional controls and line separators (Unicode 23.2)
    "\ud800-\udfff]"  # lone surrogates: bytes of a file name that are no UTF-8
)


def visible(text: str) -> str:
    """What others wrote (rows, names, answers), as a screen may show it: what a terminal obeys, or what turns the text
    around it, is written as \\x1b or \\u202e; a secret as ***."""
    return _UNSHOWABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), redacted(text))


def in_json(text: str) -> str:
    """JSON text with those characters as JSON's own escapes: it means the same."""
    return _UNSHOWABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class PlanError(TrainerError):
    """Memory that cannot be predicted: a warning, never the end of a run."""

    @classmethod
    def of(cls, what: str, error: BaseException) -> PlanError:
        """Names the option and what it failed of."""
        first = (str(error).strip() or "no reason given").splitlines()[0]
        return cls(f"{what} could not be traced without weights: {type(error).__name__}: {first}")
