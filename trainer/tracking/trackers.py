"""The group `track`: where metrics go besides metrics.jsonl and the screen. Each service has a file with its option."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.registry import Section, option


class Tracker(Protocol):
    """What a run tells a tracking service. Its failures never reach the run."""

    @property
    def where(self) -> str:
        """One line for the screen: where the run can be seen, and what went wrong with that."""

    def identify(self, manifest: dict[str, Any]) -> None:
        """Model, data, hardware and versions, as in manifest.json; known once the weights are there."""

    def log(self, row: dict[str, Any]) -> None:
        """One row of metrics, as in metrics.jsonl."""

    def finish(self, summary: dict[str, Any]) -> None:
        """The run's end; `summary` as in summary.json."""


IDENTITY = ("model", "model_revision", "weights", "data_hash", "seed", "hardware", "versions", "git_commit")
"""Keys of the manifest that a tracking service gets."""

SUMMARY = (
    "status",
    "steps",
    "num_tokens",
    "num_targets",
    "skipped_steps",
    "outlier_steps",
    "stopped_early",
    "final_loss",
    "first_eval_loss",
    "eval_loss",
    "best_eval_loss",
    "best_step",
    "tokens_per_second",
    "peak_memory_gib",
    "predicted_peak_memory_gib",
    "rss_peak_gib",
    "trainable_parameters",
    "total_parameters",
    "wall_seconds",
)
"""Keys of the summary that a tracking service gets: numbers and the status, never answers or messages."""


@dataclass
class Track(Section, ABC):
    """Where metrics go besides the run folder."""

    @abstractmethod
    def build(self, run_dir: Path, run_id: str, config: dict[str, Any]) -> Tracker | None:
        """The tracker of this run; `run_id` is the same after a resume, `config` is free of secrets."""

    def other_host(self) -> str | None:
        """The address that it sends to, where that is another than the service's own."""
        return None


@option("track", "local")
@dataclass
class Local(Track):
    """Only the run folder."""

    def build(self, run_dir, run_id, config):
        return None
