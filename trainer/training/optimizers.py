"""Options of the group `optim`: adding an optimizer is one class here and one YAML in conf/optim/."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from trainer.ranges import NOT_NEGATIVE, POSITIVE, Range
from trainer.registry import Section, option

if TYPE_CHECKING:
    import torch

    from trainer.training.optimizer_memory import OptimizerMemory

RATE = Range(lambda v: 0 < v <= 1000, "must be above 0 and at most 1000: 2e-4, not 2e4")
DECAYS = Range(lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "must be two numbers from 0 to below 1")


@dataclass
class Optim(Section, ABC):
    """What all optimizers share."""

    learning_rate: Annotated[float, RATE]
    """the schedule's peak"""
    weight_decay: Annotated[float, NOT_NEGATIVE]
    """decoupled; not applied to vectors (norms, biases)"""

    costs: ClassVar[str] = "other updates, the learning rate may need another look"
    """what choosing it instead of another takes away"""

    @abstractmethod
    def build(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over `parameters`, in their order."""

    def memory(self, parameters: list[torch.nn.Parameter], device_type: str) -> OptimizerMemory:
        """Bytes of its state over these (meta) parameters and of a step's workspace: those of its real step."""
        from trainer.training.optimizer_memory import measured

        return measured(self.build, parameters, device_type)

    def groups(self, parameters: list[torch.nn.Parameter]) -> list[dict]:
        """Matrices with weight decay, vectors without."""
        matrices = [p for p in parameters if p.ndim >= 2]
        vectors = [p for p in parameters if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]


@dataclass
class Adam(Optim):
    """AdamW (Loshchilov & Hutter 2019)."""

    betas: Annotated[list[float], DECAYS]
    """decay of the first and second moment, two numbers"""
    eps: Annotated[float, POSITIVE]
    """added to the root of the second moment"""


@option("optim", "adamw")
@dataclass
class AdamW(Adam):
    """torch's own, 8 bytes of state a parameter."""

    def build(self, parameters):
        import torch

        return torch.optim.AdamW(self.groups(parameters), lr=self.learning_rate, betas=tuple(self.betas), eps=self.eps)


@dataclass
class BitsAndBytesAdamW(Adam):
    """bitsandbytes' AdamW; which one, the subclass says."""

    def build(self, parameters):
        import bitsandbytes as bnb

        optimizer_class = getattr(bnb.optim, self.optimizer)
        return optimizer_class(self.groups(parameters), lr=self.learning_rate, betas=tuple(self.betas), eps=self.eps)


@option("optim", "adamw_8bit")
@dataclass
class AdamW8bit(BitsAndBytesAdamW):
    """8-bit state in blocks of 256 (Dettmers et al. 2022): 2.03 bytes a parameter."""

    optimizer = "AdamW8bit"


@option("optim", "paged_adamw_8bit")
@dataclass
class PagedAdamW8bit(BitsAndBytesAdamW):
    """8-bit state that CUDA moves to host memory when the card is full; the same as adamw_8bit on a CPU."""

    optimizer = "PagedAdamW8bit"


@option("optim", "paged_adamw_32bit")
@dataclass
class PagedAdamW32bit(BitsAndBytesAdamW):
    """32-bit state that CUDA moves to host memory when the card is full."""

    optimizer = "PagedAdamW32bit"
