"""Options of the group `engine`: which processes and devices work on a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trainer.registry import Section, option

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass
class Engine(Section, ABC):
    """Where the loop runs."""

    one_process: ClassVar[bool] = False
    """whether it is made for one process on one device"""

    @abstractmethod
    def build(self, cpu: bool) -> Accelerator:
        """The accelerator. It neither accumulates nor casts: the loop does both, visibly."""


@option("engine", "single")
@dataclass
class Single(Engine):
    """One process, one device."""

    one_process = True

    def build(self, cpu):
        from accelerate import Accelerator

        return Accelerator(cpu=cpu, gradient_accumulation_steps=1, mixed_precision="no")
