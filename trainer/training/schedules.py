"""Options of the group `schedule`: the learning rate as a pure function of the step.

Steps count from 1 to num_steps. Warm-up rises linearly and reaches 1 at step `warmup_steps + 1`, so the first step
is never zero; what decays ends exactly at `final_ratio` in the last step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated

from trainer.ranges import BELOW_1, NOT_NEGATIVE, POSITIVE_SHARE, SHARE
from trainer.registry import Section, option


@dataclass
class Schedule(Section, ABC):
    """A factor on optim.learning_rate for each step."""

    warmup_steps: Annotated[int | None, NOT_NEGATIVE]
    """steps of linear warm-up; null: warmup_ratio decides"""
    warmup_ratio: Annotated[float, BELOW_1]
    """warm-up as a share of all steps, 0 to below 1; unused where warmup_steps is given"""

    def factor(self, step: int, num_steps: int) -> float:
        """Learning rate of `step` (1 to num_steps) as a share of its peak."""
        warmup = self.warmup(num_steps)
        if step <= warmup:
            return step / (warmup + 1)
        return self.after_warmup(step - warmup, num_steps - warmup)

    def warmup(self, num_steps: int) -> int:
        """Steps of warm-up; at least one step is left at the end."""
        steps = self.warmup_steps if self.warmup_steps is not None else int(self.warmup_ratio * num_steps)
        return min(steps, num_steps - 1)

    @abstractmethod
    def after_warmup(self, step: int, num_steps: int) -> float:
        """The factor after warm-up; `step` counts from 1 to num_steps there."""


@option("schedule", "constant")
@dataclass
class Constant(Schedule):
    """Stays at the peak."""

    def after_warmup(self, step, num_steps):
        return 1.0


@dataclass
class Decaying(Schedule):
    """From the peak to a final share of it."""

    final_ratio: Annotated[float, SHARE]
    """learning rate of the last step as a share of the peak, 0 to 1"""

    def between(self, shape: float) -> float:
        """The factor where `shape` goes from 1 (peak) to 0 (end)."""
        return self.final_ratio + (1.0 - self.final_ratio) * shape


def _progress(step: int, num_steps: int) -> float:
    """0 at step 1, 1 at the last step; a single step is at the peak."""
    return (step - 1) / (num_steps - 1) if num_steps > 1 else 0.0


@option("schedule", "linear")
@dataclass
class Linear(Decaying):
    """A straight line."""

    def after_warmup(self, step, num_steps):
        return self.between(1.0 - _progress(step, num_steps))


@option("schedule", "cosine")
@dataclass
class Cosine(Decaying):
    """Half a cosine (Loshchilov & Hutter 2017)."""

    def after_warmup(self, step, num_steps):
        return self.between(0.5 * (1.0 + math.cos(math.pi * _progress(step, num_steps))))


@option("schedule", "wsd")
@dataclass
class WarmupStableDecay(Decaying):
    """Stays at the peak, then falls as 1 - sqrt (Haegele et al. 2024)."""

    decay_ratio: Annotated[float, POSITIVE_SHARE]
    """share of all steps that the fall takes, above 0 to 1"""

    def after_warmup(self, step, num_steps):
        decay_steps = max(1, round(self.decay_ratio * num_steps))
        into_decay = step - (num_steps - decay_steps)
        if into_decay <= 0:
            return 1.0
        return self.between(1.0 - math.sqrt(into_decay / decay_steps))
