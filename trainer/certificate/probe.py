"""Before training: samples in one micro-batch must give what each gives alone, or the run refuses to start."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.data.batches.batch import MicroBatch, collate
from trainer.data.tokens.tokenize import TokenSet
from trainer.errors import ModelError, NonFiniteError
from trainer.model.precision import Dtypes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainer.training.losses import Loss

LOSS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
GRADIENT = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
"""Relative differences of two losses, and of two gradients by their norms, that rounding can explain. Another sample in
view changes a loss of random tokens by percents, and a gradient by about its own size."""


def check_packing(
    model: PreTrainedModel,
    loss: Loss,
    dtypes: Dtypes,
    vocab_size: int,
    packed: bool = True,
    rounding: float = 0.0,
) -> None:
    """Compares the training path on two short samples with transformers' plain path on each alone: loss and gradients.

    `packed` puts the two in one row, else each in its own padded row: that checks the loss path, too. `rounding`: the
    relative error of what the base's arithmetic rounds beside its dtype (quant=int8), of which a loss shows a few and a
    gradient some dozens. What the loss leaves to the
    model's head is compared apart, at many sizes. Raises ModelError, NonFiniteError.
    """
    loss_share = max(LOSS[dtypes.compute], 4 * rounding)
    gradient_share = max(GRADIENT[dtypes.compute], 40 * rounding)
    was_training, attention = model.training, model.config._attn_implementation
    model.eval()
    try:
        together = _compare(model, loss, dtypes, vocab_size, [[0, 1]], packed)
        if together.within(loss_share, gradient_share):
            return
        apart = _compare(model, loss, dtypes, vocab_size, [[0], [1]], packed)
    finally:
        model.set_attn_implementation(attention)
        model.zero_grad(set_to_none=True)
        model.train(was_training)
    if not math.isfinite(together.expected):
        raise ModelError(
            f"packing check: the model itself gives a loss of {together.expected} on two short samples. Its weights "
            f"are not all finite, or its numbers are too large for {str(dtypes.compute).removeprefix('torch.')}: "
            "try precision=fp32, or fetch the model again."
        )
    if not math.isfinite(together.gradient):
        raise NonFiniteError(
            "packing probe: the gradients of two short samples are not finite, though their loss is. A number is too "
            "large: lower adapter.alpha, or try precision=fp32 or loss=full."
        )
    if packed and apart.within(loss_share, gradient_share):
        cause, way_out = "packed samples would see each other", "Use packing=none."
    else:
        cause, way_out = "the loss path differs from the model's own, for each sample alone too", "Use loss=full."
    raise ModelError(
        f"packing check: two samples {'in one row' if packed else 'padded'} give a loss of {together.loss:.4f}, each "
        f"alone {together.expected:.4f} in sum; their gradients differ by {together.gradient:.2%} (rounding explains "
        f"{loss_share:.2%} of a loss and {gradient_share:.2%} of a gradient). With this model "
        f"({model.config.model_type}, attention {attention}) {cause}. {way_out}"
    )


@dataclass(frozen=True)
class _Comparison:
    """The training path beside the model's own forward."""

    loss: float
    expected: float
    gradient: float
    """norm of the gradients' difference over the norm of the training path's"""

    def within(self, loss_share: float, gradient_share: float) -> bool:
        return abs(self.loss - self.expected) <= loss_share * abs(self.expected) and self.gradient <= gradient_share


def _compare(model, loss: Loss, dtypes: Dtypes, vocab_size: int, rows: list[list[int]], packed: bool) -> _Comparison:
    """The probe's samples as these rows on the training path, and each alone."""
    device, tokens = next(model.parameters()).device, _two_samples(vocab_size)
    attention = model.config._attn_implementation
    model.zero_grad(set_to_none=True)
    found = expected = 0.0
    for row in rows:
        batch = collate(tokens, np.array(row), packed=packed).to(device)
        with dtypes.autocast():
            total = loss.sum(model, batch)
        total.backward()
        found += total.item()
    norm = _gradient_norm(model)
    model.set_attn_implementation("sdpa" if attention != "eager" else "eager")
    with dtypes.autocast():
        loss.check_model(model)
    for index in range(len(tokens)):
        batch = collate(tokens, np.array([index]), packed=False).to(device)
        with dtypes.autocast():
            total = _reference(model, batch)
        (-total).backward()  # the gradients of the two ways cancel in place: no second set of them is held
        expected += total.item()
    model.set_attn_implementation(attention)
    return _Comparison(found, expected, _gradient_norm(model) / max(norm, 1e-30))


def _gradient_norm(model: torch.nn.Module) -> float:
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()


def _reference(model: PreTrainedModel, batch: MicroBatch) -> torch.Tensor:
    """Summed loss of one unpadded sample by the model's own forward, no mask, no packing arguments."""
    logits = model(input_ids=batch.input_ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=-100, reduction="sum"
    )


def _two_samples(vocab_size: int) -> TokenSet:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocab_size, size=9, dtype=np.int32)
    return TokenSet(ids, np.ones(9, dtype=bool), np.array([0, 5, 9]), sources=[])
