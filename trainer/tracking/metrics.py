"""metrics.jsonl: one JSON object a line, appended and flushed, so that a killed run keeps what it wrote."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


class Metrics:
    """Appends rows to a run's metrics.jsonl."""

    def __init__(self, file: Path):
        self._file = file.open("a", encoding="utf-8")
        if file.stat().st_size and not _ends_with_newline(file):
            self._file.write("\n")  # a kill in mid-write leaves half a line; it must not swallow the next

    def write(self, event: str, **values: Any) -> dict[str, Any]:
        """Writes one row and returns it. What is not finite becomes null: NaN is no JSON."""
        row = {"event": event, **{key: _json(value) for key, value in values.items()}, "time": time.time()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        return row

    def close(self) -> None:
        with suppress(OSError):  # a row that a full disk refused is flushed again by closing, and refused again
            self._file.close()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """All whole rows, in the order they were written."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the half line of a killed run
    return rows


def _json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _ends_with_newline(file: Path) -> bool:
    with file.open("rb") as handle:
        handle.seek(-1, 2)
        return handle.read(1) == b"\n"
