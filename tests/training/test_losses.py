"""The loss head against the cross-entropy written out over full logits, and its memory by the allocator's events."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.factories import llama, packed_batch, random_tokens, summed_loss
from trainer.errors import ConfigError, ModelError
from trainer.model.attention import PACKED
from trainer.training.losses import Chunked, CutCrossEntropy, Full, Liger


def made(num_targets, vocabulary, hidden_size, dtype=torch.float32, bias=False):
    """A frozen head, hidden states that need a gradient, labels."""
    torch.manual_seed(0)
    head = torch.nn.Linear(hidden_size, vocabulary, bias=bias, dtype=dtype).requires_grad_(False)
    hidden = torch.randn(num_targets, hidden_size, dtype=dtype, requires_grad=True)
    return head, hidden, torch.randint(0, vocabulary, (num_targets,))


def full_logits(head, hidden, labels):
    return summed_loss(head(hidden), labels)


def without_torchs_own(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy")


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_loss_and_gradient_equal_full_logits(dtype, tolerance, bias, fallback, monkeypatch):
    head, hidden, labels = made(70, 500, 32, dtype, bias)
    expected = full_logits(head.float(), hidden.float(), labels)
    (expected_gradient,) = torch.autograd.grad(expected, hidden)
    head.to(dtype)
    if fallback:
        without_torchs_own(monkeypatch)
    loss = Chunked(chunk_tokens=16).head_sum(head, hidden, labels)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=min(tolerance, 2e-3), atol=0)
    scale = expected_gradient.abs().max().item()
    torch.testing.assert_close(gradient.float(), expected_gradient.float(), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("fallback", [False, True])
def test_a_model_s_chunked_loss_equals_its_full_one(fallback, monkeypatch):
    model = llama(PACKED).train()
    batch = packed_batch(random_tokens([9, 14, 6]))
    expected = Full().sum(model, batch)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    if fallback:
        without_torchs_own(monkeypatch)
    loss = Chunked(chunk_tokens=8).sum(model, batch)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)


def peak_bytes(work) -> int:
    """Highest sum of what the allocator handed out and took back, opaque operations included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    held = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize(("vocabulary", "fallback"), [(49_152, False), (49_152, True), (128_256, False)])
def test_the_peak_is_a_tenth_of_full_logits(vocabulary, fallback, monkeypatch):
    """4,096 targets of vocabularies of SmolLM2 and Llama 3, against the logits alone; the loss itself takes thrice."""
    if fallback:
        without_torchs_own(monkeypatch)
    head, hidden, labels = made(4096, vocabulary, 8)
    loss = Chunked(chunk_tokens=64 if fallback else 256)
    peak = peak_bytes(lambda: loss.head_sum(head, hidden, labels).backward())
    assert peak <= 0.10 * 4 * vocabulary * 4096


def test_the_peak_does_not_grow_with_the_tokens():
    """What 65,536 tokens take beyond 4,096 is their hidden states' gradients and losses: no logits."""
    peaks, loss = {}, Chunked(chunk_tokens=256)
    for num_targets in (1024, 4096):
        head, hidden, labels = made(num_targets, 32_768, 8)
        peaks[num_targets] = peak_bytes(lambda h=head, x=hidden, y=labels: loss.head_sum(h, x, y).backward())
    a_token = (peaks[4096] - peaks[1024]) / 3072
    at_65536 = peaks[4096] + a_token * (65_536 - 4096)
    assert a_token < 4 * 8 * 8  # a few vectors of hidden size 8 in fp32
    assert at_65536 <= 4 * 32_768 * 65_536 / 14


@pytest.mark.parametrize(("loss", "name"), [(Liger(), "liger"), (CutCrossEntropy(), "cut_cross_entropy")])
def test_gpu_kernels_say_what_they_lack(loss, name):
    with pytest.raises(ConfigError, match=f"loss={name}: its kernels need a GPU"):
        loss.check(torch.device("cpu"))
    with pytest.raises(ConfigError, match=rf"loss={name}: the package {name.replace('_', '.')}.* is not installed"):
        loss.check(torch.device("cuda"))
    head, hidden, labels = made(4, 10, 8)
    with pytest.raises(ModelError, match=f"loss={name}: the output head is a Sequential"):
        loss.head_sum(torch.nn.Sequential(head), hidden, labels)
