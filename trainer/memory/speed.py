"""Tokens a second from arithmetic: what a step computes, what a device can, and an efficiency that is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.memory.profile import Shape
from trainer.training.throughput import PEAK_TFLOPS, Arithmetic, count_arithmetic

if TYPE_CHECKING:
    from trainer.memory.plan import Planner
    from trainer.model.checkpointing import Checkpointing

EFFICIENCY = 0.5
"""Assumed share of the roof. Published for QLoRA of an 8B on a 4090: 0.68 compiled (torchtune)."""

DEVICES = ("RTX 3090", "RTX 4090", "A100", "L40S", "H100")


def flops_per_token(counts: Arithmetic, shape: Shape, recomputed: float) -> float:
    """Operations of forward, backward and recompute, the mean over the micro-batch's tokens."""
    tokens = sum(shape.lengths)
    squares = sum(length**2 for length in shape.lengths)
    return counts.all_flops(tokens, shape.num_targets, squares, recomputed) / tokens


def recomputed_share(policy: Checkpointing, depth: int) -> float:
    """Share of the blocks' forward that runs again in backward."""
    from trainer.model.checkpointing import Attention, NoCheckpointing

    if policy.segment(depth) is not None:
        return 1.0
    shares = {NoCheckpointing: 0.0, Attention: 0.3}
    return sum(shares.get(type(block), 1.0) for block in policy.blocks(depth)) / depth


def roofs(planner: Planner, policy: Checkpointing) -> dict[str, float]:
    """Tokens a second of known devices at full rate."""
    trainable = planner.static.trainable
    base_trains = planner.model.adapted is planner.model.base
    counts = count_arithmetic(planner.skeleton, 0 if base_trains else trainable, base_trains)
    cost = flops_per_token(counts, planner.shape, recomputed_share(policy, planner.depth))
    return {name: PEAK_TFLOPS[name] * 1e12 / cost for name in DEVICES}
