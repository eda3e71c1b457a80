"""Options of the group `search`: which trials a sweep makes, and by what they are compared."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, ClassVar

from trainer.ranges import AT_LEAST_1
from trainer.registry import Section, option

LIBRARY = "optuna"


class Metric(Enum):
    """What of a run's summary is made small."""

    auto = "auto"
    eval_loss = "eval_loss"
    best_eval_loss = "best_eval_loss"
    final_loss = "final_loss"
    peak_memory_gib = "peak_memory_gib"
    wall_seconds = "wall_seconds"

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of the summary, the first of which that has a value counts."""
        return ("eval_loss", "final_loss") if self is Metric.auto else (self.value,)


@dataclass
class Search(Section):
    """Which trials a sweep makes, and which is the best."""

    metric: Metric
    """what is minimised: auto is the held-out loss, or the training loss where nothing is held out"""

    draws: ClassVar[bool] = False
    """whether the values of a trial follow from the trials before it; else all combinations are tried"""


@option("search", "grid")
@dataclass
class Grid(Search):
    """All combinations."""


@option("search", "optuna")
@dataclass
class Optuna(Search):
    """Optuna's tree-structured Parzen estimator (Bergstra et al. 2011) draws from intervals and choices."""

    trials: Annotated[int, AT_LEAST_1]
    """trials in all"""
    parallel: Annotated[int, AT_LEAST_1]
    """trials that the launcher gets at once; Hydra's own makes them one after the other all the same"""
    random_trials: Annotated[int, AT_LEAST_1]
    """first trials, whose values are drawn at random"""
    prune_after: Annotated[int | None, AT_LEAST_1]
    """completed trials from which on a trial is ended at an evaluation where its best held-out loss is worse than the
    median of theirs at that step; null: never"""

    draws = True

    def problems(self, config):
        if importlib.util.find_spec(LIBRARY) is not None:
            return []
        return [f"search=optuna: needs the library {LIBRARY}, which is not installed: pip install 'trainer[sweeps]'"]
