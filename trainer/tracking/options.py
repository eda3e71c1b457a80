"""Options of the group `track`: where metrics go besides metrics.jsonl and the screen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from trainer.config.registry import option


class Mode(Enum):
    auto = "auto"
    online = "online"
    offline = "offline"


class Tracker(Protocol):
    """What a run tells a tracking service. Its failures never reach the run."""

    def log(self, row: dict[str, Any]) -> None:
        """One row of metrics, as in metrics.jsonl."""

    def finish(self, summary: dict[str, Any]) -> None:
        """The run's end; `summary` as in summary.json."""


@dataclass
class Track(ABC):
    """Where metrics go besides the run folder."""

    @abstractmethod
    def build(self, run_dir: Path, run_id: str, config: dict[str, Any]) -> Tracker | None:
        """The tracker of this run; `run_id` is the same after a resume, `config` is free of secrets."""


@option("track", "local")
@dataclass
class Local(Track):
    """Only the run folder."""

    def build(self, run_dir, run_id, config):
        return None


@option("track", "wandb")
@dataclass
class WandB(Track):
    """Weights & Biases; its files lie in the run folder."""

    project: str
    """project in W&B"""
    name: str | None
    """the run's name; null: the run folder's"""
    mode: Mode
    """auto: online with an API key, offline without one"""

    def build(self, run_dir, run_id, config):
        from trainer.tracking.wandb import WandBTracker

        return WandBTracker(self, run_dir, run_id, config)
