"""The plan's advice in words: where the memory is, what is on without need and what it costs, what else is worth it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.memory.predict.speed import work
from trainer.model.checkpointing import NoCheckpointing
from trainer.model.model_settings import Weights
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.memory.advice.whatif import ChangeRow
    from trainer.memory.predict.moments import Prediction
    from trainer.memory.predict.planner import Planner


def advice(planner: Planner, prediction: Prediction, changes: list[ChangeRow]) -> list[str]:
    """Sentences."""
    lines = prediction.lines()
    largest = max(lines, key=lines.get)
    said = [f"The largest line is {largest}: {lines[largest] / GIB:.2f} GiB of {prediction.peak / GIB:.2f}."]
    if planner.profile_of_policy.whole:
        said.append(
            "transformers knows no blocks in this model: the whole of it was traced, and no checkpointing but none "
            "works."
        )
    said += _unneeded(planner, planner.needed(prediction), changes)
    said += _all_parameters(planner, changes)
    if not planner.config.adapter.trains_base and planner.config.model.weights is Weights.random:
        said.append(
            "The base has random weights: an adapter on them learns little. Use it to try; to train, adapter=none."
        )
    return said


def _unneeded(planner: Planner, needed: int, changes: list[ChangeRow]) -> list[str]:
    """What the budget would do without. One at a time: together they may need more than there is."""
    budget = planner.config.memory.budget_gib
    if budget is None or needed > budget * GIB:
        return []
    again = work(planner, planner.policy) / work(planner, NoCheckpointing()) - 1
    costs = {
        "checkpointing=none": f"Recomputation, which costs {again:.0%} more work,",
        "quant=none": "Quantisation, which costs exactness and a dequantisation of every weight in each pass,",
        "optim=adamw": "An 8-bit optimizer state, which costs exactness of the moments,",
    }
    return [
        f"{costs[row.change]} is not needed for {budget:g} GiB: {row.change} takes {row.needed / GIB:.2f} GiB."
        for row in changes
        if row.change in costs and needed < row.needed <= budget * GIB
    ]


def _all_parameters(planner: Planner, changes: list[ChangeRow]) -> list[str]:
    """Training every weight of a small model, where the budget has room for it."""
    budget = planner.config.memory.budget_gib
    return [
        f"With {planner.static.base_parameters / 1e6:.0f} M parameters, {row.change} (all of them train: "
        f"{row.needed / GIB:.2f} GiB in all) may be worth it."
        for row in changes
        if row.change in ("adapter=none", "adapter=none quant=none") and (budget is None or row.needed <= budget * GIB)
    ]
