"""Which micro-batches each optimizer step gets: a pure function of (seed, epoch), so resuming is an index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.batches.batch import MicroBatch, collate
from trainer.data.batches.packing import Packing
from trainer.data.tokens.token_sets import Tokens

if TYPE_CHECKING:
    from trainer.data.batches.batching import Batching


Samples = tuple[Tokens, np.ndarray]
"""A set and the numbers of some of its samples."""


@dataclass(frozen=True)
class Position:
    """Where an optimizer step lies: its epoch (from 0) and its place in the epoch (from 0)."""

    epoch: int
    index: int
    steps_in_epoch: int | None
    """None: not known, since a stream has not come to its end"""
    share: float | None = None
    """of the epoch that is behind after this step, by the bytes of a stream's files"""

    @property
    def epochs_done(self) -> float | None:
        """Epochs behind after this step, as the metrics show it; None: not known."""
        if self.share is not None:
            return self.epoch + self.share
        return None if self.steps_in_epoch is None else self.epoch + (self.index + 1) / self.steps_in_epoch


class TrainingSteps:
    """The micro-batches of every optimizer step of a run."""

    def __init__(self, tokens: Tokens, packing: Packing, train: Batching, seed: int):
        self.tokens, self.packing, self.train, self.seed = tokens, packing, train, seed
        self._epochs: dict[int, list[np.ndarray]] = {}
        self._steps_in_epoch: list[int] = []
        if train.max_steps is not None:
            self.num_steps = train.max_steps
        else:
            self.num_steps = sum(self.steps_in_epoch(epoch) for epoch in range(train.epochs))

    def micro_batches(self, epoch: int) -> list[np.ndarray]:
        """Sample indices of each micro-batch of an epoch (from 0)."""
        if epoch not in self._epochs:
            rng = np.random.default_rng([self.seed, epoch])
            chosen = self.tokens.epoch(self.seed, epoch)
            rows = self.packing.micro_batches(self.tokens.lengths[chosen], self.train, rng)
            self._epochs = {epoch: [chosen[row] for row in rows]}
        return self._epochs[epoch]

    def steps_in_epoch(self, epoch: int) -> int:
        """Optimizer steps of an epoch; its last may have fewer micro-batches than the others."""
        while len(self._steps_in_epoch) <= epoch:
            rows = len(self.micro_batches(len(self._steps_in_epoch)))
            self._steps_in_epoch.append(-(-rows // self.train.accumulation_steps))
        return self._steps_in_epoch[epoch]

    def position(self, step: int) -> Position:
        """Where a step (from 1) lies."""
        epoch, index = 0, step - 1
        while index >= self.steps_in_epoch(epoch):
            index -= self.steps_in_epoch(epoch)
            epoch += 1
        return Position(epoch, index, self.steps_in_epoch(epoch))

    def sample_indices(self, step: int) -> list[np.ndarray]:
        """Sample indices of each micro-batch of a step (from 1)."""
        position = self.position(step)
        start = position.index * self.train.accumulation_steps
        return self.micro_batches(position.epoch)[start : start + self.train.accumulation_steps]

    def samples(self, step: int) -> list[Samples]:
        """The samples of each micro-batch of a step (from 1)."""
        return [(self.tokens, rows) for rows in self.sample_indices(step)]

    def step(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step (from 1), on the host."""
        return [collate(self.tokens, rows, self.packing.packed) for rows in self.sample_indices(step)]

    def fullest(self) -> tuple[Tokens, np.ndarray]:
        """The first epoch's largest micro-batch: tokens, and the numbers of its samples in them."""
        return self.tokens, fullest(self.micro_batches(0), self.tokens.lengths, self.packing.packed)

    def first_rows(self) -> tuple[Tokens, list[np.ndarray]]:
        """All samples, and the micro-batches of the first epoch."""
        return self.tokens, self.micro_batches(0)

    def ends(self) -> set[int]:
        """Tokens that answers end with."""
        return self.tokens.ends()

    def begin(self) -> None:
        """Called when the run folder is this run's own."""

    def close(self) -> None:
        """Called when the run ends, however it does."""


def fullest(micro_batches: Iterable[np.ndarray], lengths: np.ndarray, packed: bool) -> np.ndarray:
    """The samples of the micro-batch that computes the most, padding included; of several, that with the longest."""

    def size(rows: np.ndarray) -> tuple[int, int]:
        longest = int(lengths[rows].max())
        return int(lengths[rows].sum()) if packed else longest * len(rows), longest

    return max(micro_batches, key=size)


def evaluation_batches(tokens: Tokens, packing: Packing, train: Batching) -> Iterator[MicroBatch]:
    """All held-out samples once, in their own order, source by source."""
    for part in tokens.parts():
        for rows in packing.micro_batches(part.lengths, train, None):
            yield collate(part, rows, packing.packed, part.name)
