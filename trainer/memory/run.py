"""Memory of one run: what was predicted for it, and the policy and micro-batch that checkpointing=auto chose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from trainer.memory.fit import Fit, fit
from trainer.memory.plan import Planner
from trainer.memory.predict import Prediction
from trainer.memory.profile import Shape
from trainer.model.checkpointing import Auto, Checkpointing

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trainer.config.schema import Config, Train
    from trainer.data.loader import TrainingSteps
    from trainer.model.precision import Dtypes


@dataclass(frozen=True)
class RunMemory:
    """The plan that a run starts with."""

    planner: Planner
    prediction: Prediction
    policy: Checkpointing
    train: Train
    """the loop's settings, with the micro-batch that fits"""
    fit: Fit | None


def plan_run(config: Config, model_config: PretrainedConfig, dtypes: Dtypes, steps: TrainingSteps) -> RunMemory:
    """Predicts with the largest micro-batch that the data really makes."""
    planner = Planner(config, model_config, largest_micro_batch(steps), dtypes)
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


def largest_rows(steps: TrainingSteps) -> np.ndarray:
    """Sample indices of the first epoch's largest micro-batch."""
    lengths = steps.tokens.lengths

    def size(rows: np.ndarray) -> tuple[int, int]:
        longest = int(lengths[rows].max())
        computed = int(lengths[rows].sum()) if steps.packing.packed else longest * len(rows)
        return computed, longest

    return max(steps.micro_batches(0), key=size)


def largest_micro_batch(steps: TrainingSteps) -> Shape:
    """Its sizes."""
    rows = largest_rows(steps)
    targets = 0
    for index in rows:
        _, is_target = steps.tokens.sample(index)
        targets += int(np.asarray(is_target)[1:].sum())
    lengths = tuple(int(length) for length in steps.tokens.lengths[rows])
    return Shape(lengths, max(targets, 1), steps.packing.packed)
