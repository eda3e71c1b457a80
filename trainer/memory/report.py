"""The plan as numbers: plan.json, and what the screen shows of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainer.memory import whatif
from trainer.memory.speed import EFFICIENCY, recomputed_share, roofs
from trainer.memory.streaming import offload_plan
from trainer.model.adapters import NoAdapter
from trainer.model.options import Weights
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.memory.plan import Planner
    from trainer.memory.predict import Prediction
    from trainer.memory.run import RunMemory

CARDS = (8, 12, 16, 24, 48, 80)
SMALL_MODEL = 1_000_000_000
"""Parameters up to which training all of them is worth a thought."""


def short_plan(run: RunMemory) -> dict[str, Any]:
    """What a run writes at its start: the prediction alone."""
    plan = _prediction(run.planner, run.prediction)
    if run.fit is not None:
        plan["checkpointing"] = run.fit.sentence()
        plan["micro_batch_tokens"] = run.fit.micro_batch_tokens
        plan["accumulation_steps"] = run.fit.accumulation_steps
    return plan


def _prediction(planner: Planner, prediction: Prediction) -> dict[str, Any]:
    return {
        "device": planner.device_type,
        "micro_batch": asdict(planner.shape),
        "lines_gib": {name: size / GIB for name, size in prediction.lines().items()},
        "peak_gib": prediction.peak / GIB,
        "peak_at": prediction.highest.name,
        "needed_gib": planner.needed(prediction) / GIB,
        "moments_gib": {moment.name: (prediction.static.total + moment.peak) / GIB for moment in prediction.moments},
        "parameters": prediction.static.base_parameters,
        "trainable": prediction.static.trainable,
    }


def full_plan(planner: Planner) -> dict[str, Any]:
    """Everything that `trainer plan` says."""
    prediction = planner.predict()
    needed = planner.needed(prediction)
    budget = planner.config.memory.budget_gib
    changes = whatif.rows(planner)
    plan = _prediction(planner, prediction)
    plan["recomputed_share"] = recomputed_share(planner, planner.policy)
    plan["cards"] = [
        {"gib": card, "fits": needed <= card * GIB, "longest_micro_batch_tokens": planner.longest(card * GIB)}
        for card in CARDS
    ]
    plan["assumed_efficiency"] = EFFICIENCY
    plan["tokens_per_second"] = {
        name: {"roof": roof, "expected": EFFICIENCY * roof} for name, roof in roofs(planner, planner.policy).items()
    }
    plan["offload"] = offload_plan(planner)
    plan["changes"] = [
        {"change": r.change, "needed_gib": r.needed / GIB, "saves_gib": (needed - r.needed) / GIB, "cost": r.cost}
        for r in changes
    ]
    plan["budget_gib"] = budget
    plan["fits"] = None if budget is None else needed <= budget * GIB
    plan["ways_to_fit"] = []
    if plan["fits"] is False:
        plan["ways_to_fit"] = [
            {"change": row.change, "needed_gib": row.needed / GIB, "cost": row.cost}
            for row in whatif.ranked(planner, round(budget * GIB))
        ]
        if not plan["ways_to_fit"]:
            plan["together"] = _together(changes, needed, round(budget * GIB))
    plan["advice"] = advice(planner, prediction, changes)
    return plan


def _together(changes: list[whatif.Row], needed: int, budget: int) -> dict[str, Any] | None:
    """Changes of different groups that add up to the budget, smallest first; savings of separate parts add."""
    chosen, left = [], needed
    groups: set[str] = set()
    for row in sorted(changes, key=lambda r: (r.effort, r.needed)):
        group = row.change.split("=")[0].split(".")[0]
        if row.needed < needed and group not in groups:
            groups.add(group)
            chosen.append(row.change)
            left -= needed - row.needed
            if left <= budget:
                return {"changes": chosen, "needed_gib": left / GIB}
    return None


def advice(planner: Planner, prediction: Prediction, changes: list[whatif.Row]) -> list[str]:
    """In words: where the memory is, and what is on without need."""
    lines = prediction.lines()
    largest = max(lines, key=lines.get)
    said = [f"The largest line is {largest}: {lines[largest] / GIB:.2f} GiB of {prediction.peak / GIB:.2f}."]
    budget = planner.config.memory.budget_gib
    needed = planner.needed(prediction)
    if budget is not None and needed <= budget * GIB:
        unneeded = {"checkpointing=none": "recomputation", "quant=none": "quantisation", "optim=adamw": "8-bit state"}
        for row in changes:
            if row.change in unneeded and needed < row.needed <= budget * GIB:
                said.append(
                    f"{unneeded[row.change]} is not needed for {budget:g} GiB: {row.change} takes "
                    f"{row.needed / GIB:.2f} GiB ({row.cost})."
                )
    adapted = not isinstance(planner.config.adapter, NoAdapter)
    parameters = prediction.static.base_parameters
    if adapted and parameters <= SMALL_MODEL:
        said.append(
            f"With {parameters / 1e6:.0f} M parameters, adapter=none quant=none (all of them train, 16 bytes each: "
            f"{16 * parameters / GIB:.2f} GiB before activations) may be worth it."
        )
    if adapted and planner.config.model.weights is Weights.random:
        said.append("The base has random weights: an adapter on them learns little. Use it to try, not to train.")
    return said
