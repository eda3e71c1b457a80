"""JSON as RFC 8259 has it, and as text that a tokenizer can take: no NaN, no half characters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any


class NotJson(ValueError):
    """Why a text is no JSON that a row can hold, in a user's words."""


def decode(text: str) -> Any:
    """The value of a whole text. Raises NotJson, or json.JSONDecodeError where the syntax is broken."""
    value = _limited(_DECODER.decode, text)
    if _HALF.search(text):
        _refuse_halves(value)
    return value


def decode_from(text: str, position: int) -> tuple[Any, int]:
    """The value that begins there, and where it ends. Raises as `decode` does."""
    value, end = _limited(_DECODER.raw_decode, text, position)
    if _HALF.search(text, position, end):
        _refuse_halves(value)
    return value, end


def problem(error: ValueError) -> str:
    """What is wrong, without the place in a long text."""
    return f"not JSON: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)


def _limited(read: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return read(*arguments)
    except (json.JSONDecodeError, NotJson):
        raise
    except RecursionError:
        raise NotJson("not JSON: nested too deeply") from None
    except ValueError:  # Python's limit, against numbers that take quadratic time
        raise NotJson("not JSON: an integer of over 4,300 digits") from None


def _refuse_halves(value: Any) -> None:
    """Raises NotJson for a surrogate without its other half: no text, and no tokenizer takes it."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise NotJson(f"not text: \\u{half:04x} is half of a character, without its other half") from None


def _no_constant(name: str) -> None:
    raise NotJson(f"not JSON: {name} is no JSON value")


_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_DECODER = json.JSONDecoder(parse_constant=_no_constant)
"""Made once: json.loads makes one a call where it is given an argument."""
