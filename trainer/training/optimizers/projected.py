"""GaLore (Zhao et al. 2024) around an optimizer of bitsandbytes: its state is of projected gradients, in 8 bits.

For weights (d, k) with d <= k a gradient is seen through its r largest left singular vectors, as (r, k). What the inner
optimizer would do to weights of that shape, projected back, is done to these. A library has the projection, another the
arithmetic in 8 bits; here they meet, one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Projected(torch.optim.Optimizer):
    """State of a parameter: the inner optimizer's of its stand-in, and the projector."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        projector: Callable[[], Any],
        rank: int,
        lr: float,
    ):
        """`build` makes bitsandbytes' optimizer of groups of stand-ins; `projector` a pytorch-optimizer one."""
        super().__init__([dict(group) for group in groups], {"lr": lr})
        stand_ins = [
            {**group, "params": [_stand_in(p, rank) for p in group["params"]], "weight_decay": 0.0, "lr": lr}
            for group in groups
        ]
        self._inner = build(stand_ins)
        self._inner.check_overrides()
        self._inner.initialized = True
        for number, (group, inner) in enumerate(zip(self.param_groups, self._inner.param_groups, strict=True)):
            group["step"] = 0
            for place, (parameter, stand_in) in enumerate(zip(group["params"], inner["params"], strict=True)):
                # Made here and not in the first step, for a saved state to be loaded into.
                self._inner.init_state(inner, stand_in, number, place)
                state = self._inner.state[stand_in]
                state["projector"] = projector()
                self.state[parameter] = state
                stand_in.data = stand_in.data.new_empty(0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for number, (group, inner) in enumerate(zip(self.param_groups, self._inner.param_groups, strict=True)):
            group["step"] += 1
            inner["lr"] = group["lr"]
            for place, (parameter, stand_in) in enumerate(zip(group["params"], inner["params"], strict=True)):
                if parameter.grad is None:
                    continue
                projector = self.state[parameter]["projector"]
                gradient = projector.project(parameter.grad, group["step"]).contiguous()
                stand_in.data = torch.zeros_like(gradient)
                stand_in.grad = gradient
                self._inner.update_step(inner, stand_in, number, place)
                parameter.add_(projector.project_back(stand_in.data))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                stand_in.grad, stand_in.data = None, gradient.new_empty(0)


def projected_shape(shape: torch.Size, rank: int) -> tuple[int, int]:
    """Of a gradient (d, k) once it is projected."""
    rows, columns = shape
    return (rows, rank) if rows >= columns else (rank, columns)


def _stand_in(parameter: torch.nn.Parameter, rank: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(parameter.data.new_zeros(projected_shape(parameter.shape, rank)))
