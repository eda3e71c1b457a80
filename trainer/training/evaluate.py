"""Held-out loss: sums and counts over all targets, read from the device once."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from trainer.data.batches.batch import MicroBatch
from trainer.model.precision import Dtypes
from trainer.training.losses import Loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """token mean of the cross-entropy"""
    num_targets: int
    by_source: dict[str, float] = field(default_factory=dict)
    """the same for each source of a mixture"""

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
    totals: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=device))
    num_targets: Counter[str] = Counter()
    try:
        for batch in batches:
            check()
            with dtypes.autocast():
                totals[batch.source] += loss.sum(model, batch.to(device))
            num_targets[batch.source] += batch.num_targets
    finally:
        model.train(was_training)
    sums = {source: total.item() for source, total in totals.items()}
    by_source = {source: sums[source] / num_targets[source] for source in sums} if len(sums) > 1 else {}
    return Evaluation(sum(sums.values()) / num_targets.total(), num_targets.total(), by_source)
