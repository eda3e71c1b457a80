"""The section `memory`: what the run may use and what of it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from trainer.ranges import NOT_NEGATIVE, POSITIVE
from trainer.registry import Section, option


class Probe(Enum):
    auto = "auto"
    always = "always"
    never = "never"


class OverBudget(Enum):
    run = "run"
    refuse = "refuse"


class OnOom(Enum):
    retreat = "retreat"
    fail = "fail"


@option("memory", "default")
@dataclass
class MemoryOptions(Section):
    """Memory is a budget."""

    budget_gib: Annotated[float | None, POSITIVE]
    """GiB that the run may take on its device; null: what is free there"""
    probe: Probe
    """run the largest micro-batch and evaluation first: auto on a GPU, always, or never"""
    over_budget: OverBudget
    """a run whose plan needs more than the budget: run it all the same, or refuse it (exit code 7) before any weight is
    read, as the trials of a sweep are"""
    on_oom: OnOom
    """where memory runs out in training: retreat to less of it and make the step again, or fail (exit code 7)"""
    snapshot: Annotated[int, NOT_NEGATIVE]
    """steps whose allocations are recorded and written; 0: none"""
    stats: bool
    """print the allocator's statistics at the end"""
