"""What each row of a step does: the size of its gradient, and to first order its effect on the held-out loss.

A step moves the weights w by about -lr * g, where g is the sum of its rows' gradients over the number of its targets.
The held-out loss L changes by the product of that movement with its own gradient h: a row whose gradient points along
h lowers it, one that points against h raises it. This is TracIn at one step (Pruthi et al. 2020, "Estimating Training
Data Influence by Tracing Gradient Descent", eq. 1), with plain gradients: what an optimizer scales them by is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from trainer.data.batches.batch import MicroBatch, collate
from trainer.data.tokens.token_sets import Tokens
from trainer.training.loop import Loop


@dataclass(frozen=True)
class Influence:
    """Of one row in one step."""

    step: int
    index: int
    """number of the sample in its set"""
    norm: float
    """of its part of the step's gradient"""
    effect: float | None
    """on the held-out loss, for a learning rate of 1: above 0 raises it; None where nothing is held out"""


def influences(
    loop: Loop, step: int, samples: Iterable[tuple[Tokens, np.ndarray]], held_out: Iterable[MicroBatch] | None
) -> list[Influence]:
    """Of every row of a step, at the weights there are. Gradients and generators are left as they were."""
    groups = [(tokens, int(index)) for tokens, indices in samples for index in indices]
    batches = [collate(tokens, np.array([index]), loop.steps.packing.packed) for tokens, index in groups]
    targets = sum(batch.num_targets for batch in batches)
    found = []
    with _set_apart(loop):
        direction = None if held_out is None else _gradient(loop, held_out)
        for (_, index), batch in zip(groups, batches, strict=True):
            parts = _gradient(loop, [batch], targets)
            norm = torch.stack([part.double().pow(2).sum() for part in parts]).sum().sqrt().item()
            effect = None
            if direction is not None:
                pairs = zip(parts, direction, strict=True)
                effect = -torch.stack([(part * way).double().sum() for part, way in pairs]).sum().item()
            found.append(Influence(step, index, norm, effect))
    return found


def _gradient(loop: Loop, batches: Iterable[MicroBatch], targets: int | None = None) -> list[torch.Tensor]:
    """Of the loss over all targets of the batches (or over `targets`), by trainable parameter."""
    count = 0
    for batch in batches:
        with loop.dtypes.autocast():
            loss = loop.loss.sum(loop.model, batch.to(loop.accelerator.device))
        if loss.requires_grad:  # a row without targets has none
            loop.accelerator.backward(loss)
        count += batch.num_targets
    scale = 1 / (targets or count)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad * scale for p in loop.parameters]
    loop.optimizer.zero_grad(set_to_none=True)
    return grads


@contextmanager
def _set_apart(loop: Loop) -> Iterator[None]:
    """No dropout inside, which would be noise on every row, and nothing of it left outside; memory policies, which
    work in training mode, stay."""
    dropouts = [m for m in loop.model.modules() if isinstance(m, torch.nn.Dropout) and m.training]
    devices = [loop.accelerator.device] if loop.accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for module in dropouts:
            module.eval()
        try:
            yield
        finally:
            for module in dropouts:
                module.train()
