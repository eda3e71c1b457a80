"""The plan as numbers: plan.json, and what the screen shows of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainer.memory.advice import whatif
from trainer.memory.advice.hints import advice
from trainer.memory.predict.moved import offload_plan
from trainer.memory.predict.speed import EFFICIENCY, recomputed_share, roofs
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.memory.predict.moments import Prediction
    from trainer.memory.predict.planner import Planner
    from trainer.memory.run_plan import RunMemory

CARDS = (8, 12, 16, 24, 48, 80)


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


def _card(planner: Planner, card: int, needed: int) -> dict[str, Any]:
    """What a card of so many GiB holds; a sample has no more tokens than the model has positions."""
    longest = planner.longest(card * GIB)
    positions = getattr(planner.model_config.get_text_config(), "max_position_embeddings", None) or longest
    return {
        "gib": card,
        "fits": needed <= card * GIB,
        "longest_micro_batch_tokens": min(longest, positions),
        "limited_by": "memory" if longest <= positions else "the model's positions",
    }


def full_plan(planner: Planner) -> dict[str, Any]:
    """Everything that `trainer plan` says."""
    prediction = planner.predict()
    needed = planner.needed(prediction)
    budget = planner.config.memory.budget_gib
    changes = whatif.rows(planner)
    plan = _prediction(planner, prediction)
    plan["recomputed_share"] = recomputed_share(planner, planner.policy)
    plan["cards"] = [_card(planner, card, needed) for card in CARDS]
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
        plan["least_gib"] = planner.least() / GIB
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
