"""Autograd functions for frozen linear layers with LoRA: y = x W^T + b + s (x A^T) B^T, in plain PyTorch.

A weight is dequantised once a pass and dropped at once; nothing is saved that backward does not need. All are exact:
they compute what PEFT computes, in the same compute dtype. Their slow twins in the tests are PEFT's own modules.

M: rows (tokens). D: input features. O: output features. R: rank. F: inner width of an MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from trainer.model.fused.pieces import pieces


@dataclass(frozen=True)
class Projection:
    """One frozen linear layer and, where it has one, its adapter's settings. The adapter's A and B travel apart."""

    base: torch.nn.Module
    """torch.nn.Linear or bitsandbytes Linear4bit"""
    adapted: bool
    scale: float = 0.0
    """alpha / r"""
    dropout: float = 0.0
    """probability in force in this pass: 0 in evaluation"""

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """(O, D) in the compute dtype: dequantised anew, or the weight itself. Do not keep it."""
        fetch = getattr(self.base, "fetch", None)  # a streamed weight comes when asked for (trainer.model.offload)
        if fetch is not None:
            fetch()
        weight = self.base.weight
        state = getattr(weight, "quant_state", None) or getattr(self.base, "quant_state", None)
        if state is not None:
            import bitsandbytes as bnb

            weight = bnb.functional.dequantize_4bit(weight, state)
        return weight.to(dtype)

    def base_output(self, rows: torch.Tensor) -> torch.Tensor:
        """x W^T + b, (M, O), for x (M, D)."""
        bias = self.base.bias
        return F.linear(rows, self.weight(rows.dtype), None if bias is None else bias.to(rows.dtype))


@dataclass(frozen=True)
class Activation:
    """An element-wise gate activation and its derivative."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(gradient, input) -> gradient of the input"""


SILU = Activation(F.silu, torch.ops.aten.silu_backward)
GELU = Activation(F.gelu, torch.ops.aten.gelu_backward)
GELU_TANH = Activation(
    lambda x: F.gelu(x, approximate="tanh"), lambda g, x: torch.ops.aten.gelu_backward(g, x, approximate="tanh")
)


def project(x: torch.Tensor, projections: list[Projection], tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs (..., O) of several linear layers that read the same x (..., D).

    `tensors` holds A (R, D) and B (O, R) of each adapted projection in turn.
    """
    return _Project.apply(x, tuple(projections), (), *tensors)


def gated_mlp(
    x: torch.Tensor,  # (..., D)
    projections: list[Projection],  # gate, up, down
    activation: Activation,
    tensors: list[torch.Tensor],
) -> torch.Tensor:  # (..., D)
    """down(activation(gate(x)) * up(x)), keeping gate's and up's outputs only: 2 F a row instead of 4 F.

    What `down` needs in backward is saved by the function before it. So a recomputation that stops at the last saved
    tensor, as non-reentrant checkpointing does, ends before `down`'s dequantisation and product. x or the adapters of
    gate and up must require gradients.
    """
    gate, up, down = projections
    gate_out, up_out = _Project.apply(x, (gate, up), (down,), *tensors)
    node = gate_out.grad_fn
    return _ActivateDown.apply(gate_out, up_out, down, activation, node, *tensors[_num_tensors((gate, up)) :])


class _Project(Function):
    """x -> x W_i^T + b_i + s_i drop_i(x) A_i^T B_i^T for each projection i."""

    @staticmethod
    def forward(ctx, x, projections, follower, *tensors):
        """`follower` is empty, or the projection that comes after an activation of two outputs: the outputs, its
        adapter and its dropout mask are saved here for it."""
        ctx.set_materialize_grads(False)
        ctx.projections, ctx.follower, ctx.x_shape = projections, follower, x.shape
        rows = x.reshape(-1, x.shape[-1])  # (M, D)
        adapters = _Adapters(projections, tensors[: _num_tensors(projections)])
        with _no_autocast(x):
            adapters.draw_masks(rows)
            lows = adapters.low_rank(rows)
            outputs = [p.base_output(rows) for p in projections]  # (M, O) each
            adapters.add_updates(outputs, lows)
            outputs = [out.view(*x.shape[:-1], -1) for out in outputs]
            ctx.follower_masks = [_keep_mask(outputs[0], p.dropout) for p in follower if p.dropout > 0]
        ctx.sizes = [1, len(tensors), len(lows), len(adapters.masks), len(outputs) * len(follower)]
        ctx.save_for_backward(
            rows, *tensors, *lows, *adapters.masks, *(outputs if follower else ()), *ctx.follower_masks
        )
        return tuple(outputs)

    @staticmethod
    def unpack(ctx) -> list[list[torch.Tensor]]:
        """What forward saved: x, adapters, low-rank inputs, masks, outputs, the follower's mask."""
        saved, groups = list(ctx.saved_tensors), []
        for size in ctx.sizes:
            groups.append(saved[:size])
            saved = saved[size:]
        return [*groups, saved]

    @staticmethod
    def backward(ctx, *grads):
        # A checkpointed tensor can be unpacked once only: where there is a follower, it left the tensors here.
        groups = ctx.handed_over if ctx.follower else _Project.unpack(ctx)
        ctx.handed_over = None
        (rows,), tensors, lows, masks = groups[:4]
        own = _num_tensors(ctx.projections)
        adapters = _Adapters(ctx.projections, tensors[:own], masks)
        grads = [None if g is None else g.reshape(-1, g.shape[-1]) for g in grads]
        with _no_autocast(rows):
            grad_x, grad_tensors = adapters.backward(rows, grads, lows, ctx.needs_input_grad[0])
        grad_x = None if grad_x is None else grad_x.view(ctx.x_shape)
        return grad_x, None, None, *grad_tensors, *[None] * (len(tensors) - own)


class _ActivateDown(Function):
    """(gate, up) -> down(activation(gate) * up). It saves nothing; `node` is the _Project that saved for it."""

    @staticmethod
    def forward(ctx, gate, up, down, activation, node, *tensors):
        ctx.down, ctx.activation, ctx.node = down, activation, node
        adapters = _Adapters((down,), tensors, node.follower_masks)
        node.follower_masks = None  # saved in `node`; a second reference would outlive a checkpoint
        with _no_autocast(gate):
            inner = activation.forward(gate).mul_(up).flatten(0, -2)  # (M, F)
            outputs = [down.base_output(inner)]
            adapters.add_updates(outputs, adapters.low_rank(inner))
        return outputs[0].view(*gate.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        groups = ctx.node.handed_over = _Project.unpack(ctx.node)
        _, tensors, _, _, (gate, up), masks = groups
        adapters = _Adapters((ctx.down,), tensors[_num_tensors(ctx.node.projections) :], masks)
        with _no_autocast(gate):
            inner = ctx.activation.forward(gate).mul_(up).flatten(0, -2)
            grad_inner, grad_tensors = adapters.backward(
                inner, [grad.reshape(-1, grad.shape[-1])], adapters.low_rank(inner), True
            )
            del inner  # the block's highest moment is behind: computing the activation again costs less than keeping it
            grad_inner = grad_inner.view(gate.shape)
            grad_up = ctx.activation.forward(gate).mul_(grad_inner)
            grad_gate = ctx.activation.backward(grad_inner.mul_(up), gate)
        return grad_gate, grad_up, None, None, None, *grad_tensors


class _Adapters:
    """The low-rank side of several projections of one x, cast to x's dtype where it is used."""

    def __init__(self, projections, tensors, masks=()):
        self.projections, self.tensors, self.masks = projections, tensors, list(masks)
        self.adapted = [i for i, p in enumerate(projections) if p.adapted]
        self.dropped = any(p.dropout > 0 for p in projections)

    def draw_masks(self, rows: torch.Tensor) -> None:
        """A dropout mask each, in the order in which PEFT's modules would draw them."""
        if self.dropped:
            self.masks = [_keep_mask(rows, self.projections[i].dropout) for i in self.adapted]

    def low_rank(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """drop(x) A^T, (M, R), of each adapted projection; one product for all where x is the same for all."""
        if not self.adapted:
            return []
        if self.dropped:
            return [self._drop(rows, n) @ self._a(n, rows).t() for n in range(len(self.adapted))]
        return list((rows @ self._all_a(rows).t()).split(self._ranks(), dim=1))

    def add_updates(self, outputs: list[torch.Tensor], lows: list[torch.Tensor]) -> None:
        """Adds s (drop(x) A^T) B^T to each adapted projection's output.

        In place, but for selective checkpointing: it may have kept the output before the update.
        """
        add = torch.addmm if _selective() else torch.Tensor.addmm_
        for n, (i, low) in enumerate(zip(self.adapted, lows, strict=True)):
            outputs[i] = add(outputs[i], low, self._b(n, low).t(), alpha=self.projections[i].scale)

    def backward(self, rows, grads, lows, needs_x):
        """Gradients of x (M, D), or None, and of A and B of each adapted projection."""
        grad_x, grad_tensors, grad_lows = None, [None] * len(self.tensors), []
        if needs_x:
            for projection, grad in zip(self.projections, grads, strict=True):
                if grad is not None:
                    weight = projection.weight(rows.dtype)
                    grad_x = grad @ weight if grad_x is None else grad_x.addmm_(grad, weight)
                    del weight
        for n, i in enumerate(self.adapted):
            grad = grads[i]
            if grad is None:
                grad = rows.new_zeros(len(rows), len(self.tensors[2 * n + 1]))
            scale = self.projections[i].scale
            grad_lows.append((grad @ self._b(n, rows)).mul_(scale))  # (M, R)
            grad_tensors[2 * n + 1] = (grad.t() @ lows[n]).mul_(scale)  # (O, R)
        if not self.dropped and grad_lows:
            grad_low = torch.cat(grad_lows, dim=1)
            grad_tensors[::2] = (grad_low.t() @ rows).split(self._ranks())
            if grad_x is not None:
                grad_x.addmm_(grad_low, self._all_a(rows))
        elif self.dropped:
            for n, grad_low in enumerate(grad_lows):
                grad_tensors[2 * n] = grad_low.t() @ self._drop(rows, n)
                if grad_x is not None:
                    grad_x += self._drop(grad_low @ self._a(n, rows), n)
        return grad_x, grad_tensors

    def _a(self, n: int, like: torch.Tensor) -> torch.Tensor:
        return self.tensors[2 * n].to(like.dtype)

    def _b(self, n: int, like: torch.Tensor) -> torch.Tensor:
        return self.tensors[2 * n + 1].to(like.dtype)

    def _all_a(self, like: torch.Tensor) -> torch.Tensor:
        """(sum of R, D)"""
        return torch.cat([self._a(n, like) for n in range(len(self.adapted))])

    def _ranks(self) -> list[int]:
        return [len(a) for a in self.tensors[::2]]

    def _drop(self, x: torch.Tensor, n: int) -> torch.Tensor:
        """x with the n-th mask applied, scaled up by 1 / (1 - p); a full mask is no mask."""
        keep = 1 - self.projections[self.adapted[n]].dropout
        return (x * self.masks[n].view(x.shape)).div_(keep)


def _num_tensors(projections: tuple[Projection, ...]) -> int:
    return 2 * sum(p.adapted for p in projections)


def _keep_mask(like: torch.Tensor, probability: float) -> torch.Tensor:
    """Bool, 1 byte an element where PEFT's dropout keeps 4 or 8: the mask that F.dropout would draw here."""
    return F.dropout(torch.ones_like(like), probability) != 0


def _selective() -> bool:
    """Whether torch's selective checkpointing is recording or replaying operations."""
    return any(type(mode).__module__ == "torch.utils.checkpoint" for mode in _get_current_dispatch_mode_stack())


def _no_autocast(x: torch.Tensor) -> torch.autocast:
    """Casts are explicit in here; backward may also run inside a user's autocast."""
    return torch.autocast(x.device.type, enabled=False)


NORM_NUMBERS = 2**24
"""Numbers that a norm's backward takes at once, in whole rows: its fp32 copies of them, 64 MiB each, were 2 GiB each
for a row of 131,072 tokens, and the highest moment of its step."""


class _RMSNorm(Function):
    """w * (x * rsqrt(mean(x^2) + eps)), statistics in fp32; x: (..., D).

    It keeps its output, which the projections after it keep anyway, and not its input: y / w is the normalised input.
    """

    @staticmethod
    def forward(ctx, x, weight, epsilon):
        full = x.to(torch.float32)
        scale = torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + epsilon)  # (..., 1)
        y = weight * (full * scale).to(x.dtype)
        ctx.save_for_backward(y, weight, scale)
        ctx.x_dtype = x.dtype
        return y

    @staticmethod
    def backward(ctx, grad):
        y, weight, scale = ctx.saved_tensors
        weight = weight.to(torch.float32)
        grad_x = torch.empty(y.shape, dtype=ctx.x_dtype, device=y.device)
        at_once = max(1, NORM_NUMBERS // y.shape[-1])
        rows = [tensor.reshape(-1, tensor.shape[-1]).split(at_once) for tensor in (grad, y, scale, grad_x)]
        for g, n, s, target in pieces(list(zip(*rows, strict=True))):
            g, n = g.to(torch.float32), n.to(torch.float32)
            # d/dx: scale * (g w - n mean(g w n)), where n = y / w and so g w n = g y.
            mean = (g * n).mean(-1, keepdim=True)
            target.copy_((g * weight).addcmul_(n / weight, mean, value=-1).mul_(s))
        return grad_x, None, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMS norm (Zhang and Sennrich 2019) with a frozen weight (D,) that has no zeros."""
    return _RMSNorm.apply(x, weight, epsilon)
