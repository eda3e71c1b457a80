"""The plan as numbers: what the screen shows, and plan.json. GiB, but where a name says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from trainer.memory.advice import whatif
from trainer.memory.advice.hints import advice
from trainer.memory.fit import resolved
from trainer.memory.predict.moved import OffloadPlan, offload_plan
from trainer.memory.predict.profile import Shape
from trainer.memory.predict.speed import EFFICIENCY, recomputed_share, roofs
from trainer.registry import to_plain
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.memory.predict.moments import Prediction
    from trainer.memory.predict.planner import Planner
    from trainer.memory.run_plan import RunMemory

CARDS = (8, 12, 16, 24, 48, 80)


@dataclass(frozen=True)
class PredictionReport:
    """What a step needs."""

    device: str
    micro_batch: Shape
    lines_gib: dict[str, float]
    """what the peak is made of"""
    peak_gib: float
    peak_at: str
    needed_gib: float
    """of the device, with the allocator's slack and CUDA's own"""
    host_gib: float
    """of host memory, where that is not the device's own"""
    moments_gib: dict[str, float]
    """the height of each moment of the step"""
    parameters: int
    trainable: int

    @classmethod
    def of(cls, planner: Planner, prediction: Prediction) -> PredictionReport:
        static = prediction.static
        return cls(
            device=planner.device_type,
            micro_batch=planner.shape,
            lines_gib={name: size / GIB for name, size in prediction.lines().items()},
            peak_gib=prediction.peak / GIB,
            peak_at=prediction.highest.name,
            needed_gib=planner.needed(prediction) / GIB,
            host_gib=prediction.host / GIB,
            moments_gib={moment.name: (static.total + moment.peak) / GIB for moment in prediction.moments},
            parameters=static.base_parameters,
            trainable=static.trainable,
        )


@dataclass(frozen=True)
class Card:
    """A size of device."""

    gib: int
    fits: bool
    longest_micro_batch_tokens: int
    """0: none fits"""
    limited_by: str

    @classmethod
    def of(cls, planner: Planner, gib: int, needed: int) -> Card:
        """What a card of so many GiB holds; a sample has no more tokens than the model has positions."""
        longest = planner.longest(gib * GIB)
        positions = getattr(planner.model_config.get_text_config(), "max_position_embeddings", None) or longest
        limit = "memory" if longest <= positions else "the model's positions"
        return cls(gib, needed <= gib * GIB, min(longest, positions), limit)


@dataclass(frozen=True)
class TokenRate:
    """Tokens a second of a device."""

    roof: float
    expected: float


@dataclass(frozen=True)
class Change:
    """A what-if row."""

    change: str
    needed_gib: float
    saves_gib: float
    cost: str
    host_gib: float


@dataclass(frozen=True)
class Way:
    """A change that makes the budget hold."""

    change: str
    needed_gib: float
    cost: str


@dataclass(frozen=True)
class Together:
    """Changes that make the budget hold together, about."""

    changes: list[str]
    needed_gib: float


@dataclass(frozen=True)
class PlanReport:
    """Everything that `trainer plan` says."""

    prediction: PredictionReport
    recomputed_share: float
    cards: list[Card]
    assumed_efficiency: float
    tokens_per_second: dict[str, TokenRate]
    offload: OffloadPlan | None
    changes: list[Change]
    budget_gib: float | None
    fits: bool | None
    """None without a budget"""
    ways_to_fit: list[Way]
    least_gib: float | None
    """what this model and adapter need at the least, where the budget does not hold"""
    together: Together | None
    advice: list[str]

    def plain(self) -> dict[str, Any]:
        """The content of plan.json."""
        found = to_plain(self.prediction)
        optional = ("least_gib", "together")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "prediction" and (value is not None or field.name not in optional):
                found[field.name] = to_plain(value)
        return found


def short_plan(run: RunMemory) -> dict[str, Any]:
    """What a run writes at its start: the prediction alone, or why there is none."""
    if run.prediction is None:
        plan: dict[str, Any] = {"peak_gib": None, "unplanned": run.unplanned}
    else:
        plan = to_plain(PredictionReport.of(run.planner, run.prediction))
    if run.fit is not None:
        plan["checkpointing"] = run.fit.sentence()
        plan["micro_batch_tokens"] = run.fit.micro_batch_tokens
        plan["accumulation_steps"] = run.fit.accumulation_steps
    return plan


def full_plan(planner: Planner, options: whatif.Options) -> PlanReport:
    """Everything that `trainer plan` says. Raises PlanError where the configuration itself cannot be traced."""
    planner = resolved(planner)
    prediction = planner.predict()
    needed = planner.needed(prediction)
    budget = planner.config.memory.budget_gib
    limit = None if budget is None else round(budget * GIB)
    fits = None if budget is None else needed <= budget * GIB
    changes = whatif.rows(planner, options)
    ways = whatif.ranked(changes, limit) if fits is False else []
    rates = roofs(planner, planner.policy)
    return PlanReport(
        prediction=PredictionReport.of(planner, prediction),
        recomputed_share=recomputed_share(planner, planner.policy),
        cards=[Card.of(planner, card, needed) for card in CARDS],
        assumed_efficiency=EFFICIENCY,
        tokens_per_second={name: TokenRate(roof, EFFICIENCY * roof) for name, roof in rates.items()},
        offload=offload_plan(planner),
        changes=[Change(r.change, r.needed / GIB, (needed - r.needed) / GIB, r.cost, r.host / GIB) for r in changes],
        budget_gib=budget,
        fits=fits,
        ways_to_fit=[Way(row.change, row.needed / GIB, row.cost) for row in ways],
        least_gib=planner.least() / GIB if fits is False else None,
        together=_together(changes, needed, limit) if fits is False and not ways else None,
        advice=advice(planner, prediction, changes),
    )


def _together(changes: list[whatif.ChangeRow], needed: int, budget: int) -> Together | None:
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
                return Together(chosen, left / GIB)
    return None
