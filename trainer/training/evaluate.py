"""Held-out loss: sums and counts over all targets, read from the device once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer.data.batch import MicroBatch
from trainer.model.precision import Dtypes
from trainer.training.losses import Loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """token mean of the cross-entropy"""
    num_targets: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    model: PreTrainedModel,
    loss: Loss,
    batches: Iterable[MicroBatch],
    dtypes: Dtypes,
    check: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Loss over all targets of `batches`; `check` may raise between two of them."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, num_targets = torch.zeros((), dtype=torch.float64, device=device), 0
    try:
        for batch in batches:
            check()
            with dtypes.autocast():
                total += loss.sum(model, batch.to(device))
            num_targets += batch.num_targets
    finally:
        model.train(was_training)
    return Evaluation(total.item() / num_targets, num_targets)
