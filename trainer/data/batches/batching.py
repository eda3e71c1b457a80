"""How much goes into a step: the part of `train` that data is dealt by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from trainer.ranges import AT_LEAST_1, AT_LEAST_2, MOST_TOKENS
from trainer.registry import Section

EPOCHS = AT_LEAST_1.up_to(10_000, ": each is packed before the first step. For more give train.max_steps")


@dataclass
class Batching(Section):
    """Passes, steps and sizes."""

    epochs: Annotated[int, EPOCHS]
    """passes over the training set; unused where max_steps is given"""
    max_steps: Annotated[int | None, AT_LEAST_1]
    """optimizer steps; null: the epochs decide"""
    accumulation_steps: Annotated[int, AT_LEAST_1]
    """micro-batches an optimizer step; an epoch's last step may have fewer"""
    micro_batch_tokens: Annotated[int, AT_LEAST_2.up_to(MOST_TOKENS)]
    """tokens in one packed row (packing=best_fit)"""
    micro_batch_size: Annotated[int, AT_LEAST_1.up_to(65536)]
    """samples in one padded micro-batch (packing=none)"""
