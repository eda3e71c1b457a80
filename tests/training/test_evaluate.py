"""Held-out loss against brute force over every target."""

from __future__ import annotations

import math

import pytest
import torch

from tests.factories import FP32, llama, option, packed_batch, padded_batch, random_tokens, summed_loss
from trainer.model.attention import PACKED
from trainer.training.evaluate import Evaluation, evaluate
from trainer.training.losses import Chunked, Full

TOKENS = random_tokens([9, 30, 4, 17, 2])


@pytest.mark.parametrize("loss", [Full(), Chunked(6)], ids=["full", "chunked"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_the_token_mean_over_unequal_batches(packed, loss):
    model = llama(PACKED if packed else "sdpa")
    plain = llama("eager")
    with torch.no_grad():
        parts = [padded_batch(TOKENS, i) for i in range(len(TOKENS))]
        total = sum(summed_loss(plain(b.input_ids, use_cache=False).logits, b.labels).item() for b in parts)
    count = sum(int(TOKENS.sample(i)[1][1:].sum()) for i in range(len(TOKENS)))
    batches = [packed_batch(TOKENS)] if packed else [padded_batch(TOKENS, 0, 1, 2), padded_batch(TOKENS, 3, 4)]
    result = evaluate(model, loss, batches, FP32)
    assert result.num_targets == count
    assert result.loss == pytest.approx(total / count, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)


def test_dropout_is_off_and_the_mode_comes_back():
    base = llama(PACKED)
    option("adapter", "lora", dropout=0.9).attach(base)
    torch.nn.init.normal_(base.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    base.train()
    before = torch.get_rng_state()
    losses = {evaluate(base, Full(), [packed_batch(TOKENS)], FP32).loss for _ in range(3)}
    assert len(losses) == 1 and base.training
    assert torch.equal(torch.get_rng_state(), before), "an evaluation must not move the training's dropout"
    base.eval()
    evaluate(base, Full(), [packed_batch(TOKENS)], FP32)
    assert not base.training


def test_a_stop_between_two_batches_leaves_the_mode_as_it_was():
    class Stop(Exception):
        pass

    def check():
        raise Stop

    model = llama(PACKED).train()
    with pytest.raises(Stop):
        evaluate(model, Full(), [packed_batch(TOKENS)], FP32, check)
    assert model.training


def test_a_huge_loss_has_infinite_perplexity():
    assert Evaluation(1e4, 1).perplexity == math.inf
