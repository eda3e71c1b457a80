"""CUDA's queue of copies on stand-ins of its streams and events: what it keeps, and what it adds up."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from trainer.model.offload.copies import CudaCopies


class Event:
    """Happens at a time of its own, a millisecond after the one before; not before it is let."""

    made = 0
    happened = 0

    def __init__(self, enable_timing):
        Event.made += 1
        self.number = Event.made

    def record(self, stream):
        pass

    def query(self):
        return self.number <= Event.happened

    def elapsed_time(self, later):
        return later.number - self.number


class Stream:
    def __init__(self, device=None):
        pass

    def wait_event(self, event):
        pass


@pytest.fixture
def copies(monkeypatch):
    Event.made = Event.happened = 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return CudaCopies(torch.device("cuda", 0), reads=False)


def test_events_that_have_happened_are_added_up_and_let_go(copies):
    """A run takes millions of copies."""
    for _ in range(1000):
        copies.wait(copies.enqueue(lambda: None))
        Event.happened = Event.made
    assert len(copies._copied) <= 1 and len(copies._waited) <= 1
    copies.settle()
    assert copies.copy_seconds == pytest.approx(1.0) and copies.waited_seconds == pytest.approx(1.0)


def test_events_to_come_are_waited_for_by_nobody(copies):
    for _ in range(10):
        copies.wait(copies.enqueue(lambda: None))
    assert copies.hidden_share() is None and len(copies._waited) == 10
    Event.happened = Event.made
    assert copies.hidden_share() == pytest.approx(0.0)
