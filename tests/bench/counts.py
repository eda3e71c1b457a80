"""Numbers that need no clock: bytes of the loss, saved bytes, dequantisations, reads of the device, fill.

    python -m tests.bench counts

Bytes of the loss are traced on fake tensors (no memory is taken); everything else runs on a small random model.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.data.batches.test_packing import log_normal
from tests.factories import llama, option
from tests.model.fused.test_modules import Dequantisations, attached, quantised, saved_bytes, step
from trainer.model.attention import PACKED
from trainer.model.live_storages import LiveStorages
from trainer.training.losses import Chunked

HEADS = [(65_536, 32_768), (4_096, 49_152), (4_096, 128_256)]
"""(targets, vocabulary)"""


def loss_peak(chunk_tokens: int | None, targets: int, vocabulary: int, width: int = 64) -> int:
    """Most bytes that the loss of hidden states adds, forward or backward, fp32; None: full logits."""
    with FakeTensorMode(), LiveStorages(1) as tracker:
        head = torch.nn.Linear(width, vocabulary, bias=False).requires_grad_(False)
        hidden = torch.empty(targets, width, requires_grad=True)
        labels = torch.empty(targets, dtype=torch.int64)
        tracker.hold(head.weight, hidden, labels)
        before, _ = tracker.mark()
        if chunk_tokens is None:
            total = torch.nn.functional.cross_entropy(head(hidden).float(), labels, reduction="sum")
        else:
            total = Chunked(chunk_tokens).head_sum(head, hidden, labels)
        total.backward()
        return tracker.mark()[1] - before


def saved_a_token(attention: str, fused: bool, tokens: int = 512) -> float:
    """Bytes a token and layer kept for backward, in Llama-3-8B's proportions at a sixteenth of its width."""
    shape = {"hidden_size": 256, "intermediate_size": 896, "num_attention_heads": 16, "num_key_value_heads": 4}
    totals = [
        saved_bytes(attached(quantised(llama(attention, num_hidden_layers=n, **shape)), fused=fused), False)
        for n in (2, 3)
    ]
    return (totals[1] - totals[0]) / tokens


def dequantisations(policy: str) -> dict[str, float]:
    """Of a micro-batch: all, and a weight."""
    adapted = attached(quantised(llama(PACKED)), fused=True)
    with Dequantisations() as counter:
        step(adapted, option("checkpointing", policy))
    return {"all": counter.counts.total(), "a_weight": counter.counts.total() / len(counter.counts)}


def main() -> None:
    """Prints them as JSON."""
    losses = {}
    for targets, vocabulary in HEADS:
        ours = loss_peak(option("loss", "chunked").chunk_tokens, targets, vocabulary)
        full = loss_peak(None, targets, vocabulary)
        losses[f"{targets} targets, V={vocabulary}"] = {"mib": ours / 2**20, "share_of_full_logits": ours / full}
    lengths = log_normal(100_000)
    train = SimpleNamespace(micro_batch_tokens=4096)
    rows = option("packing", "best_fit").micro_batches(lengths, train, np.random.default_rng(0))
    ours, peft = saved_a_token(PACKED, True), saved_a_token("sdpa", False)
    result = {
        "loss": losses,
        "saved_bytes_a_token_and_layer": {"ours": ours, "peft": peft, "ratio": ours / peft},
        "dequantisations": {policy: dequantisations(policy) for policy in ("none", "full")},
        "fill": float(lengths.sum() / (len(rows) * 4096)),
    }
    print(json.dumps(result))
