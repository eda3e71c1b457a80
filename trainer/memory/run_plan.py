"""Memory of one run: what was predicted for it, and the policy and micro-batch that checkpointing=auto chose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from trainer.errors import PlanError
from trainer.memory.fit import Fit, fit
from trainer.memory.predict.moments import Prediction
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.profile import Shape
from trainer.memory.predict.speed import recomputed_share
from trainer.model.checkpointing import Checkpointing

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trainer.data.batches.loader import TrainingSteps
    from trainer.data.batches.streamed_steps import StreamedSteps
    from trainer.memory.predict.sections import Sections
    from trainer.model.precision import Dtypes
    from trainer.training.train_settings import Train


@dataclass(frozen=True)
class RunMemory:
    """The plan that a run starts with."""

    planner: Planner
    prediction: Prediction | None
    """None where it cannot be made"""
    policy: Checkpointing
    train: Train
    """the loop's settings, with the micro-batch that fits"""
    fit: Fit | None
    unplanned: str | None = None
    """why there is no prediction"""

    @property
    def elsewhere(self) -> int:
        """Bytes that lie in host memory or on disk; 0 where it is not known."""
        return self.planner.elsewhere(self.policy) if self.prediction is not None else 0

    @property
    def recomputed(self) -> float:
        """Share of the blocks' forward arithmetic that runs again; 0 where it is not known."""
        return recomputed_share(self.planner, self.policy) if self.prediction is not None else 0.0


def plan_run(
    config: Sections, model_config: PretrainedConfig, dtypes: Dtypes, steps: TrainingSteps | None
) -> RunMemory:
    """Predicts with the largest micro-batch that the data really makes; without steps, that the settings allow.

    What cannot be planned runs all the same, without a prediction; where a policy was to be chosen, the last resort.
    """
    planner = Planner(config, model_config, largest_micro_batch(steps) if steps is not None else None, dtypes)
    chosen, ladder, train = None, config.checkpointing.ladder(), config.train
    try:
        if ladder is not None:
            chosen = fit(planner, config.memory.budget_gib)
            planner = planner.changed(checkpointing=chosen.policy)
            if chosen.micro_batch_tokens != train.micro_batch_tokens:
                train = replace(
                    train,
                    micro_batch_tokens=chosen.micro_batch_tokens,
                    accumulation_steps=chosen.accumulation_steps,
                )
                planner.shape = planner.shape.scaled(chosen.micro_batch_tokens)
        return RunMemory(planner, planner.predict(), planner.policy, train, chosen)
    except PlanError as error:
        if ladder is not None:
            planner = planner.changed(checkpointing=ladder[-1])
        return RunMemory(planner, None, planner.policy, config.train, None, str(error))


def largest_micro_batch(steps: TrainingSteps | StreamedSteps) -> Shape:
    """The sizes of the largest micro-batch there will be."""
    tokens, rows = steps.fullest()
    targets = sum(int(np.asarray(tokens.sample(index)[1])[1:].sum()) for index in rows)
    return Shape(tuple(int(length) for length in tokens.lengths[rows]), max(targets, 1), steps.packing.packed)
