"""NEFTune's noise: its size by the formula, each sample's own length, nothing outside of training."""

from __future__ import annotations

import pytest
import torch

from tests.factories import llama, packed_batch, padded_batch, random_tokens
from trainer.model.attention import PACKED
from trainer.model.neftune import add_noise

ALPHA, LENGTHS = 5.0, [4, 30, 9]
TOKENS = random_tokens(LENGTHS)


def noise_of(batch, attention):
    """(B, T, H): what the first block gets beside the embeddings."""
    model = llama(attention)
    seen = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    add_noise(model, ALPHA)
    torch.manual_seed(0)
    for training in (False, True):
        model.train(training)
        model(**batch.inputs())
    without, noisy = seen
    assert torch.equal(without, model.model.embed_tokens.weight[batch.input_ids])
    return noisy - without


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_noise_is_as_large_as_the_samples_own_length_says(packed):
    noise = noise_of(packed_batch(TOKENS), PACKED) if packed else noise_of(padded_batch(TOKENS), "sdpa")
    samples = noise[0].split(LENGTHS) if packed else [row[:n] for row, n in zip(noise, LENGTHS, strict=True)]
    for sample, length in zip(samples, LENGTHS, strict=True):
        largest = ALPHA / (length * sample.shape[-1]) ** 0.5
        assert 0.9 * largest < sample.abs().max() <= largest * (1 + 1e-5)
        assert sample.std().item() == pytest.approx(largest / 3**0.5, rel=0.2)  # of a uniform distribution


def test_without_alpha_nothing_is_hooked():
    model = llama("sdpa")
    add_noise(model, 0.0)
    assert not model.model.embed_tokens._forward_hooks and not model.model._forward_pre_hooks
