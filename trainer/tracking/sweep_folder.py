"""A sweep's folder: one subfolder a trial, sweep.jsonl with how each trial ended, results.json and results.csv."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from trainer.atomic import write_atomically
from trainer.errors import StorageError
from trainer.redact import redacted
from trainer.tracking.metrics import read_metrics
from trainer.tracking.run_folder import RunFolder, check_writable
from trainer.tracking.search import Metric

RECORD = "sweep.jsonl"
COMPLETED, PRUNED, UNFIT = "completed", "pruned", "does not fit"
MEMORY = ("peak_memory_gib", "predicted_peak_memory_gib", "rss_peak_gib")
"""Of a run's summary."""
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
    """completed, pruned, does not fit, or in words what else happened"""
    exit_code: int
    metric: float | None
    """what the sweep compares; None where there is no finite number"""
    metric_name: str | None
    """which key of the run's summary that is"""
    memory: dict[str, float | None] = field(default_factory=dict)
    """GiB of the run's summary, by key; empty where it has none"""

    @property
    def settled(self) -> bool:
        """Whether there is nothing left to do."""
        return self.status in (COMPLETED, PRUNED)


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

    def write_results(self, trials: list[Trial], best: Trial | None) -> None:
        """results.json and results.csv: of each trial how it ended, what it reached, what it was and what it held."""
        rows = [asdict(trial) for trial in trials]
        self.write("results.json", {"best": None if best is None else asdict(best), "trials": rows})
        names = [f.name for f in fields(Trial) if f.name != "memory"]
        flat = [
            {**{n: row[n] for n in names}, **row["memory"], "overrides": " ".join(row["overrides"])} for row in rows
        ]
        text = io.StringIO()
        writer = csv.DictWriter(text, [*names, *MEMORY], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        write_atomically(self.file("results.csv"), redacted(text.getvalue()))


def memory_of(run_dir: Path) -> dict[str, float | None]:
    """What a run held and was predicted to hold, GiB, from its summary."""
    summary = RunFolder(run_dir).summary() or {}
    return {name: summary[name] for name in MEMORY if name in summary}


def metric_of(run_dir: Path, metric: Metric = Metric.auto) -> tuple[str | None, float | None]:
    """Name and value of what a sweep compares, from the summary of a run."""
    summary = RunFolder(run_dir).summary() or {}
    for name in metric.names:
        value = summary.get(name)
        if value is not None:
            return name, value if math.isfinite(value) else None
    return None, None
