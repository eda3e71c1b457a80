"""checkpointing=auto: the least predicted recompute that fits the budget, block by block.

In order: as few blocks recomputed as fit (the first ones: the last block's backward comes first, when most is alive);
else more of them recomputed in full and the others selectively; else all in full; else fewer tokens a micro-batch with
more accumulation and the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.errors import ConfigError
from trainer.model.checkpointing import Checkpointing, Full, Keep, NoCheckpointing, PerBlock, Selective
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.memory.plan import Planner


@dataclass(frozen=True)
class Fit:
    """What auto chose."""

    policy: PerBlock
    micro_batch_tokens: int
    accumulation_steps: int
    peak: int
    """predicted allocator bytes"""

    def sentence(self) -> str:
        names = {NoCheckpointing: "kept whole", Selective: "recomputed but for attention", Full: "recomputed"}
        counts = {kind: sum(type(p) is kind for p in self.policy.policies) for kind in names}
        return ", ".join(f"{number} blocks {names[kind]}" for kind, number in counts.items() if number)


def fit(planner: Planner, budget_gib: float | None) -> Fit:
    """The fastest policy within the budget. Raises ConfigError where even the smallest micro-batch does not fit."""
    budget = round(budget_gib * GIB) if budget_gib is not None else free_bytes(planner.device_type)
    depth, train = planner.depth, planner.config.train

    def fits(policy: Checkpointing, tokens: int | None = None) -> bool:
        return planner.needed(planner.predict(policy, tokens)) <= budget

    def chosen(policy: PerBlock, tokens: int | None = None, factor: int = 1) -> Fit:
        size = tokens or train.micro_batch_tokens
        peak = planner.predict(policy, tokens).peak
        return Fit(policy, size, train.accumulation_steps * factor, peak)

    none, full, selective = NoCheckpointing(), Full(), Selective(keep=Keep.attention)
    for lighter, heavier in ((none, selective), (selective, full)):
        number = _least(depth, lambda n, a=lighter, b=heavier: fits(_mixed(n, depth, b, a)))
        if number is not None:
            return chosen(_mixed(number, depth, heavier, lighter))
    all_full = _mixed(depth, depth, full, full)
    factor = 2
    longest_sample = max(planner.shape.lengths)
    while planner.shape.packed and train.micro_batch_tokens // factor >= longest_sample:
        tokens = train.micro_batch_tokens // factor
        if fits(all_full, tokens):
            return chosen(all_full, tokens, factor)
        factor *= 2
    least = planner.needed(planner.predict(all_full, longest_sample if planner.shape.packed else None))
    raise ConfigError(
        f"memory.budget_gib={budget / GIB:.2f}: with every block recomputed and one sample of {longest_sample} tokens "
        f"a micro-batch, {least / GIB:.2f} GiB are needed; the least that works is {least / GIB + 0.01:.2f}. Lower "
        "data.max_length or see `trainer plan` for other ways."
    )


def _mixed(number: int, depth: int, first: Checkpointing, rest: Checkpointing) -> PerBlock:
    return PerBlock([first] * number + [rest] * (depth - number))


def _least(depth: int, holds) -> int | None:
    """The smallest number from 0 to depth for which it holds; more recompute never needs more memory."""
    if not holds(depth):
        return None
    low, high = -1, depth
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def free_bytes(device_type: str) -> int:
    """What is free on the device now."""
    if device_type == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 24 * GIB
    import psutil

    return psutil.virtual_memory().available
