"""metrics.jsonl: one JSON object a line, appended and flushed, so that a killed run keeps what it wrote."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.atomic import write_atomically


class Metrics:
    """Appends rows to a run's metrics.jsonl."""

    def __init__(self, file: Path):
        self._path = file
        self._file = file.open("a", encoding="utf-8")
        if file.stat().st_size and not _ends_with_newline(file):
            self._file.write("\n")  # a kill in mid-write leaves half a line; it must not swallow the next

    def write(self, event: str, **values: Any) -> dict[str, Any]:
        """Writes one row and returns it. What is not finite becomes null: NaN is no JSON."""
        row = {"event": event, **{key: _json(value) for key, value in values.items()}, "time": time.time()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        return row

    def keep_only(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Takes back the other rows, whose steps are made again. The file has all its rows or these, never a part."""
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [row for row in read_metrics(self._path) if wanted(row)]
        if len(kept) == len(lines):
            return
        self._file.close()
        write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = self._path.open("a", encoding="utf-8")

    def sync(self) -> None:
        """What was written is on the disk: before a checkpoint, from which a resumed run goes on."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # a row that a full disk refused is flushed again by closing, and refused again
            self._file.close()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """All whole rows, in the order they were written."""
    rows = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):  # the half line of a killed run
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def _json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _ends_with_newline(file: Path) -> bool:
    with file.open("rb") as handle:
        handle.seek(-1, 2)
        return handle.read(1) == b"\n"
