"""The section `memory`: what the run may use and what of it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainer.registry import option


class Probe(Enum):
    auto = "auto"
    always = "always"
    never = "never"


@option("memory", "default")
@dataclass
class MemoryOptions:
    """Memory is a budget."""

    budget_gib: float | None
    """GiB that the run may take on its device; null: what is free there"""
    probe: Probe
    """run the largest micro-batch and evaluation first: auto on a GPU, always, or never"""
    snapshot: int
    """steps whose allocations are recorded and written; 0: none"""
    stats: bool
    """print the allocator's statistics at the end"""
