"""What a run folder says of its run. Each file may be missing or another's: a report shows what is there."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from trainer.config.saved import CONFIG, OVERRIDES
from trainer.tracking.metrics import read_metrics
from trainer.tracking.run_folder import DATA_REPORT


@dataclass(frozen=True)
class RunRecord:
    """The files of a run folder, read."""

    folder: Path
    rows: dict[str, list[dict[str, Any]]]
    """of metrics.jsonl by event, in the order of their steps; of several for a step the last"""
    config: dict[str, Any] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        names = {"manifest": "manifest.json", "plan": "plan.json", "summary": "summary.json", "data": DATA_REPORT}
        contents = {key: _read(folder / name, dict) for key, name in names.items()}
        return cls(
            folder,
            _by_event(folder / "metrics.jsonl"),
            config=_read(folder / CONFIG, dict),
            overrides=_read(folder / OVERRIDES, list),
            **contents,
        )

    def series(self, event: str, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of one quantity, where it is a finite number."""
        pairs = [(row["step"], row.get(name)) for row in self.rows.get(event, [])]
        found = [(float(step), float(value)) for step, value in pairs if is_number(value)]
        return [step for step, _ in found], [value for _, value in found]

    def setting(self, section: str, name: str) -> Any:
        """A value of config.yaml, or None."""
        values = self.config.get(section)
        return values.get(name) if isinstance(values, dict) else None


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _by_event(file: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, dict[Any, dict[str, Any]]] = {}
    if file.is_file():
        for number, row in enumerate(read_metrics(file)):
            if not is_number(row.get("step")):
                continue
            key = (row["step"], number if row.get("event") == "retreat" else 0)  # of these a step may have several
            found.setdefault(str(row.get("event")), {})[key] = row
    return {event: sorted(rows.values(), key=lambda row: row["step"]) for event, rows in found.items()}


def _read(file: Path, kind: type) -> Any:
    """The content of a JSON or YAML file, empty where there is none of this kind."""
    load = json.loads if file.suffix == ".json" else yaml.safe_load
    with suppress(OSError, ValueError, yaml.YAMLError):
        content = load(file.read_text(encoding="utf-8"))
        if isinstance(content, kind):
            return content
    return kind()
