"""Options of the group `engine`: which processes and devices work on a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.registry import option

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass
class Engine(ABC):
    """Where the loop runs."""

    @abstractmethod
    def build(self, cpu: bool) -> Accelerator:
        """The accelerator. It neither accumulates nor casts: the loop does both, visibly."""


@option("engine", "single")
@dataclass
class Single(Engine):
    """One process, one device."""

    def build(self, cpu):
        from accelerate import Accelerator

        return Accelerator(cpu=cpu, gradient_accumulation_steps=1, mixed_precision="no")
