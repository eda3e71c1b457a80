"""Memory of one run: what was predicted for it, and the policy and micro-batch that checkpointing=auto chose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from trainer.memory.fit import Fit, fit
from trainer.memory.predict.moments import Prediction
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.profile import Shape
from trainer.model.checkpointing import Auto, Checkpointing

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trainer.config.schema import Config
    from trainer.data.batches.loader import TrainingSteps
    from trainer.data.batches.streamed_steps import StreamedSteps
    from trainer.model.precision import Dtypes
    from trainer.training.train_settings import Train


@dataclass(frozen=True)
class RunMemory:
    """The plan that a run starts with."""

    planner: Planner
    prediction: Prediction
    policy: Checkpointing
    train: Train
    """the loop's settings, with the micro-batch that fits"""
    fit: Fit | None


def plan_run(config: Config, model_config: PretrainedConfig, dtypes: Dtypes, steps: TrainingSteps | None) -> RunMemory:
    """Predicts with the largest micro-batch that the data really makes; without steps, that the settings allow."""
    planner = Planner(config, model_config, largest_micro_batch(steps) if steps is not None else None, dtypes)
    chosen, policy, train = None, config.offload.policy(config.checkpointing), config.train
    if isinstance(config.checkpointing, Auto):
        chosen = fit(planner, config.memory.budget_gib)
        policy = chosen.policy
        if chosen.micro_batch_tokens != train.micro_batch_tokens:
            train = replace(
                train,
                micro_batch_tokens=chosen.micro_batch_tokens,
                accumulation_steps=chosen.accumulation_steps,
            )
            planner.shape = planner.shape.scaled(chosen.micro_batch_tokens)
    return RunMemory(planner, planner.predict(policy), policy, train, chosen)


def largest_micro_batch(steps: TrainingSteps | StreamedSteps) -> Shape:
    """The sizes of the largest micro-batch there will be."""
    tokens, rows = steps.fullest()
    targets = sum(int(np.asarray(tokens.sample(index)[1])[1:].sum()) for index in rows)
    return Shape(tuple(int(length) for length in tokens.lengths[rows]), max(targets, 1), steps.packing.packed)
