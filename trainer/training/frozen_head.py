"""Summed cross-entropy under a linear head that is frozen, but for a few rows, with its gradient made in forward.

Backward of a chunk needs its logits again. Kept they would be all logits; computed again they cost a third product
with the head. Here the hidden states' gradient takes their place while a chunk's logits exist (as Liger's kernel does,
Hsu et al. 2024): two products a chunk, and (N, H) is kept, which the hidden states took before.

N: targets. H: hidden size. V: vocabulary. n: targets of a chunk. k: rows of the head that train, apart from it.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    rows: torch.Tensor | None = None,  # (k, H), fp32
    ids: Sequence[int] = (),
    smoothing: float = 0.0,
) -> torch.Tensor:
    """Scalar fp32. Softmax and sums are in fp32; `weight` and `bias` get no gradient. Rows, if there are any, stand in
    the places `ids` of the weight, and their gradient is summed in fp32.

    With `smoothing` s a target's logit weighs 1 - s, and every logit s / V more (Szegedy et al. 2016, section 7).
    """
    places = None if rows is None else torch.tensor(list(ids), device=rows.device)
    return _FrozenHeadSum.apply(hidden, weight, bias, labels, chunk_tokens, mapped, rows, places, smoothing)


class _FrozenHeadSum(Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, chunk_tokens, mapped, rows, places, smoothing):
        total = hidden.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        rows_gradient = torch.zeros_like(rows) if ctx.needs_input_grad[6] else None
        new = None if rows is None else (rows.to(weight.dtype), places)
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in pieces(range(0, len(hidden), chunk_tokens)):
                chunk = slice(begin, begin + chunk_tokens)
                loss, probabilities, slope = _chunk(
                    hidden[chunk], weight, bias, labels[chunk, None], mapped, new, smoothing
                )
                total += loss
                if gradient is not None or rows_gradient is not None:
                    # d loss / d logits = softmax - one hot: in fp32, before it is rounded to the head's dtype.
                    whole = torch.full_like(probabilities[:, :1], smoothing - 1)
                    probabilities.scatter_add_(1, labels[chunk, None], whole)
                    if smoothing:
                        probabilities.sub_(smoothing / len(weight))
                    if slope is not None:
                        probabilities.mul_(slope)
                    if rows_gradient is not None:
                        rows_gradient.addmm_(probabilities[:, places].t(), hidden[chunk].float())
                    if gradient is not None:
                        _into_hidden(probabilities.to(weight.dtype), weight, new, gradient[chunk])
                del probabilities, slope  # before the next chunk's logits
        for made in (gradient, rows_gradient):
            if mapped.scale != 1.0 and made is not None:
                made.mul_(mapped.scale)
        ctx.save_for_backward(gradient, rows_gradient)
        return total

    @staticmethod
    def backward(ctx, grad):
        gradient, rows_gradient = (None if made is None else made * grad for made in ctx.saved_tensors)
        return gradient, None, None, None, None, None, rows_gradient, None, None


def _into_hidden(slopes, weight, new, out) -> None:
    """The hidden states' gradient (n, H) from the logits' (n, V), which is used up."""
    own = None
    if new is not None:
        own = slopes[:, new[1]]  # (n, k)
        slopes.index_fill_(1, new[1], 0)
    torch.mm(slopes, weight, out=out)
    if new is not None:
        out.addmm_(own, new[0])


def _chunk(
    hidden, weight, bias, labels, mapped, new, smoothing
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Summed loss; the softmax of the logits (n, V), fp32, in the only buffer that there is of them in fp32; and, of
    capped logits, what the cap leaves of their slope (n, V): 1 - (logit / cap)^2."""
    logits = F.linear(hidden, weight, bias)
    if new is not None:
        rows, places = new
        logits.index_copy_(1, places, F.linear(hidden, rows, None if bias is None else bias[places]))
    logits = logits.float()
    logits = mapped.apply_(logits)
    slope = None if mapped.cap is None else logits.div(mapped.cap).square_().neg_().add_(1)
    highest = logits.amax(1, keepdim=True)  # (n, 1)
    chosen = logits.gather(1, labels)
    if smoothing:
        chosen = chosen.lerp(logits.mean(1, keepdim=True), smoothing)
    probabilities = logits.sub_(highest).exp_()
    normaliser = probabilities.sum(1, keepdim=True)
    loss = (normaliser.log() + highest - chosen).sum()
    return loss, probabilities.div_(normaliser), slope
