"""Loss scaling for fp16 (Micikevicius et al. 2018, section 3.2): small gradients are lifted into its range.

The rule and its numbers are those of torch.amp.GradScaler, whose state would lie on the device and be read once more a
step: here the norm that a step reads anyway says whether it was finite. A power of two rounds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trainer.training.state import State

GROWTH_INTERVAL = 2000
"""Finite steps in a row after which the scale is doubled."""


@dataclass(frozen=True)
class LossScaling:
    """The scale lies in the run's state, and with it in its checkpoints."""

    compute: torch.dtype
    """only fp16 needs it"""

    def scale(self, state: State) -> float:
        """What the loss of the next step is multiplied by."""
        return state.loss_scale if self.compute is torch.float16 else 1.0

    def unscale(self, parameters: Iterable[torch.nn.Parameter], state: State) -> None:
        """Gradients as they are without a scale; what overflowed stays infinite."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.compute is torch.float16 and gradients:
            torch._foreach_mul_(gradients, 1.0 / state.loss_scale)

    def update(self, state: State, finite: bool) -> bool:
        """After a step; whether a smaller scale may mend the next one."""
        if self.compute is not torch.float16:
            return False
        if finite:
            state.scaled_steps += 1
            if state.scaled_steps == GROWTH_INTERVAL:
                state.loss_scale, state.scaled_steps = state.loss_scale * 2, 0
            return False
        mends = state.loss_scale > 1
        state.loss_scale, state.scaled_steps = max(state.loss_scale / 2, 1.0), 0
        return mends
