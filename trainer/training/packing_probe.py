"""Before training: samples in one micro-batch must give what each gives alone, or the run refuses to start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.data.batches.batch import MicroBatch, collate
from trainer.data.tokens.tokenize import TokenSet
from trainer.errors import ModelError
from trainer.model.precision import Dtypes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainer.training.losses import Loss

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Relative difference of two losses that rounding can explain. Contamination by another sample is far larger."""


@torch.no_grad()
def check_packing(model: PreTrainedModel, loss: Loss, dtypes: Dtypes, vocab_size: int, packed: bool = True) -> None:
    """Compares the training path on two short samples with transformers' plain path on each alone.

    `packed` puts the two in one row, else each in its own padded row: that checks the loss path, too.
    Random tokens in a fixed order: another sample in view changes such a loss by percents. Raises ModelError.
    """
    device = next(model.parameters()).device
    tokens = _two_samples(vocab_size)
    was_training, attention = model.training, model.config._attn_implementation
    model.eval()
    with dtypes.autocast():
        together = loss.sum(model, collate(tokens, np.array([0, 1]), packed=packed).to(device))
        model.set_attn_implementation("sdpa" if attention != "eager" else "eager")
        alone = [_reference(model, collate(tokens, np.array([i]), packed=False).to(device)) for i in range(len(tokens))]
    model.set_attn_implementation(attention)
    model.train(was_training)
    expected = torch.stack(alone).sum()
    difference = ((together - expected).abs() / expected.abs()).item()
    if not difference <= TOLERANCE[dtypes.compute]:
        way_out = "Use packing=none; if that also fails, loss=full." if packed else "Use loss=full."
        how = "in one row" if packed else "padded"
        raise ModelError(
            f"packing probe: two samples {how} give a loss of {together.item():.4f}, each "
            f"alone {expected.item():.4f} in sum. With this model ({model.config.model_type}, attention {attention}) "
            f"{'packed samples would see each other, or the' if packed else 'the'} loss path differs. {way_out}"
        )


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
