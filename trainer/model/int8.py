"""A frozen 8-bit linear layer that keeps nothing of its input for backward.

bitsandbytes' own function keeps the whole input on its context, out of reach of the hooks by which checkpointing lets
saved tensors go; it is for the gradient of a weight that trains, and a frozen one has none.

D: input features. O: output features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd import Function

if TYPE_CHECKING:
    from bitsandbytes.nn import Linear8bitLt


def keep_no_inputs(model: torch.nn.Module) -> None:
    """Gives all frozen 8-bit layers of a model this forward, on the instance."""
    import bitsandbytes as bnb

    for module in model.modules():
        if isinstance(module, bnb.nn.Linear8bitLt):
            frozen_forward(module)


def frozen_forward(linear: Linear8bitLt) -> None:
    """Gives one layer the forward; values and the input's gradient are those of the layer's own."""
    own = linear.forward

    def forward(x: torch.Tensor) -> torch.Tensor:  # (..., D) -> (..., O)
        return _Frozen8bit.apply(x, own, linear.state)

    linear.forward = forward


class _Frozen8bit(Function):
    @staticmethod
    def forward(ctx, x, own, state):
        ctx.state, ctx.dtype = state, x.dtype
        return own(x)

    @staticmethod
    def backward(ctx, grad):
        # As MatMul8bitLt.backward (bitsandbytes.autograd): CB (O, D) int8, SCB (O,) the absolute maximum of each row.
        state = ctx.state
        weight = state.CB.to(ctx.dtype, copy=True).mul_(state.SCB.unsqueeze(1).mul(1.0 / 127.0))
        return torch.matmul(grad.to(ctx.dtype), weight), None, None
