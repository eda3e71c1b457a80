"""The probe runs a whole step, the optimizer's state there, and leaves every bit as it was."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.factories import FP32, llama, option, options, random_tokens
from trainer.data.batches.batch import collate
from trainer.device.measure import Memory
from trainer.memory.memory_probe import probe_memory
from trainer.training.state import rng_state

CPU = torch.device("cpu")
TOKENS = random_tokens([9, 3, 6])


def prepared(optim: str, adapter: str):
    """A loop with dropout and zeros of both signs among its weights, and its trainable parameters."""
    torch.manual_seed(0)
    model = llama()
    adapted = option("adapter", adapter, **({"dropout": 0.1, "r": 4} if adapter == "lora" else {})).attach(model)
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in parameters:
            parameter.flatten()[::7] = 0.0
            parameter.flatten()[::11] = -0.0
    loss = option("loss", "full")
    states = []

    def watched(model, batch):
        states.append(sum(len(state) for state in loop.optimizer.state.values()))
        return loss.sum(model, batch)

    loop = SimpleNamespace(
        model=model,
        parameters=parameters,
        optimizer=option("optim", optim, weight_decay=0.1).build(parameters),
        loss=SimpleNamespace(sum=watched),
        steps=SimpleNamespace(
            fullest=lambda: (TOKENS, np.arange(3)),
            packing=SimpleNamespace(packed=False),
            train=SimpleNamespace(accumulation_steps=2),
        ),
        dtypes=FP32,
        accelerator=SimpleNamespace(device=CPU, backward=lambda loss: loss.backward()),
        memory=Memory(CPU),
    )
    return loop, states


def bits(tensors) -> list[bytes]:
    return [tensor.detach().cpu().contiguous().numpy().tobytes() for tensor in tensors]


def train(loop, steps: int = 3) -> list[bytes]:
    """The parameters' bits after some steps of one batch."""
    batch = collate(TOKENS, np.arange(3), packed=False)
    loop.model.train()
    for _ in range(steps):
        loop.loss.sum(loop.model, batch).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return bits(loop.parameters)


@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("optim", options("optim"))
def test_weights_optimizer_and_generators_are_as_before(optim, adapter):
    loop, states = prepared(optim, adapter)
    weights, generators = bits(loop.parameters), rng_state(CPU)["cpu"]
    settings = [(group["lr"], group["weight_decay"]) for group in loop.optimizer.param_groups]
    assert loop.optimizer.state == {}
    probe_memory(loop, None)
    assert len(states) == 2 and min(states) > 0, "the state is there while the micro-batches run"
    assert bits(loop.parameters) == weights and torch.equal(rng_state(CPU)["cpu"], generators)
    assert len(loop.optimizer.state) == 0 and all(p.grad is None for p in loop.parameters)
    assert [(group["lr"], group["weight_decay"]) for group in loop.optimizer.param_groups] == settings
    untouched, _ = prepared(optim, adapter)
    torch.set_rng_state(generators)
    expected = train(untouched)
    torch.set_rng_state(generators)
    assert train(loop) == expected


@pytest.mark.parametrize("optim", ["adamw", "paged_adamw_8bit"])
def test_a_resumed_runs_moments_stay(optim):
    loop, _ = prepared(optim, "none")
    train(loop, 2)
    tensors = [v for state in loop.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    before = bits(tensors) + bits(loop.parameters)
    probe_memory(loop, None)
    assert bits(tensors) + bits(loop.parameters) == before


def test_paged_state_that_cannot_be_freed_is_as_new(monkeypatch):
    """bitsandbytes' paged memory, on a CPU a tensor with its mark: used again, not made again."""
    import bitsandbytes as bnb

    def paged(self, p, dtype=torch.float32):
        buffer = torch.zeros_like(p, dtype=dtype)
        buffer.is_paged = p.numel() >= 4096
        return buffer

    monkeypatch.setattr(bnb.optim.optimizer.Optimizer8bit, "get_state_buffer", paged)
    monkeypatch.setattr(bnb.optim.optimizer.Optimizer8bit, "prefetch_state", lambda self, p: None)
    loop, _ = prepared("paged_adamw_8bit", "none")
    generators = rng_state(CPU)["cpu"]
    probe_memory(loop, None)
    kept = dict(loop.optimizer.state)
    assert {p.numel() >= 4096 for p in kept} == {True}
    for state in kept.values():
        assert state["step"] == 0 and state["state1"].count_nonzero() == state["absmax1"].count_nonzero() == 0
        assert state["qmap1"].count_nonzero() > 0
    made = {id(state["state1"]) for state in kept.values()}
    untouched, _ = prepared("paged_adamw_8bit", "none")
    torch.set_rng_state(generators)
    expected = train(untouched)
    torch.set_rng_state(generators)
    assert train(loop) == expected
    assert {id(loop.optimizer.state[p]["state1"]) for p in kept} == made


def test_what_breaks_the_probe_leaves_the_optimizer_as_it_was():
    loop, _ = prepared("adamw", "lora")

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    loop.loss.sum = fails
    with pytest.raises(torch.OutOfMemoryError):
        probe_memory(loop, None)
    assert len(loop.optimizer.state) == 0 and loop.optimizer.param_groups[0]["lr"] > 0
    assert all(p.grad is None for p in loop.parameters)
