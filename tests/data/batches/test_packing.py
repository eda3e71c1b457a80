"""Packing invariants on random lengths, fill on real and made-up ones, and an order that does not follow length."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.batches.packing import BestFit, NoPacking, best_fit

LENGTHS = st.lists(st.integers(1, 64), max_size=200).map(lambda v: np.array(v, dtype=np.int64))


def log_normal(count: int, seed: int = 0) -> np.ndarray:
    """Lengths as chat data has them: median 180, long tail, cut at 2,048."""
    lengths = np.random.default_rng(seed).lognormal(np.log(180), 0.9, count)
    return np.clip(lengths, 8, 2048).astype(np.int64)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS)
def test_every_sample_once_and_no_row_over_its_size(lengths):
    rows = best_fit(lengths, 64)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(lengths[row].sum() <= 64 for row in rows)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS)
def test_no_two_rows_could_be_one(lengths):
    """What any-fit packing guarantees, and why it needs fewer than twice the rows of the best packing."""
    used = sorted(lengths[row].sum() for row in best_fit(lengths, 64))
    assert len(used) < 2 or used[0] + used[1] > 64


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, window=st.integers(1, 50), seed=st.integers(0, 5))
def test_windows_and_shuffling_keep_every_sample(lengths, window, seed):
    train = SimpleNamespace(micro_batch_tokens=64, micro_batch_size=4)
    for packing in (BestFit(window), NoPacking()):
        for rng in (None, np.random.default_rng(seed)):
            rows = packing.micro_batches(lengths, train, rng)
            assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    first, again = (BestFit(window).micro_batches(lengths, train, np.random.default_rng(seed)) for _ in range(2))
    assert [row.tolist() for row in first] == [row.tolist() for row in again]


def test_a_sample_over_the_row_is_refused():
    with pytest.raises(ValueError, match="a sample of 65 tokens does not fit a row of 64"):
        best_fit(np.array([65]), 64)


def alpaca_lengths() -> list[np.ndarray]:
    """Token lengths of the alpaca file as a stand-in tokenizer would give (4 characters a token)."""
    file = os.environ.get("TRAINER_ALPACA")
    if file is None:
        return []
    rows = json.loads(Path(file).read_text(encoding="utf-8"))
    return [np.array([sum(map(len, row.values())) // 4 + 16 for row in rows])]


@pytest.mark.parametrize("lengths", [log_normal(1000), log_normal(5000, 1), *alpaca_lengths()])
@pytest.mark.parametrize("row", [2048, 4096])
def test_at_most_one_row_over_the_least_possible(lengths, row):
    assert len(best_fit(lengths, row)) <= -(-int(lengths.sum()) // row) + 1


def test_fill_of_a_log_normal_mix():
    lengths = log_normal(100_000)
    assert lengths.sum() / (len(best_fit(lengths, 4096)) * 4096) >= 0.995


def test_order_says_nothing_about_length():
    """The correlation of place and length over an epoch; best-fit's own order would give about -0.9 in a window."""
    lengths = log_normal(20_000)
    train = SimpleNamespace(micro_batch_tokens=2048)
    for window in (1000, 100_000):
        order = np.concatenate(BestFit(window).micro_batches(lengths, train, np.random.default_rng(0)))
        assert abs(np.corrcoef(np.arange(len(order)), lengths[order])[0, 1]) < 0.03
    unshuffled = np.concatenate(best_fit(lengths, 2048))
    assert abs(np.corrcoef(np.arange(len(unshuffled)), lengths[unshuffled])[0, 1]) > 0.1


def test_padded_batches_keep_their_size():
    rows = NoPacking().micro_batches(np.arange(1, 11), SimpleNamespace(micro_batch_size=4), None)
    assert [row.tolist() for row in rows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
