"""AdamW and Lion: torch's own, and bitsandbytes' with state in 8 bits or on pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from trainer.ranges import POSITIVE
from trainer.registry import option
from trainer.training.optimizers.optim import DECAYS, Optim


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


@option("optim", "lion_8bit")
@dataclass
class Lion8bit(Optim):
    """The sign of a moving average (Chen et al. 2023), kept in 8 bits: 1.02 bytes a parameter."""

    betas: Annotated[list[float], DECAYS]
    """share of the average in the update, and its decay; two numbers"""

    costs: ClassVar[str] = "every number moves by the learning rate: 3 to 10 times smaller than AdamW's"

    def build(self, parameters):
        import bitsandbytes as bnb

        return bnb.optim.Lion8bit(self.groups(parameters), lr=self.learning_rate, betas=tuple(self.betas))
