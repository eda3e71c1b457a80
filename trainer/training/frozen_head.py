"""Summed cross-entropy under a frozen linear head, whose gradient is made in the forward pass.

Backward of a chunk needs its logits again. Kept they would be all logits; computed again they cost a third product
with the head. Here the hidden states' gradient takes their place while a chunk's logits exist (as Liger's kernel does,
Hsu et al. 2024): two products a chunk, and (N, H) is kept, which the hidden states took before.

N: targets. H: hidden size. V: vocabulary. n: targets of a chunk.
"""

from __future__ import annotations

import torch
from torch.autograd import Function
from torch.nn import functional as F

from trainer.model.fused.pieces import pieces
from trainer.training.logits import LogitMap


def frozen_head_sum(
    hidden: torch.Tensor,  # (N, H), in the head's dtype
    weight: torch.Tensor,  # (V, H)
    bias: torch.Tensor | None,  # (V,)
    labels: torch.Tensor,  # (N,)
    chunk_tokens: int,
    mapped: LogitMap,
) -> torch.Tensor:
    """Scalar fp32. Softmax and sums are in fp32; `weight` and `bias` get no gradient."""
    return _FrozenHeadSum.apply(hidden, weight, bias, labels, chunk_tokens, mapped)


class _FrozenHeadSum(Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, chunk_tokens, mapped):
        total = hidden.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in pieces(range(0, len(hidden), chunk_tokens)):
                chunk = slice(begin, begin + chunk_tokens)
                loss, probabilities, slope = _chunk(hidden[chunk], weight, bias, labels[chunk, None], mapped)
                total += loss
                if gradient is not None:
                    # d loss / d logits = softmax - one hot: in fp32, before it is rounded to the head's dtype.
                    probabilities.scatter_add_(1, labels[chunk, None], -torch.ones_like(probabilities[:, :1]))
                    if slope is not None:
                        probabilities.mul_(slope)
                    torch.mm(probabilities.to(weight.dtype), weight, out=gradient[chunk])
                del probabilities, slope  # before the next chunk's logits
        if mapped.scale != 1.0 and gradient is not None:
            gradient.mul_(mapped.scale)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, grad):
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None, None, None, None


def _chunk(hidden, weight, bias, labels, mapped) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Summed loss; the softmax of the logits (n, V), fp32, in the only buffer that there is of them in fp32; and, of
    capped logits, what the cap leaves of their slope (n, V): 1 - (logit / cap)^2."""
    logits = mapped.apply_(F.linear(hidden, weight, bias).float())
    slope = None if mapped.cap is None else logits.div(mapped.cap).square_().neg_().add_(1)
    highest = logits.amax(1, keepdim=True)  # (n, 1)
    chosen = logits.gather(1, labels)
    probabilities = logits.sub_(highest).exp_()
    normaliser = probabilities.sum(1, keepdim=True)
    loss = (normaliser.log() + highest - chosen).sum()
    return loss, probabilities.div_(normaliser), slope
