"""A frozen 8-bit layer: bitsandbytes' own numbers to the bit, and nothing of its input kept."""

from __future__ import annotations

import pytest
import torch

from tests.factories import FP32, llama, option, packed_batch, random_tokens
from trainer.model.attention import PACKED
from trainer.model.int8 import frozen_forward
from trainer.model.live_storages import LiveStorages
from trainer.model.loading.base import settled
from trainer.training.losses import Chunked


def layer(bias: bool, threshold: float):
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 80, bias=bias).requires_grad_(False)
    return option("quant", "int8", outlier_threshold=threshold).linear(linear, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("threshold", [0.0, 2.0])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_values_and_gradients_are_bitsandbytes_own(dtype, bias, threshold, training):
    own, ours = layer(bias, threshold).train(training), layer(bias, threshold).train(training)
    frozen_forward(ours)
    left = torch.randn(2, 7, 48, dtype=dtype).requires_grad_()
    right = left.detach().clone().requires_grad_()
    upstream = torch.randn(2, 7, 80, dtype=dtype)
    expected, found = own(left), ours(right)
    expected.backward(upstream)
    found.backward(upstream)
    assert torch.equal(found, expected) and torch.equal(right.grad, left.grad)
    assert found.dtype is expected.dtype and left.grad.abs().sum() > 0


def kept_bytes(quant: str) -> int:
    """Live bytes that the forward pass of a fully checkpointed model leaves for backward."""
    base = llama(PACKED, num_hidden_layers=4)
    for block in base.model.layers:
        for holder in (block.self_attn, block.mlp):
            for name, child in list(holder.named_children()):
                if isinstance(child, torch.nn.Linear):
                    child = option("quant", quant).linear(child.requires_grad_(False), torch.float32, base.device)
                    setattr(holder, name, child)
    base.is_loaded_in_8bit = quant == "int8"
    settled(base)
    option("adapter", "lora").attach(base)
    option("checkpointing", "full").apply(base)
    base.train()
    batch = packed_batch(random_tokens([60, 40, 90]))
    Chunked(64).sum(base, batch).backward()  # bitsandbytes moves its scales at first use
    with FP32.autocast(), LiveStorages(1) as tracker:
        tracker.hold(*base.parameters(), *base.buffers(), *(p.grad for p in base.parameters()))
        tracker.hold(*(m.state.SCB for m in base.modules() if hasattr(m, "state")))
        before = tracker.live
        loss = Chunked(64).sum(base, batch)
        kept = tracker.live - before
    loss.backward()
    return kept


def test_under_checkpointing_it_keeps_what_an_unquantised_layer_keeps():
    assert kept_bytes("int8") <= kept_bytes("none") * 1.02
