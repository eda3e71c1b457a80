"""Micro-batches made ahead: while a step runs, a thread prepares the next one's, in pinned memory on a GPU."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.data.batches.batch import MicroBatch, divided
from trainer.data.batches.loader import Position, TrainingSteps

if TYPE_CHECKING:
    from trainer.data.batches.batching import Batching
    from trainer.data.batches.packing import Packing
    from trainer.data.tokens.tokenize import Tokens


class Ahead(ABC):
    """Steps of which n + 1 is begun when n is asked for. What they return is the same."""

    num_steps: int
    halvings: int = 0
    """times that each micro-batch is cut in two: a step's samples are the same, in more and smaller micro-batches"""

    def __init__(self, pin: bool):
        self._pin = pin
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[list[MicroBatch]]] | None = None
        self.taken: tuple[int, list[tuple[int, ...]]] | None = None
        """the step that was asked for last, and the numbers of its samples, micro-batch by micro-batch"""

    @abstractmethod
    def make(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step, in either thread."""

    def step(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step (from 1), on the host."""
        ahead, self._ahead = self._ahead, None
        batches = ahead[1].result() if ahead is not None and ahead[0] == step else self._make(step)
        if step < self.num_steps:
            self._ahead = step + 1, self._worker.submit(self._make, step + 1)
        self.taken = step, [batch.samples for batch in batches]
        return [part for batch in batches for part in divided(batch, self.halvings)]

    def close(self) -> None:
        """Called when the run ends, however it does."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _make(self, step: int) -> list[MicroBatch]:
        batches = self.make(step)
        return [pinned(batch) for batch in batches] if self._pin else batches


class PrefetchingSteps(Ahead, TrainingSteps):
    """TrainingSteps made ahead."""

    def __init__(self, tokens: Tokens, packing: Packing, train: Batching, seed: int, pin: bool):
        Ahead.__init__(self, pin)
        self._lock = threading.RLock()  # epochs are packed on first use, by either thread
        TrainingSteps.__init__(self, tokens, packing, train, seed)

    def make(self, step: int) -> list[MicroBatch]:
        return TrainingSteps.step(self, step)

    def micro_batches(self, epoch: int) -> list[np.ndarray]:
        with self._lock:
            return super().micro_batches(epoch)

    def steps_in_epoch(self, epoch: int) -> int:
        with self._lock:
            return super().steps_in_epoch(epoch)

    def position(self, step: int) -> Position:
        with self._lock:
            return super().position(step)


def pinned(batch: MicroBatch) -> MicroBatch:
    """The batch in page-locked memory, from which copies to a GPU do not block the host."""
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{k: v.pin_memory() for k, v in tensors.items() if isinstance(v, torch.Tensor)})
