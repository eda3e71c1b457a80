"""Loss and gradients of samples together, beside those of each alone by transformers itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from trainer.certificate.twin import FIRST_ID, LAST_ID, LENGTHS
from trainer.data.batches.apart import Apart
from trainer.data.batches.batch import IGNORED, MicroBatch, collate
from trainer.data.batches.packing import NoPacking
from trainer.data.tokens.tokenize import TokenSet
from trainer.model.families import rotary_boundary
from trainer.training.losses import Loss

VALUE = 2.0**-16
"""Relative difference of two sums of losses in fp32 that the order of sums explains: 2^7 units of rounding (2^-23)."""
GRADIENT = 2.0**-10
"""The same of a parameter's gradient, by norms: 2^13 units; products of several layers add up, and cancel."""
FAINT = 2.0**-13
"""Share of the whole gradient's norm below which a parameter's own is rounding of the others'."""


@dataclass
class Measured:
    """Summed loss of the samples, and the gradient of each parameter that has one."""

    loss: float
    gradients: dict[str, torch.Tensor]

    def apart(self, other: Measured) -> str | None:
        """In words, by how much `other` differs beyond rounding; None where it does not."""
        value = abs(self.loss - other.loss) / abs(self.loss)
        if not value <= VALUE:
            return f"the loss differs by {value:.1e} (rounding: {VALUE:.1e})"
        whole = torch.stack([g.norm() for g in self.gradients.values()]).norm()
        worst, where = 0.0, ""
        for name in self.gradients.keys() | other.gradients.keys():
            ours, theirs = self.gradients.get(name), other.gradients.get(name)
            if ours is None or theirs is None:
                if (theirs if ours is None else ours).norm() > FAINT * whole:
                    return f"{name} has a gradient on one side only"
                continue
            share = ((ours - theirs).norm() / torch.maximum(ours.norm(), FAINT / GRADIENT * whole)).item()
            if not share <= worst:
                worst, where = share, name
        return (
            f"the gradient of {where} differs by {worst:.1e} (rounding: {GRADIENT:.1e})"
            if not worst <= GRADIENT
            else None
        )


def samples(vocab_size: int, lengths: Iterable[int] = LENGTHS) -> TokenSet:
    """Random ids; most are targets."""
    lengths, rng = list(lengths), np.random.default_rng(0)
    offsets = np.cumsum([0, *lengths])
    is_target = rng.random(offsets[-1]) < 0.8
    is_target[offsets[1:] - 1] = True
    ids = rng.integers(FIRST_ID, min(vocab_size, LAST_ID), offsets[-1], dtype=np.int32)
    return TokenSet(ids, is_target, offsets, sources=[])


def rows(model: PreTrainedModel, tokens: TokenSet, packed: bool) -> list[MicroBatch]:
    """Micro-batches that hold all samples, as a run would make them."""
    boundary = rotary_boundary(model.config, int(tokens.lengths.max()))
    together = [np.arange(len(tokens))]
    if boundary is not None:
        sides = Apart(NoPacking(), boundary)
        chosen = tokens.lengths <= sides.boundary
        together = [row for row in (np.flatnonzero(chosen), np.flatnonzero(~chosen)) if len(row)]
    return [collate(tokens, row, packed) for row in together]


def alone(model: PreTrainedModel, tokens: TokenSet, renamed: dict[str, str] | None = None) -> Measured:
    """The oracle: the model's own forward on each sample, no mask, no positions given."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for index in range(len(tokens)):
        batch = collate(tokens, np.array([index]), packed=False)
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
        loss = F.cross_entropy(logits[0].float(), batch.labels[0], ignore_index=IGNORED, reduction="sum")
        loss.backward()
        total += loss.item()
    return Measured(total, {renamed_to(name, renamed): g for name, g in _gradients(model).items()})


def together(model: PreTrainedModel, loss: Loss, batches: Iterable[MicroBatch]) -> Measured:
    """The training path."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        summed = loss.sum(model, batch)
        summed.backward()
        total += summed.item()
    return Measured(total, _gradients(model))


def _gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def renamed_to(name: str, renamed: dict[str, str] | None) -> str:
    """A parameter's name in the text decoder alone."""
    for pattern, new in (renamed or {}).items():
        changed = re.sub(pattern, new, name)
        if changed != name:
            return changed
    return name
