"""Rows of files, each with the place it stands at, read a piece at a time whatever the size of the file.

A piece is what one process works on: lines that are parsed where they are tokenised, or rows that could only be read
in order.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from trainer.data.sources.files import BROKEN, DataFile
from trainer.data.sources.row import Row
from trainer.data.sources.strict_json import NotJson, decode, decode_from
from trainer.data.sources.tabular import arrow_rows, csv_rows, parquet_rows
from trainer.errors import DataError

PIECE_BYTES = 1 << 20
"""Bytes read at once, and about the size of a piece."""

PIECE_ROWS = 1000

MAX_LINE_BYTES = 256 << 20
"""A longer line is no row of text but a broken file, and would fill the memory."""


@dataclass(frozen=True)
class Lines:
    """Whole lines of a text file, not yet parsed."""

    name: str
    kind: str
    """jsonl or txt"""
    first: int
    """number of the first line, from 1"""
    content: bytes
    offset: int = 0
    """where the content begins in the file, bytes; reading can start again there"""

    def rows(self) -> Iterator[Row]:
        """The rows; blank lines are none. Raises DataError for a JSON array under a wrong name."""
        read = _json_line if self.kind == "jsonl" else _text_line
        for position, (number, line) in enumerate(self.lines()):
            yield read(f"{self.name}:{number}", self.first == 1 and position == 0, line)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Number and content of each line that is not blank."""
        lines = enumerate(self.content.split(b"\n"), start=self.first)
        return ((number, line) for number, line in lines if line.strip())


@dataclass(frozen=True)
class Rows:
    """Rows that are read already."""

    items: list[Row]

    def rows(self) -> Iterator[Row]:
        return iter(self.items)


Piece = Lines | Rows


def read_pieces(file: DataFile) -> Iterator[Piece]:
    """The file, a piece at a time. Raises DataError."""
    try:
        with file.open() as stream:
            yield from _READERS[file.kind](file, stream)
    except BROKEN as error:  # a cut or broken archive
        raise DataError(f"{file.name}: cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def in_pieces(rows: Iterable[Row]) -> Iterator[Rows]:
    """Rows in pieces of a thousand."""
    items: list[Row] = []
    for row in rows:
        items.append(row)
        if len(items) == PIECE_ROWS:
            yield Rows(items)
            items = []
    if items:
        yield Rows(items)


def read_again(file: DataFile, piece: Lines) -> Iterator[Lines]:
    """An uncompressed text file from one of its pieces on: the same pieces as read_pieces gives. Raises DataError."""
    try:
        with file.open() as stream:
            yield from _lines(file, stream, piece.offset, piece.first)
    except OSError as error:
        raise DataError(f"{file.name}: cannot be read: {error.strerror}.") from None


def _lines(file: DataFile, stream: IO[bytes], offset: int = 0, number: int = 1) -> Iterator[Lines]:
    """Blocks of the file cut at the last newline; a line longer than a block is put together from several.

    Blocks end at multiples of PIECE_BYTES, so that the pieces are the same wherever reading begins.
    """
    if offset:
        stream.seek(offset)
        begun, held = offset, []
    else:
        begun, held = 3, [stream.read(3).removeprefix(b"\xef\xbb\xbf")]
    size = 0
    while block := stream.read(PIECE_BYTES - begun % PIECE_BYTES):
        begun += len(block)
        cut = block.rfind(b"\n") + 1
        if not cut:
            held.append(block)
            size += len(block)
            if size > MAX_LINE_BYTES:
                raise DataError(f"{file.name}:{number}: a line of over {MAX_LINE_BYTES >> 20} MiB.")
            continue
        content = b"".join([*held, block[:cut]])
        yield Lines(file.name, file.kind, number, content, offset)
        number += content.count(b"\n")
        held, size = [block[cut:]], len(block) - cut
        offset = begun - size
    if rest := b"".join(held):
        yield Lines(file.name, file.kind, number, rest, offset)


def _json_line(where: str, begins: bool, line: bytes) -> Row:
    """`begins`: the file begins with it, but for blank lines."""
    try:
        value = json_value(line)
    except NotJson as error:
        if begins and line.strip() == b"[":
            raise DataError(f"{where}: a JSON array, not JSON lines. Rename the file to end in .json.") from None
        if begins and line.strip() == b"{":
            raise DataError(
                f"{where}: an object over several lines, not one a line. Wrap it in [ ], with a comma between objects, "
                "in a file that ends in .json."
            ) from None
        return Row(where, None, str(error))
    if begins and isinstance(value, list):
        raise DataError(f"{where}: a JSON array, not JSON lines. Rename the file to end in .json.")
    return _row(where, value)


def json_value(line: bytes) -> Any:
    """The value of a line. Raises NotJson."""
    try:
        return decode(text_of(line))
    except json.JSONDecodeError as error:
        raise NotJson(f"not JSON: {error.msg} (column {error.colno})") from None


def _text_line(where: str, begins: bool, line: bytes) -> Row:
    try:
        return Row(where, {"text": text_of(line).rstrip("\r")})
    except NotJson as error:
        return Row(where, None, str(error))


def _json(file: DataFile, stream: IO[bytes]) -> Iterator[Piece]:
    """A JSON array of objects; a file that does not begin with [ is JSON lines."""
    head = stream.read(PIECE_BYTES)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    again = _Rejoined(head, stream)
    return (
        in_pieces(_array(file, again))
        if start == b"["
        else _lines(DataFile(file.path, file.name, "jsonl", None), again)
    )


class _Rejoined:
    """A stream whose first block has been looked at."""

    def __init__(self, head: bytes, stream: IO[bytes]):
        self._head, self._stream = head, stream

    def read(self, size: int) -> bytes:
        if self._head:
            taken, self._head = self._head[:size], self._head[size:]
            return taken
        return self._stream.read(size)


class _JsonWindow:
    """The part of a JSON text that is being parsed; grows while a value does not end in it."""

    def __init__(self, file: DataFile, stream: _Rejoined):
        self.file, self.stream = file, stream
        self.text, self.position, self.line, self.ended = "", 0, 1, False
        self._undecoded = b""

    def more(self) -> None:
        """Drops what is behind and reads at least as much again as is left, so that long values cost linear time."""
        self.line += self.text.count("\n", 0, self.position)
        self.text, self.position = self.text[self.position :], 0
        block = self._undecoded + self.stream.read(max(PIECE_BYTES, len(self.text)))
        self.ended = len(block) == len(self._undecoded)
        try:
            text, self._undecoded = block.decode("utf-8"), b""
        except UnicodeDecodeError as error:
            cut = not self.ended and len(block) - error.start < 4
            if not cut:
                line = self.line + self.text.count("\n") + block[: error.start].count(b"\n")
                raise DataError(f"{self.file.name}:{line}: {_not_utf8(block, error.start)}.") from None
            text, self._undecoded = block[: error.start].decode("utf-8"), block[error.start :]
        self.text += text

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            while self.position < len(self.text) and self.text[self.position] in " \t\r\n\ufeff":
                self.position += 1
            if self.position < len(self.text) or self.ended:
                return self.text[self.position : self.position + 1]
            self.more()

    def where(self, position: int) -> int:
        """Line of a position."""
        return self.line + self.text.count("\n", 0, position)


def _array(file: DataFile, stream: _Rejoined) -> Iterator[Row]:
    """A JSON array of objects. Broken syntax ends the file, so it is an error whatever on_bad_row says."""
    window = _JsonWindow(file, stream)
    window.peek()
    window.position += 1
    if window.peek() == "]":
        return
    while True:
        window.peek()
        value, where = _element(window)
        yield _row(where, value)
        separator = window.peek()
        place = f"{file.name}:{window.where(window.position)}"
        window.position += 1
        if separator == "]":
            if rest := window.peek():
                raise DataError(f"{place}: text after the end of the JSON array, beginning with {rest!r}.")
            return
        if separator != ",":
            raise DataError(f"{place}: not JSON: expected ',' or ']' after a row.")


def _element(window: _JsonWindow) -> tuple[Any, str]:
    while True:
        line = window.where(window.position)
        where = f"{window.file.name}:{line}"
        try:
            value, end = decode_from(window.text, window.position)
        except json.JSONDecodeError as error:
            at_end = error.pos >= len(window.text) - 16 or error.msg.startswith("Unterminated string")
            if at_end and not window.ended:
                window.more()
                continue
            column = error.pos - window.text.rfind("\n", 0, error.pos)
            place = f"{window.file.name}:{window.where(error.pos)}"
            raise DataError(f"{place}: not JSON: {error.msg} (column {column}).") from None
        except NotJson as error:
            raise DataError(f"{where}: {error}.") from None
        window.position = end
        return value, where


def _table(file: DataFile, stream: IO[bytes]) -> Iterator[Piece]:
    """csv and tsv with a header; every value is text."""
    return in_pieces(csv_rows(file.name, stream, "," if file.kind == "csv" else "\t"))


def _columns(file: DataFile, stream: IO[bytes]) -> Iterator[Piece]:
    """parquet and arrow."""
    if not stream.seekable():
        stream = io.BytesIO(stream.read())
    return in_pieces((parquet_rows if file.kind == "parquet" else arrow_rows)(file.name, stream))


def _row(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        return Row(where, None, f"a row must be an object with named fields, not {type(value).__name__}")
    return Row(where, value)


def text_of(content: bytes) -> str:
    """Raises NotJson for bytes that are no text."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotJson(_not_utf8(content, error.start)) from None


def _not_utf8(content: bytes, position: int) -> str:
    in_line = position - content.rfind(b"\n", 0, position)
    return f"not UTF-8: byte 0x{content[position]:02x} at byte {in_line}"


_READERS = {
    "json": _json,
    "jsonl": _lines,
    "txt": _lines,
    "csv": _table,
    "tsv": _table,
    "parquet": _columns,
    "arrow": _columns,
}
