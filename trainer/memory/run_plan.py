"""Memory of one run: what was predicted for it, and the policy and micro-batch that checkpointing=auto chose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.batches.loader import fullest
from trainer.data.tokens.tokenize import opening_places
from trainer.errors import OutOfMemoryError, PlanError
from trainer.memory.fit import DoesNotFitError, Fit, budget_of, fit
from trainer.memory.memory_settings import MemoryOptions, OverBudget
from trainer.memory.predict.beside_steps import HeldOut
from trainer.memory.predict.moments import Prediction
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.profile import Shape
from trainer.memory.predict.speed import recomputed_share
from trainer.model.checkpointing import Checkpointing
from trainer.training.train_settings import ANSWER_TOKENS
from trainer.units import GIB

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trainer.data.batches.loader import TrainingSteps
    from trainer.data.batches.packing import Packing
    from trainer.data.batches.streamed_steps import StreamedSteps
    from trainer.data.tokens.token_sets import Tokens, TokenSet
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
    def libraries_held(self) -> int:
        """Bytes of libraries' workspace that making the plan left in this process, and the prediction has in it."""
        return self.planner.libraries.held if self.prediction is not None else 0

    @property
    def recomputed(self) -> float:
        """Share of the blocks' forward arithmetic that runs again; 0 where it is not known."""
        return recomputed_share(self.planner, self.policy) if self.prediction is not None else 0.0


def plan_run(
    config: Sections,
    model_config: PretrainedConfig,
    dtypes: Dtypes,
    steps: TrainingSteps | None,
    held_out: Tokens | None = None,
    packing: Packing | None = None,
) -> RunMemory:
    """Predicts with the largest micro-batches that the data really makes, in training and in evaluation; without
    steps, that the settings allow. `packing`: how this model's rows are packed, where not as the settings say.

    What cannot be planned runs all the same, without a prediction; where a policy was to be chosen, the last resort.
    """

    def held_out_sizes(train: Train) -> HeldOut | None:
        return None if held_out is None else largest_held_out(held_out, packing or config.packing, train)

    shape = largest_micro_batch(steps) if steps is not None else None
    planner = Planner(config, model_config, shape, dtypes, held_out_sizes(config.train))
    chosen, ladder, train = None, config.checkpointing.ladder(), config.train
    try:
        if steps is None:
            planner = planner.with_libraries()
        else:
            planner = planner.with_libraries(steps.num_steps * train.accumulation_steps)
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
                planner.held_out = held_out_sizes(train)
        return RunMemory(planner, planner.predict(), planner.policy, train, chosen)
    except PlanError as error:
        if ladder is not None:
            planner = planner.changed(checkpointing=ladder[-1])
        return RunMemory(planner, None, planner.policy, config.train, None, str(error))


def within_budget(memory: MemoryOptions, make: Callable[[], RunMemory]) -> RunMemory:
    """The plan. Raises OutOfMemoryError where it needs more than the budget and such a run is to be refused."""
    if memory.over_budget is not OverBudget.refuse:
        return make()
    try:
        plan = make()
    except DoesNotFitError as error:
        raise OutOfMemoryError(f"memory.over_budget=refuse: {error}") from None
    if plan.prediction is not None:
        needed, budget = plan.planner.needed(plan.prediction), budget_of(plan.planner, memory.budget_gib)
        if needed > budget:
            raise OutOfMemoryError(
                f"memory.over_budget=refuse: by the plan {needed / GIB:.2f} GiB are needed, in "
                f"{plan.prediction.highest.name}, and there are {budget / GIB:.2f}. `trainer plan` shows the ways out."
            )
    return plan


def largest_micro_batch(steps: TrainingSteps | StreamedSteps) -> Shape:
    """The sizes of the largest micro-batch there will be."""
    return _shape(*steps.fullest(), steps.packing.packed)


def largest_held_out(tokens: Tokens, packing: Packing, train: Train) -> HeldOut:
    """What is done with held-out samples, by sizes: the largest micro-batch, and the longest prompt with an answer."""

    def largest(part: TokenSet) -> Shape:
        rows = fullest(packing.micro_batches(part.lengths, train, None), part.lengths, packing.packed)
        return _shape(part, rows, packing.packed)

    evaluation = max(map(largest, tokens.parts()), key=lambda shape: (shape.num_tokens, max(shape.lengths)))
    prompts = [_prompt(tokens.sample(place)[1]) for place in opening_places(tokens, train.compare_prompts)]
    return HeldOut(evaluation, max(prompts) + ANSWER_TOKENS if prompts else 0)


def _shape(tokens: Tokens | TokenSet, rows: np.ndarray, packed: bool) -> Shape:
    """Of a micro-batch of these samples."""
    targets = sum(int(np.asarray(tokens.sample(index)[1])[1:].sum()) for index in rows)
    return Shape(tuple(int(length) for length in tokens.lengths[rows]), max(targets, 1), packed)


def _prompt(is_target: np.ndarray) -> int:
    """Tokens before the last run of targets: a dialogue up to its last answer. All where there is no such place."""
    begins = np.flatnonzero(np.diff(np.asarray(is_target, dtype=np.int8)) == 1)
    return int(begins[-1]) + 1 if len(begins) else len(is_target)
