"""Micro-batches that keep samples of two kinds of length apart, whatever packs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.data.batches.packing import Packing


@dataclass
class Apart(Packing):
    """Another packing's micro-batches of the samples up to `boundary` tokens, and of the longer ones: none has both."""

    inner: Packing
    boundary: int

    @property
    def packed(self) -> bool:
        return self.inner.packed

    def micro_batches(self, lengths, train, rng):
        sides = [np.flatnonzero(lengths <= self.boundary), np.flatnonzero(lengths > self.boundary)]
        if not all(map(len, sides)):
            return self.inner.micro_batches(lengths, train, rng)
        rows = [side[row] for side in sides for row in self.inner.micro_batches(lengths[side], train, rng)]
        return rows if rng is None else [rows[i] for i in rng.permutation(len(rows))]

    def largest(self, max_length, train):
        return self.inner.largest(max_length, train)
