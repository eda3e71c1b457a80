"""Optimizers: a step by hand, which parameters decay, and that their settings arrive."""

from __future__ import annotations

import pytest
import torch

from tests.factories import option, options

OPTIONS = options("optim")
ADAMW = [name for name in OPTIONS if "adamw" in name and "galore" not in name and "schedule_free" not in name]


def build(name: str, parameters: list, **settings):
    return option("optim", name, **settings).build(parameters)


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    """A matrix whose state bitsandbytes keeps in 8 bits (4,096 elements or more), a small one, and a vector."""
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(*shape) / 10) for shape in ((64, 128), (4, 8), (16,))]


def give_gradients(params: list, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("name", ADAMW)
def test_three_steps_are_adamws_by_hand(name):
    params = parameters()
    optimizer = build(name, params, learning_rate=1e-2, weight_decay=0.1, betas=[0.8, 0.95], eps=1e-6)
    expected = [p.detach().clone().double() for p in params]
    first = [torch.zeros_like(e) for e in expected]
    second = [torch.zeros_like(e) for e in expected]
    for step in range(1, 4):
        give_gradients(params, step)
        for p, e, m, v in zip(params, expected, first, second, strict=True):
            gradient = p.grad.double()
            m.mul_(0.8).add_(0.2 * gradient)
            v.mul_(0.95).add_(0.05 * gradient**2)
            decay = 0.1 if p.ndim > 1 else 0.0
            update = m / (1 - 0.8**step) / ((v / (1 - 0.95**step)).sqrt() + 1e-6)
            e.mul_(1 - 1e-2 * decay).sub_(1e-2 * update)
        optimizer.step()
    for p, e in zip(params, expected, strict=True):
        quantised = "8bit" in name and p.numel() >= 4096
        # 8-bit moments are rounded: a step may be off by a few percent of the learning rate.
        assert (p - e).abs().max() <= (1e-2 if quantised else 1e-6)
        assert (p - e).abs().mean() <= (2e-3 if quantised else 1e-6)


@pytest.mark.parametrize("name", ADAMW)
def test_matrices_decay_and_vectors_do_not(name):
    params = parameters()
    optimizer = build(name, params, weight_decay=0.5, learning_rate=1e-1)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decays[id(p)] for p in params] == [0.5, 0.5, 0.0]
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, old in zip(params, before, strict=True):
        assert torch.allclose(p, old * (0.95 if p.ndim > 1 else 1.0), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ADAMW if "8bit" in name])
def test_state_of_large_tensors_is_in_eight_bits(name):
    params = parameters()
    optimizer = build(name, params)
    give_gradients(params, 1)
    optimizer.step()
    large, small = optimizer.state[params[0]], optimizer.state[params[1]]
    assert large["state1"].dtype is torch.uint8 and small["state1"].dtype is torch.float32
    stored = sum(t.nbytes for key, t in large.items() if isinstance(t, torch.Tensor) and not key.startswith("qmap"))
    assert stored / params[0].numel() == pytest.approx(2.03, abs=0.01), "bytes a parameter"


def test_a_run_without_vectors_has_no_empty_group():
    optimizer = build("adamw", parameters()[:2])
    assert len(optimizer.param_groups) == 1
