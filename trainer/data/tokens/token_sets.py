"""Tokenised samples: one set, in memory or mapped from disk, or several that are mixed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from trainer.data.chat.messages import Sample
from trainer.data.data_settings import MixBy, Stop

CHUNK = 1 << 22
"""Tokens looked at at once, so that a mapped file is never read into memory whole."""


def fingerprint(ids: np.ndarray, is_target: np.ndarray) -> bytes:
    """8 bytes by which a sample's tokens and targets are known."""
    return hashlib.blake2b(ids.tobytes() + is_target.tobytes(), digest_size=8).digest()


@dataclass
class TokenSet:
    """Samples end to end in flat arrays. Stored sample k is [offsets[k], offsets[k + 1])."""

    input_ids: np.ndarray = field(repr=False)
    """(stored tokens,) int32"""
    is_target: np.ndarray = field(repr=False)
    """(stored tokens,) bool"""
    offsets: np.ndarray = field(repr=False)
    """(stored samples + 1,) int64"""
    sources: Sequence[Sample] = field(repr=False)
    """what each stored sample was made from"""
    places: Sequence[str] = field(repr=False, default=())
    """file:line of each stored sample"""
    order: np.ndarray | None = field(repr=False, default=None)
    """(samples,) which stored samples these are; None: all of them"""
    name: str = ""
    """of the source, in a mixture"""

    def __len__(self) -> int:
        return len(self.offsets) - 1 if self.order is None else len(self.order)

    @cached_property
    def lengths(self) -> np.ndarray:
        """(samples,) tokens in each"""
        return self._mine(np.diff(self.offsets))

    @cached_property
    def target_counts(self) -> np.ndarray:
        """(samples,) targets in each"""
        ends = self.offsets
        before = np.zeros(len(ends), dtype=np.int64)
        total = 0
        for start in range(0, int(ends[-1]), CHUNK):
            stop = min(start + CHUNK, int(ends[-1]))
            running = np.cumsum(self.is_target[start:stop], dtype=np.int64)
            first, last = np.searchsorted(ends, [start, stop], side="right")
            inside = ends[first:last]
            before[first:last] = total + running[inside - start - 1]
            total += int(running[-1])
        return self._mine(np.diff(before))

    @cached_property
    def fingerprints(self) -> np.ndarray:
        """(samples,) uint64: equal tokens and targets, equal number"""
        digests = (fingerprint(*self.sample(index)) for index in range(len(self)))
        return np.frombuffer(b"".join(digests), dtype=np.uint64)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_targets(self) -> int:
        return int(self.target_counts.sum())

    @property
    def highest_token(self) -> int:
        """The highest token id in store."""
        return max(int(self.input_ids[i : i + CHUNK].max()) for i in range(0, len(self.input_ids), CHUNK))

    def stored(self, index: int) -> int:
        return index if self.order is None else int(self.order[index])

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and targets of one sample, each (length,)."""
        k = self.stored(index)
        span = slice(self.offsets[k], self.offsets[k + 1])
        return self.input_ids[span], self.is_target[span]

    def source(self, index: int) -> Sample:
        """What a sample was made from."""
        return self.sources[self.stored(index)]

    def place(self, index: int) -> str:
        """file:line of a sample."""
        return self.places[self.stored(index)]

    def ends(self) -> set[int]:
        """Tokens that are the last target of a sample, or the one before: behind an end token may stand a newline."""
        lasts = (ids[np.flatnonzero(is_target)[-2:]] for ids, is_target in map(self.sample, range(len(self))))
        return {int(index) for pair in lasts for index in pair}

    def content_hash(self) -> str:
        """sha256 over the tokens, targets and borders of these samples, in their order."""
        digest = hashlib.sha256(np.ascontiguousarray(self.lengths).tobytes())
        for array in (self.input_ids, self.is_target):
            for start in range(0, len(array), CHUNK):
                digest.update(np.ascontiguousarray(array[start : start + CHUNK]).tobytes())
        if self.order is not None:
            digest.update(np.ascontiguousarray(self.order).tobytes())
        return digest.hexdigest()

    def take(self, indices: np.ndarray) -> TokenSet:
        """The samples with these indices, in this order; the tokens stay where they are."""
        order = np.asarray(indices, dtype=np.int64) if self.order is None else self.order[indices]
        return TokenSet(self.input_ids, self.is_target, self.offsets, self.sources, self.places, order, self.name)

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        """(samples,) the samples of an epoch (from 0), in no particular order."""
        return np.arange(len(self))

    def parts(self) -> list[TokenSet]:
        """The sources that make up this set."""
        return [self]

    def _mine(self, stored: np.ndarray) -> np.ndarray:
        return stored if self.order is None else stored[self.order]


class Mixture:
    """Several sets, of which an epoch takes shares. Sample indices run through the sets one after the other."""

    def __init__(self, members: list[TokenSet], weights: list[float], mix_by: MixBy, stop: Stop):
        self.members, self.weights, self.mix_by, self.stop = members, weights, mix_by, stop
        self._starts = np.cumsum([0, *(len(member) for member in members)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def lengths(self) -> np.ndarray:
        """(samples,) tokens in each"""
        return np.concatenate([member.lengths for member in self.members])

    @cached_property
    def target_counts(self) -> np.ndarray:
        """(samples,) targets in each"""
        return np.concatenate([member.target_counts for member in self.members])

    @property
    def num_tokens(self) -> int:
        return sum(member.num_tokens for member in self.members)

    @property
    def num_targets(self) -> int:
        return sum(member.num_targets for member in self.members)

    @property
    def highest_token(self) -> int:
        return max(member.highest_token for member in self.members)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        member, inside = self._find(index)
        return member.sample(inside)

    def source(self, index: int) -> Sample:
        member, inside = self._find(index)
        return member.source(inside)

    def place(self, index: int) -> str:
        member, inside = self._find(index)
        return member.place(inside)

    def ends(self) -> set[int]:
        return set().union(*(member.ends() for member in self.members))

    def content_hash(self) -> str:
        digest = hashlib.sha256(repr((self.weights, self.mix_by.value, self.stop.value)).encode())
        for member in self.members:
            digest.update(member.content_hash().encode())
        return digest.hexdigest()

    def parts(self) -> list[TokenSet]:
        return self.members

    @cached_property
    def drawn(self) -> list[int]:
        """Samples that an epoch takes of each set: its weight's share, as long as the first (or last) set lasts."""
        unit = 1.0 if self.mix_by is MixBy.samples else None
        costs = [unit or member.num_tokens / len(member) for member in self.members]
        # One round of an epoch takes weight / cost samples of each set; a set lasts for this many rounds:
        rounds = [len(m) * cost / weight for m, cost, weight in zip(self.members, costs, self.weights, strict=True)]
        last = min(rounds) if self.stop is Stop.first_exhausted else max(rounds)
        return [max(1, round(last * weight / cost)) for cost, weight in zip(costs, self.weights, strict=True)]

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        """(drawn samples,) of an epoch (from 0): each set goes on where its last epoch stopped, newly shuffled when
        it has been seen whole. A pure function of (seed, epoch)."""
        taken = []
        for k, (member, count) in enumerate(zip(self.members, self.drawn, strict=True)):
            first, last = epoch * count, (epoch + 1) * count
            passes = range(first // len(member), -(-last // len(member)))
            shuffled = [np.random.default_rng([seed, _MIXTURE, k, p]).permutation(len(member)) for p in passes]
            skip = first - passes.start * len(member)
            taken.append(self._starts[k] + np.concatenate(shuffled)[skip : skip + count])
        return np.concatenate(taken)

    def _find(self, index: int) -> tuple[TokenSet, int]:
        k = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.members[k], int(index - self._starts[k])


_MIXTURE = 0x313
"""Keeps a mixture's random streams apart from the epochs'."""

Tokens = TokenSet | Mixture
