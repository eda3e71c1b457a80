"""Optimizers that see a matrix as a matrix: Adafactor and Muon, both torch's."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from trainer.model.roles import is_hidden_matrix
from trainer.ranges import AT_LEAST_1, BELOW_1, POSITIVE, numbers
from trainer.registry import option
from trainer.training.optimizers.adam import AdamW
from trainer.training.optimizers.optim import Optim

if TYPE_CHECKING:
    import torch

NEGATIVE = numbers("must be from -1 to below 0", minimum=-1, exclusiveMaximum=0)


@option("optim", "adafactor")
@dataclass
class Adafactor(Optim):
    """A matrix's second moment as one row and one column (Shazeer & Stern 2018): 4 (r + c) bytes for r x c."""

    decay_exponent: Annotated[float, NEGATIVE]
    """the second moment's decay in step t is 1 - t to this power"""
    clip_threshold: Annotated[float, POSITIVE]
    """root mean square that an update is cut to"""

    costs: ClassVar[str] = "no first moment; a rate relative to each tensor's size, at most 1 / sqrt(step)"

    def build(self, parameters):
        import torch

        return torch.optim.Adafactor(
            self.groups(parameters),
            lr=self.learning_rate,
            beta2_decay=self.decay_exponent,
            d=self.clip_threshold,
        )


@dataclass
class ForMatrices(AdamW):
    """One optimizer for matrices between hidden states, AdamW for embeddings, the head and vectors."""

    @abstractmethod
    def for_matrices(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of the matrices."""

    def takes(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a parameter is one of them."""
        return is_hidden_matrix(parameter)

    def build(self, parameters):
        from trainer.training.optimizers.combined import Combined

        return Combined([build(share) for build, share in self._shares(parameters) if share])

    def memory(self, parameters, device_type):
        from trainer.training.optimizer_memory import OptimizerMemory, measured

        parts = [measured(build, share, device_type) for build, share in self._shares(parameters)]
        return OptimizerMemory(sum(part.state for part in parts), max(part.workspace for part in parts))

    def _shares(self, parameters):
        """Each optimizer's maker, and the parameters that are its."""
        matrices = [p for p in parameters if self.takes(p)]
        return (self.for_matrices, matrices), (super().build, [p for p in parameters if not self.takes(p)])


@option("optim", "muon")
@dataclass
class Muon(ForMatrices):
    """Momentum made orthogonal (Jordan et al. 2024), 4 bytes of state a parameter of a hidden matrix.

    Updates have AdamW's size (Liu et al. 2025), so one learning rate fits both.
    """

    momentum: Annotated[float, BELOW_1]
    """decay of the average gradient"""
    newton_schulz_steps: Annotated[int, AT_LEAST_1]
    """iterations of the orthogonalisation"""

    costs: ClassVar[str] = "15 matrix products of each gradient a step"

    def for_matrices(self, parameters):
        import torch

        return torch.optim.Muon(
            self.groups(parameters),
            lr=self.learning_rate,
            momentum=self.momentum,
            ns_steps=self.newton_schulz_steps,
            adjust_lr_fn="match_rms_adamw",
        )
