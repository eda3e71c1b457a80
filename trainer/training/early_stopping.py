"""When a run ends before its last step: its held-out loss no longer falls."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.errors import ConfigError
from trainer.training.evaluate import Evaluation
from trainer.training.state import State

METRIC = "eval_loss"


@dataclass(frozen=True)
class EarlyStopping:
    """What it counts lies in the run's state: a resumed run stops where the whole one does."""

    patience: int | None
    """evaluations in a row without a new lowest value; None: never stops"""
    metric: str
    """eval_loss, or eval_loss/NAME of a source: as in the rows of metrics"""

    def note(self, result: Evaluation, state: State) -> None:
        """Of an evaluation after the first step. Raises ConfigError where it has no such metric."""
        if self.patience is None:
            return
        values = {METRIC: result.loss} | {f"{METRIC}/{source}": loss for source, loss in result.by_source.items()}
        if self.metric not in values:
            raise ConfigError(
                f"train.early_stopping_metric={self.metric}: this run measures {', '.join(values)}. Name one of them."
            )
        value = values[self.metric]
        if state.stopping_best is None or value < state.stopping_best:
            state.stopping_best, state.stale_evaluations = value, 0
        else:
            state.stale_evaluations += 1

    def due(self, state: State) -> bool:
        return self.patience is not None and state.stale_evaluations >= self.patience
