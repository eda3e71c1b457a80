"""Options of the group `packing`: which samples share a micro-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np

from trainer.errors import ModelError
from trainer.ranges import AT_LEAST_1
from trainer.registry import Section, name_of, option

if TYPE_CHECKING:
    from trainer.data.batches.batching import Batching


@dataclass
class Packing(Section, ABC):
    """From sample lengths to micro-batches."""

    packed = False
    """whether a micro-batch is one row of whole samples (else one padded row a sample)"""

    def settled(self, wrong_if_packed: Callable[[], str | None]) -> Packing:
        """What it comes to for a model; `wrong_if_packed` says what a row of several samples gets wrong there, if
        anything. Raises ModelError where it would train wrongly."""
        return self

    @abstractmethod
    def micro_batches(self, lengths: np.ndarray, train: Batching, rng: np.random.Generator | None) -> list[np.ndarray]:
        """Sample indices of each micro-batch of one epoch; rng None keeps the samples' own order."""

    @abstractmethod
    def largest(self, max_length: int, train: Batching) -> list[int]:
        """Sample lengths of the largest micro-batch that there can be of samples up to `max_length` tokens."""


@option("packing", "none")
@dataclass
class NoPacking(Packing):
    """train.micro_batch_size samples, padded to the longest: simple, wasteful, the oracle."""

    def micro_batches(self, lengths, train, rng):
        order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
        size = train.micro_batch_size
        return [order[i : i + size] for i in range(0, len(order), size)]

    def largest(self, max_length, train):
        return [max_length] * train.micro_batch_size


@option("packing", "best_fit")
@dataclass
class BestFit(Packing):
    """Whole samples in rows of up to train.micro_batch_tokens, best-fit decreasing."""

    window: Annotated[int, AT_LEAST_1]
    """shuffled samples packed together; a larger window fills better and holds more in memory"""

    packed = True

    def problems(self, config):
        train, data = config.train, config.data
        if train.micro_batch_tokens >= data.max_length:
            return []
        return [
            f"train.micro_batch_tokens={train.micro_batch_tokens} is below data.max_length={data.max_length}: "
            "a sample must fit a row. Raise the first or lower the second"
        ]

    def settled(self, wrong_if_packed):
        wrong = wrong_if_packed()
        if wrong is None:
            return self
        raise ModelError(f"packing={name_of('packing', self)}: {wrong}. Use packing=none, or auto.")

    def micro_batches(self, lengths, train, rng):
        order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
        rows: list[np.ndarray] = []
        for start in range(0, len(order), self.window):
            members = order[start : start + self.window]
            packed = best_fit(lengths[members], train.micro_batch_tokens)
            if rng is not None:
                # Best-fit puts long samples first, in a row and among rows; training order must not depend on length.
                packed = [rng.permutation(packed[i]) for i in rng.permutation(len(packed))]
            rows += [members[row] for row in packed]
        return rows

    def largest(self, max_length, train):
        full, rest = divmod(train.micro_batch_tokens, max_length)
        return [max_length] * full + ([rest] if rest > 1 else [])


@option("packing", "auto")
@dataclass
class AutoPacking(BestFit):
    """best_fit where a row of several samples is proven to give what each gives alone, none elsewhere."""

    def settled(self, wrong_if_packed):
        return BestFit(self.window) if wrong_if_packed() is None else NoPacking()


def best_fit(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Indices of the items of each bin: best-fit decreasing (Johnson 1973).

    Open bins are kept by the space left in them, and which spaces occur is one integer's bits, so finding the
    tightest bin that fits is a shift and a lowest set bit, whatever the number of bins.
    """
    if len(lengths) and int(lengths.max()) > capacity:
        raise ValueError(f"a sample of {int(lengths.max())} tokens does not fit a row of {capacity}")
    bins: list[list[int]] = []
    by_space: dict[int, list[int]] = {}
    spaces = 0
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            chosen = by_space[space].pop()
            if not by_space[space]:
                spaces &= ~(1 << space)
        else:
            space, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        left = space - length
        by_space.setdefault(left, []).append(chosen)
        spaces |= 1 << left
    return [np.asarray(items, dtype=np.int64) for items in bins]
