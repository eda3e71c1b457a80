"""Several optimizers that step as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Combined(torch.optim.Optimizer):
    """Each keeps its own parameters and arithmetic; groups and state are those of all, in their order."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.optimizers = optimizers
        for optimizer in optimizers:
            self.state.update(optimizer.state)
            optimizer.state = self.state

    def step(self, closure: None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
