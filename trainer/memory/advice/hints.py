"""The plan's advice in words: where the memory is, what is on without need and what it costs, what else is worth it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.memory.predict.speed import work
from trainer.model.adapters import NoAdapter
from trainer.model.checkpointing import NoCheckpointing
from trainer.model.model_settings import Weights
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.memory.advice.whatif import Row
    from trainer.memory.predict.moments import Prediction
    from trainer.memory.predict.planner import Planner

SMALL_MODEL = 1_000_000_000
"""Parameters up to which training all of them is worth a thought."""
BYTES_A_PARAMETER = 16
"""fp32 weight, gradient and two moments of AdamW; under bf16 autocast its copy of the weight too, 2 more."""


def advice(planner: Planner, prediction: Prediction, changes: list[Row]) -> list[str]:
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
    adapted = not isinstance(planner.config.adapter, NoAdapter)
    if adapted:
        said += _all_parameters(planner, prediction)
    if adapted and planner.config.model.weights is Weights.random:
        said.append(
            "The base has random weights: an adapter on them learns little. Use it to try; to train, adapter=none."
        )
    return said


def _unneeded(planner: Planner, needed: int, changes: list[Row]) -> list[str]:
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


def _all_parameters(planner: Planner, prediction: Prediction) -> list[str]:
    """Training every weight of a small model, where the budget has room for it."""
    parameters = prediction.static.base_parameters
    each = BYTES_A_PARAMETER + (2 if planner.dtypes.compute.itemsize == 2 else 0)
    size = planner.needed_bytes(each * parameters + prediction.highest.peak)
    budget = planner.config.memory.budget_gib
    if parameters > SMALL_MODEL or (budget is not None and size > budget * GIB):
        return []
    return [
        f"With {parameters / 1e6:.0f} M parameters, adapter=none quant=none (all of them train, {each} bytes each: "
        f"about {size / GIB:.2f} GiB in all) may be worth it."
    ]
