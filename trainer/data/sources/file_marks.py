"""Whether a file is the one that it was, without reading it whole: for data that is too large to read twice."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.errors import DataError

END_BYTES = 1 << 16
"""Bytes at both ends of a file that are looked at."""


@dataclass(frozen=True)
class FileMark:
    """Of a file: an edit changes the time of modification, and one that puts it back is meant to go unnoticed.

    Not its inode or the time its state last changed, which a copy that keeps the time of modification has anew.
    """

    num_bytes: int
    modified_ns: int
    """since 1970"""
    ends: str
    """sha256 of the bytes at both ends"""

    @classmethod
    def of(cls, path: Path) -> FileMark:
        """Raises DataError where the file cannot be read."""
        try:
            stat = path.stat()
            with path.open("rb") as stream:
                ends = hashlib.sha256(stream.read(END_BYTES))
                stream.seek(max(0, stat.st_size - END_BYTES), os.SEEK_SET)
                ends.update(stream.read(END_BYTES))
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}.") from None
        return cls(stat.st_size, stat.st_mtime_ns, ends.hexdigest())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def modified(self) -> str:
        seconds, nanoseconds = divmod(self.modified_ns, 10**9)
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{nanoseconds:09d} UTC"


def changes(then: dict[str, FileMark], now: dict[str, FileMark]) -> list[str]:
    """The files, by name, that are not what they were, each with what is different."""
    found = []
    for name in sorted(then.keys() | now.keys()):
        old, new = then.get(name), now.get(name)
        if new is None or old is None:
            found.append(f"{name} is {'gone' if new is None else 'new'}")
        elif old.num_bytes != new.num_bytes:
            found.append(f"{name} had {old.num_bytes:,} bytes and has {new.num_bytes:,}")
        elif old.ends != new.ends:
            found.append(f"{name} holds other bytes")
        elif old != new:
            found.append(f"{name} was written again, {new.modified} instead of {old.modified}")
    return found
