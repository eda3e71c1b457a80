"""How much goes into a step: the part of `train` that data is dealt by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Batching:
    """Passes, steps and sizes."""

    epochs: int
    """passes over the training set; unused where max_steps is given"""
    max_steps: int | None
    """optimizer steps; null: the epochs decide"""
    accumulation_steps: int
    """micro-batches an optimizer step; an epoch's last step may have fewer"""
    micro_batch_tokens: int
    """tokens in one packed row (packing=best_fit)"""
    micro_batch_size: int
    """samples in one padded micro-batch (packing=none)"""
