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


@option("memory", "default")
@dataclass
class MemoryOptions(Section):
    """Memory is a budget."""

    budget_gib: Annotated[float | None, POSITIVE]
    """GiB that the run may take on its device; null: what is free there"""
    probe: Probe
    """run the largest micro-batch and evaluation first: auto on a GPU, always, or never"""
    snapshot: Annotated[int, NOT_NEGATIVE]
    """steps whose allocations are recorded and written; 0: none"""
    stats: bool
    """print the allocator's statistics at the end"""
