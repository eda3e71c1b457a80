"""Held-out samples: chosen by the seed, and none of them equal to one that is trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.data.tokens.token_sets import Tokens, TokenSet

_HELD_OUT = 0x5EED
"""Keeps the split's random stream apart from the epochs'."""


def split_held_out(
    tokens: TokenSet,
    fraction: float,
    seed: int,
    before: Sequence[tuple[TokenSet, TokenSet | None]] = (),
    all_differ: bool = False,
) -> tuple[TokenSet, TokenSet | None]:
    """Training and held-out samples, chosen by the seed alone; at least one of each, or None held out.

    Equal samples fall on one side: on that of their equals `before`, in the sets that were split already.
    `all_differ` says that there are none, so that no sample need be looked at.
    """
    if fraction == 0.0 or len(tokens) < 2:
        return tokens, None
    number = len(tokens)
    order = np.random.default_rng([seed, _HELD_OUT]).permutation(number)
    prints = np.arange(number, dtype=np.uint64) if all_differ else tokens.fingerprints
    trained = np.isin(prints, _prints_of([train for train, _ in before]))
    held_out = np.isin(prints, _prints_of([held for _, held in before if held is not None])) & ~trained
    left = min(max(1, round(fraction * number)), number - 1) - int(held_out.sum())
    fixed = trained | held_out
    groups = [group for group in _equals(prints, order) if not fixed[group[0]]]
    for group in groups:
        if left <= 0:
            break
        if len(group) <= left:
            held_out[group] = True
            left -= len(group)
    if not held_out.any() and groups:  # each repeats more often than there are samples to hold out
        held_out[min(groups, key=len)] = True
    if not held_out.any() or held_out.all():
        return tokens, None
    return tokens.take(np.flatnonzero(~held_out)), tokens.take(np.flatnonzero(held_out))


def _equals(prints: np.ndarray, order: np.ndarray) -> list[np.ndarray]:
    """The indices of equal samples, group by group, by the first of each in this order."""
    _, first, sizes = np.unique(prints[order], return_index=True, return_counts=True)
    together = np.argsort(prints[order], kind="stable")
    groups = np.split(order[together], np.cumsum(sizes)[:-1])
    return [groups[k] for k in np.argsort(first)]


def _prints_of(sets: list[TokenSet]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.uint64), *(each.fingerprints for each in sets)])


def overlap(train: Tokens, held_out: Tokens) -> int:
    """How many held-out samples are equal to one that is trained on."""
    seen = _prints_of(train.parts())
    return sum(int(np.isin(part.fingerprints, seen).sum()) for part in held_out.parts())
