"""How far a model that was written is from the adapter that it was made of, on rows of the run.

V: vocabulary. n: targets of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from trainer.data.batches.batch import collate
from trainer.data.tokens.tokenize import Tokens
from trainer.model.precision import Dtypes

MOST_TARGETS = 1024
"""Targets whose logits are kept: 0.5 GiB of host memory with a vocabulary of 128,000."""


@dataclass(frozen=True)
class Reference:
    """What the adapter's model says of some samples."""

    samples: list[int]
    logits: list[torch.Tensor]
    """(n, V) fp32 of each sample, on the host"""


@dataclass(frozen=True)
class Difference:
    """Of the merged model from the adapter's, over all targets of some samples."""

    num_samples: int
    num_targets: int
    kl_divergence: float
    """KL(adapter || merged), nats a target, mean"""
    largest_logit_difference: float
    largest_logit: float
    """the adapter's largest absolute one, to which that compares"""
    top1_agreement: float
    """share of the targets where both think the same token likeliest"""
    adapter_loss: float
    merged_loss: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def reference(model: PreTrainedModel, tokens: Tokens, rows: int, dtypes: Dtypes) -> Reference:
    """The adapter's logits of up to `rows` samples, spread over all; fewer where their targets are many."""
    spread = np.unique(np.linspace(0, len(tokens) - 1, min(rows, len(tokens))).astype(int)).tolist()
    samples, logits, targets = [], [], 0
    for sample in spread:
        targets += int(tokens.target_counts[sample])
        if samples and targets > MOST_TARGETS:
            break
        samples.append(sample)
        logits.append(target_logits(model, tokens, sample, dtypes)[0].cpu())
    return Reference(samples, logits)


def difference(known: Reference, merged: PreTrainedModel, tokens: Tokens) -> Difference:
    """Compares the merged model, run as plain transformers runs it, with what the adapter's said."""
    kl = agree = targets = 0.0
    losses = [0.0, 0.0]
    largest = highest = 0.0
    for sample, theirs in zip(known.samples, known.logits, strict=True):
        ours, labels = target_logits(merged, tokens, sample, None)
        theirs = theirs.to(ours.device)
        p, q = (logits.double().log_softmax(-1) for logits in (theirs, ours))  # (n, V)
        kl += (p.exp() * (p - q)).sum().item()
        agree += (theirs.argmax(-1) == ours.argmax(-1)).sum().item()
        for k, logarithms in enumerate((p, q)):
            losses[k] -= logarithms.gather(1, labels[:, None]).sum().item()
        largest, highest = _larger(largest, (theirs - ours)), _larger(highest, theirs)
        targets += len(labels)
    return Difference(
        num_samples=len(known.samples),
        num_targets=int(targets),
        kl_divergence=max(0.0, kl / targets) if math.isfinite(kl) else math.inf,
        largest_logit_difference=largest,
        largest_logit=highest,
        top1_agreement=agree / targets,
        adapter_loss=losses[0] / targets,
        merged_loss=losses[1] / targets,
    )


@torch.no_grad()
def target_logits(
    model: PreTrainedModel, tokens: Tokens, sample: int, dtypes: Dtypes | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (n, V) in fp32 and labels (n,) of a sample's targets; under the run's autocast, or without one."""
    batch = collate(tokens, np.array([sample]), packed=False).to(next(model.parameters()).device)
    with dtypes.autocast() if dtypes is not None else nullcontext():
        logits = model.eval()(**batch.inputs()).logits.flatten(0, 1)  # (T, V)
    return logits[batch.target_index].float(), batch.labels.flatten()[batch.target_index]


def _larger(known: float, values: torch.Tensor) -> float:
    return max(known, values.abs().max().item()) if values.numel() else known


def lines(found: Difference) -> Iterator[tuple[str, str]]:
    """For the screen."""
    yield "compared on", f"{found.num_targets:,} targets of {found.num_samples} samples"
    yield "KL(adapter || merged)", f"{found.kl_divergence:.3g} nats a target"
    yield "largest logit difference", f"{found.largest_logit_difference:.3g}, of logits up to {found.largest_logit:.3g}"
    yield "same likeliest token", f"{found.top1_agreement:.2%}"
    yield "loss", f"adapter {found.adapter_loss:.4f}, merged {found.merged_loss:.4f}"
