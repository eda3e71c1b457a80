"""Steps made ahead are the steps made on demand."""

from __future__ import annotations

import threading
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from tests.factories import random_tokens
from trainer.data.batches import prefetch
from trainer.data.batches.loader import TrainingSteps
from trainer.data.batches.packing import BestFit
from trainer.data.batches.prefetch import PrefetchingSteps

TOKENS = random_tokens([9, 30, 4, 17, 25, 6, 12, 21, 11, 8])
TRAIN = SimpleNamespace(max_steps=None, epochs=3, accumulation_steps=2, micro_batch_tokens=32, micro_batch_size=4)


def both():
    packing = BestFit(window=4)
    return TrainingSteps(TOKENS, packing, TRAIN, 5), PrefetchingSteps(TOKENS, packing, TRAIN, 5, pin=False)


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for f in fields(a):
            x, y = getattr(a, f.name), getattr(b, f.name)
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, f.name


def test_every_step_of_every_epoch_is_the_same():
    plain, ahead = both()
    assert ahead.num_steps == plain.num_steps > 6
    for step in range(1, plain.num_steps + 1):
        assert_same(plain.step(step), ahead.step(step))
        assert ahead.position(step) == plain.position(step)


def test_a_step_out_of_order_is_made_on_demand():
    plain, ahead = both()
    for step in (1, 5, 2, 2, plain.num_steps):
        assert_same(plain.step(step), ahead.step(step))


def test_the_next_step_is_made_by_another_thread(monkeypatch):
    _, ahead = both()
    made: dict[int, str] = {}
    original, step_asked = TrainingSteps.step, threading.Event()

    def watched(self, step):
        made[step] = threading.current_thread().name
        if step == 2:
            step_asked.set()
        return original(self, step)

    monkeypatch.setattr(TrainingSteps, "step", watched)
    ahead.step(1)
    assert step_asked.wait(10)
    ahead.step(2)
    assert made[1] == threading.main_thread().name
    assert made[2].startswith("batches")
    ahead.step(ahead.num_steps)
    assert max(made) == ahead.num_steps  # nothing is made past the end


def test_what_the_worker_raises_reaches_the_loop(monkeypatch):
    _, ahead = both()

    def broken(self, step):
        if step == 2:
            raise OSError("the disk is gone")
        return []

    monkeypatch.setattr(TrainingSteps, "step", broken)
    ahead.step(1)
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.step(2)


def test_pinned_batches_hold_every_tensor_pinned(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())  # a CPU build cannot pin
    plain, _ = both()
    (batch, *_) = plain.step(1)
    copy = prefetch.pinned(batch)
    assert_same([batch], [copy])
    tensors = [f.name for f in fields(batch) if isinstance(getattr(batch, f.name), torch.Tensor)]
    assert all(getattr(batch, name) is not getattr(copy, name) for name in tensors)
