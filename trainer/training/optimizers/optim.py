"""What all optimizers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from trainer.model.roles import decays, rate_ratio
from trainer.ranges import NOT_NEGATIVE, Range, numbers
from trainer.registry import Section

if TYPE_CHECKING:
    import torch

    from trainer.training.optimizer_memory import OptimizerMemory

RATE = numbers("must be above 0 and at most 1000: 2e-4, not 2e4", exclusiveMinimum=0, maximum=1000)
DECAYS = Range(lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "must be two numbers from 0 to below 1")

RATE_RATIO = "rate_ratio"
"""In a parameter group: what its learning rate is of the run's; a group without it has the run's."""


@dataclass
class Optim(Section, ABC):
    """What all optimizers share."""

    learning_rate: Annotated[float, RATE]
    """the schedule's peak"""
    weight_decay: Annotated[float, NOT_NEGATIVE]
    """decoupled; of what, train.weight_decay_on says"""

    costs: ClassVar[str] = "other updates, the learning rate may need another look"
    """what choosing it instead of another takes away"""

    @abstractmethod
    def build(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over `parameters`, in their order."""

    def memory(self, parameters: list[torch.nn.Parameter], device_type: str) -> OptimizerMemory:
        """Bytes of its state over these (meta) parameters and of a step's workspace: those of its real step."""
        from trainer.training.optimizer_memory import measured

        return measured(self.build, parameters, device_type)

    def evaluating(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """The weights inside are those to evaluate and to keep; after it they are again those that train."""
        return nullcontext()

    def groups(self, parameters: list[torch.nn.Parameter]) -> list[dict]:
        """With and without weight decay; apart where they learn at another rate."""
        groups: dict[tuple[float, bool], dict] = {}
        for parameter in parameters:
            ratio, decayed = rate_ratio(parameter), decays(parameter)
            decay = self.weight_decay if decayed else 0.0
            empty = {"params": [], "weight_decay": decay, RATE_RATIO: ratio}
            groups.setdefault((ratio, not decayed), empty)["params"].append(parameter)
        return [groups[kind] for kind in sorted(groups)]
