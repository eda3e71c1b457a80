"""Rows of json and jsonl files, each with the line it stands on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import DataError
from trainer.resources import resolve


@dataclass(frozen=True)
class Row:
    """One row, or the reason why it is none."""

    where: str
    """file:line"""
    fields: dict[str, Any] | None
    problem: str | None = None


def read_rows(path: str, key: str) -> Iterator[Row]:
    """The rows of a json or jsonl file; `key` names the setting that `path` came from."""
    file = Path(resolve(path))
    if not file.exists():
        raise DataError(f"{key}={path}: there is no such file.")
    if not file.is_file():
        raise DataError(f"{key}={path}: is not a regular file. Give a json or jsonl file.")
    if file.suffix not in (".json", ".jsonl"):
        raise DataError(f"{key}={path}: unknown kind of file {file.suffix or '(no ending)'}. Allowed: .json, .jsonl.")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{key}={path}: cannot be read: {error.strerror}.") from None
    content = content.removeprefix(b"\xef\xbb\xbf")
    if not content.strip():
        raise DataError(f"{key}={path}: the file is empty.")
    if file.suffix == ".json" and content.lstrip()[:1] == b"[":
        return _array(path, content)
    return _lines(path, content)


def _lines(path: str, content: bytes) -> Iterator[Row]:
    """JSON lines: one object a line, blank lines skipped."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(_text(line), parse_constant=_no_constant)
        except _BadText as error:
            yield Row(where, None, str(error))
        except json.JSONDecodeError as error:
            yield Row(where, None, f"not JSON: {error.msg} (column {error.colno})")
        else:
            if (number == 1 and isinstance(value, list)) or line.strip() == b"[":
                raise DataError(f"{where}: a JSON array, not JSON lines. Rename the file to end in .json.")
            yield _row(where, value)


def _array(path: str, content: bytes) -> Iterator[Row]:
    """A JSON array of objects. Broken syntax ends the file, so it is an error whatever on_bad_row says."""
    try:
        text = _text(content)
    except _BadText as error:
        line = content[: error.position].count(b"\n") + 1
        raise DataError(f"{path}:{line}: {error}.") from None
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    position, line, counted = text.index("[") + 1, 1, 0
    first = True
    while True:
        position = _skip_space(text, position)
        if text[position : position + 1] == "]" and first:
            return
        line += text.count("\n", counted, position)
        counted = position
        where = f"{path}:{line}"
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno}).") from None
        except _BadText as error:
            raise DataError(f"{where}: {error}.") from None
        yield _row(where, value)
        first = False
        position = _skip_space(text, position)
        separator = text[position : position + 1]
        if separator == "]":
            rest = text[position + 1 :].strip()
            if rest:
                raise DataError(f"{path}: text after the end of the JSON array: {rest[:40]!r}.")
            return
        if separator != ",":
            line += text.count("\n", counted, position)
            raise DataError(f"{path}:{line}: not JSON: expected ',' or ']' after a row.")
        position += 1


def _row(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        return Row(where, None, f"a row must be an object with named fields, not {type(value).__name__}")
    return Row(where, value)


class _BadText(ValueError):
    position = 0


def _text(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = _BadText(f"not UTF-8: byte 0x{content[error.start]:02x} at byte {error.start + 1}")
        bad.position = error.start
        raise bad from None


def _no_constant(name: str) -> None:
    raise _BadText(f"not JSON: {name} is no JSON value")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position
