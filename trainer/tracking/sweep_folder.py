"""A sweep's folder: one subfolder a trial, and sweep.jsonl with how each trial ended."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.errors import StorageError
from trainer.tracking.metrics import read_metrics
from trainer.tracking.run_folder import RunFolder, check_writable

RECORD = "sweep.jsonl"
HYDRAS = "multirun.yaml"
"""What Hydra writes first into a sweep's folder."""


@dataclass(frozen=True)
class Trial:
    """How one trial ended; a row of sweep.jsonl."""

    trial: int
    """its number, from 0"""
    folder: str
    """its run folder"""
    overrides: list[str]
    status: str
    """completed, or in words what else happened"""
    exit_code: int
    metric: float | None
    """what the sweep compares; None where there is no finite number"""
    metric_name: str | None
    """eval_loss, or final_loss without held-out data"""


class SweepFolder(RunFolder):
    """A folder that this process, and no other, runs a sweep into."""

    def check(self) -> None:
        """Raises StorageError for a folder that holds something other than a sweep, or that cannot be written."""
        check_writable(self.path)
        if not self.path.is_dir():
            return
        others = sorted(entry.name for entry in self.path.iterdir() if entry.name != ".lock")
        if others and HYDRAS not in others:
            raise StorageError(
                f"output_dir={self.path}: the folder holds other things ({', '.join(others[:3])}) and no sweep. "
                "Choose a new or empty folder."
            )

    def record(self, trial: Trial) -> None:
        """Appends a row; of several for a trial the last counts."""
        with self.file(RECORD).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(trial), ensure_ascii=False) + "\n")

    def trials(self) -> dict[int, Trial]:
        """The trials that have been run, by number."""
        if not self.file(RECORD).is_file():
            return {}
        return {row["trial"]: Trial(**row) for row in read_metrics(self.file(RECORD))}


def metric_of(run_dir: Path) -> tuple[str | None, float | None]:
    """Name and value of what a sweep compares, from the summary of a run: the held-out loss, or the training loss."""
    summary = RunFolder(run_dir).summary() or {}
    for name in ("eval_loss", "final_loss"):
        value = summary.get(name)
        if value is not None:
            return name, value if math.isfinite(value) else None
    return None, None
