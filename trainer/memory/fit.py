"""checkpointing=auto: the least predicted recompute that fits the budget, block by block.

In order: as few blocks recomputed as fit (the first ones: the last block's backward comes first, when most is alive);
else more of them recomputed in full and the others selectively; else all in full; else, on a GPU, the inputs of the
recomputed blocks in host memory; else fewer tokens a micro-batch with more accumulation and the same batch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from trainer.device.measure import free_bytes
from trainer.errors import ConfigError
from trainer.model.checkpointing import Checkpointing, PerBlock
from trainer.model.offload.activations import MovedInputs
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.memory.predict.planner import Planner


@dataclass(frozen=True)
class Fit:
    """What auto chose."""

    policy: PerBlock | MovedInputs
    depth: int
    micro_batch_tokens: int
    accumulation_steps: int
    peak: int
    """predicted allocator bytes"""

    def sentence(self) -> str:
        return sentence(self.policy, self.depth)


def sentence(policy: Checkpointing, depth: int) -> str:
    """What happens to how many blocks."""
    counts = Counter(block.says for block in reversed(policy.blocks(depth)))
    parts = [f"{number} blocks {says}" for says, number in counts.items()]
    return ", ".join([*parts, *["their inputs in host memory"] * policy.moves_inputs])


class DoesNotFitError(ConfigError):
    """Not even the smallest micro-batch is within the budget."""


def budget_of(planner: Planner, budget_gib: float | None) -> int:
    """Bytes that a run may take on its device."""
    return round(budget_gib * GIB) if budget_gib is not None else free_bytes(planner.device_type)


def fit(planner: Planner, budget_gib: float | None) -> Fit:
    """The fastest policy within the budget. Raises ConfigError where even the smallest micro-batch does not fit."""
    budget = budget_of(planner, budget_gib)
    depth, train = planner.depth, planner.config.train

    def fits(policy: Checkpointing, tokens: int | None = None) -> bool:
        limit = planner.host_limit
        if policy.moves_inputs and limit is not None and planner.host_inputs(policy, tokens) > limit:
            return False
        return planner.needed(planner.predict(policy, tokens)) <= budget

    def chosen(policy: PerBlock | MovedInputs, tokens: int | None = None, factor: int = 1) -> Fit:
        size = tokens or train.micro_batch_tokens
        peak = planner.predict(policy, tokens).peak
        return Fit(policy, depth, size, train.accumulation_steps * factor, peak)

    configured = planner.config.offload.policy
    ladder = planner.config.checkpointing.ladder()
    full = ladder[-1]
    for lighter, heavier in pairwise(ladder):
        number = _least(depth, lambda n, a=lighter, b=heavier: fits(configured(_mixed(n, depth, b, a))))
        if number is not None:
            return chosen(configured(_mixed(number, depth, heavier, lighter)))
    all_full = configured(_mixed(depth, depth, full, full))
    least_of_all = [all_full]
    if planner.device_type == "cuda" and not all_full.moves_inputs:
        least_of_all.append(MovedInputs(all_full))
        if fits(least_of_all[-1]):
            return chosen(least_of_all[-1])
    factor = 2
    longest_sample = max(planner.shape.lengths)
    while planner.shape.packed and train.micro_batch_tokens // factor >= longest_sample:
        tokens = train.micro_batch_tokens // factor
        for policy in least_of_all:
            if fits(policy, tokens):
                return chosen(policy, tokens, factor)
        factor *= 2
    prediction = planner.predict(least_of_all[-1], longest_sample if planner.shape.packed else None)
    least = planner.needed(prediction)
    raise DoesNotFitError(
        f"memory.budget_gib={budget / GIB:.2f}: with every block recomputed and one sample of {longest_sample} tokens "
        f"a micro-batch, {least / GIB:.2f} GiB are needed, in {prediction.highest.name}; the least that works is "
        f"{least / GIB + 0.01:.2f}. Lower "
        "data.max_length or see `trainer plan` for other ways."
    )


def resolved(planner: Planner) -> Planner:
    """The plan of what runs: where the configured policy is a choice, with what fits best."""
    if planner.config.checkpointing.ladder() is None:
        return planner
    chosen = fit(planner, planner.config.memory.budget_gib)
    train = planner.config.train
    if chosen.micro_batch_tokens == train.micro_batch_tokens:
        return planner.changed(checkpointing=chosen.policy)
    train = replace(train, micro_batch_tokens=chosen.micro_batch_tokens, accumulation_steps=chosen.accumulation_steps)
    return planner.changed(checkpointing=chosen.policy, train=train)


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
