"""Tokens a second from arithmetic: what a step computes, what a device can, and an efficiency that is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.memory.predict.profile import Shape
from trainer.model.adapters import decoder_linears
from trainer.model.checkpointing import BlockWork
from trainer.training.throughput import PEAK_TFLOPS, Arithmetic, count_arithmetic

if TYPE_CHECKING:
    from trainer.memory.predict.planner import Planner
    from trainer.model.checkpointing import Checkpointing

EFFICIENCY = 0.5
"""Assumed share of the roof. Published for QLoRA of an 8B on a 4090: 0.68 compiled (torchtune)."""

DEVICES = ("RTX 3090", "RTX 4090", "A100", "L40S", "H100")


def flops_per_token(counts: Arithmetic, shape: Shape, recomputed: float) -> float:
    """Operations of forward, backward and recompute, the mean over the micro-batch's tokens."""
    tokens = sum(shape.lengths)
    squares = sum(length**2 for length in shape.lengths)
    return counts.all_flops(tokens, shape.num_targets, squares, recomputed) / tokens


def recomputed_share(planner: Planner, policy: Checkpointing) -> float:
    """Share of the blocks' forward arithmetic that runs again in backward."""
    if policy.segment(planner.depth) is not None:
        return 1.0
    counts = arithmetic(planner)
    work = BlockWork(
        kernel=2 * counts.attention_width * _mean_length(planner.shape),
        linear=2 * counts.base_linear + 2 * counts.adapter,
        projections=2 * _attention_linears(planner),
        counted=planner.counted_again,
    )
    return sum(block.recomputed(work) for block in policy.blocks(planner.depth)) / planner.depth


def _mean_length(shape: Shape) -> float:
    """Length of the sample that a token is in, on average over tokens."""
    return sum(length**2 for length in shape.lengths) / sum(shape.lengths)


def _attention_linears(planner: Planner) -> int:
    """Weights of the linear layers inside attention modules."""
    names = decoder_linears(planner.skeleton)
    inside = [name for name in names if "Attention" in type(planner.skeleton.get_submodule(_parent(name))).__name__]
    return sum(planner.skeleton.get_submodule(name).weight.numel() for name in inside)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def arithmetic(planner: Planner) -> Arithmetic:
    """The planned model's counts."""
    base_trains = planner.model.adapted is planner.model.base
    return count_arithmetic(planner.skeleton, 0 if base_trains else planner.static.trainable, base_trains)


def work(planner: Planner, policy: Checkpointing) -> float:
    """Operations a token under a policy."""
    return flops_per_token(arithmetic(planner), planner.shape, recomputed_share(planner, policy))


def roofs(planner: Planner, policy: Checkpointing) -> dict[str, float]:
    """Tokens a second of known devices at full rate."""
    cost = work(planner, policy)
    return {name: PEAK_TFLOPS[name] * 1e12 / cost for name in DEVICES}
