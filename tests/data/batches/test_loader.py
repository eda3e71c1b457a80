"""Steps of a run: planned ones are real ones, and any of them can be made without the others."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories import random_tokens
from trainer.data.batches.loader import TrainingSteps, evaluation_batches
from trainer.data.batches.packing import BestFit, NoPacking
from trainer.data.data_settings import MixBy, Stop
from trainer.data.tokens.token_sets import Mixture


def train(**values):
    defaults = {
        "max_steps": None,
        "epochs": 2,
        "accumulation_steps": 3,
        "micro_batch_tokens": 32,
        "micro_batch_size": 4,
    }
    return SimpleNamespace(**{**defaults, **values})


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 32), min_size=1, max_size=40),
    epochs=st.integers(1, 3),
    accumulation=st.integers(1, 5),
    packing=st.sampled_from([BestFit(10), NoPacking()]),
)
def test_planned_steps_are_the_real_ones(lengths, epochs, accumulation, packing):
    """P5, R2: every epoch holds every sample once, in num_steps steps."""
    tokens = random_tokens(lengths)
    steps = TrainingSteps(tokens, packing, train(epochs=epochs, accumulation_steps=accumulation), seed=0)
    seen = [[] for _ in range(epochs)]
    for step in range(1, steps.num_steps + 1):
        rows = steps.sample_indices(step)
        assert 1 <= len(rows) <= accumulation
        seen[steps.position(step).epoch] += [i for row in rows for i in row]
    assert all(sorted(epoch) == list(range(len(lengths))) for epoch in seen)
    assert steps.position(steps.num_steps).epochs_done == epochs


def test_a_step_is_a_function_of_its_number():
    """R2: made in any order, by any process, the same."""
    tokens = random_tokens(list(range(2, 30)))
    forward, backward = (TrainingSteps(tokens, BestFit(8), train(max_steps=12), seed=3) for _ in range(2))
    there = [forward.sample_indices(step) for step in range(1, 13)]
    back = [backward.sample_indices(step) for step in range(12, 0, -1)][::-1]
    assert [[r.tolist() for r in rows] for rows in there] == [[r.tolist() for r in rows] for rows in back]
    other = TrainingSteps(tokens, BestFit(8), train(max_steps=12), seed=4)
    assert [r.tolist() for r in other.sample_indices(1)] != [r.tolist() for r in there[0]]


def test_evaluation_takes_every_sample_once_in_order():
    tokens = random_tokens([5, 9, 3, 8, 2])
    got = [ids for batch in evaluation_batches(tokens, NoPacking(), train()) for ids in batch.input_ids[:, 0].tolist()]
    assert got == [int(tokens.sample(i)[0][0]) for i in range(5)]


def mixture(sizes, weights, mix_by=MixBy.samples, stop=Stop.first_exhausted, lengths=(4, 4, 4)):
    members = [random_tokens([n] * size, seed=i) for i, (size, n) in enumerate(zip(sizes, lengths, strict=False))]
    for i, member in enumerate(members):
        member.name = f"source {i}"
    return Mixture(members, list(weights), mix_by, stop)


@pytest.mark.parametrize("stop, drawn", [(Stop.first_exhausted, [20, 10]), (Stop.all_exhausted, [100, 50])])
def test_shares_of_samples(stop, drawn):
    mixed = mixture([100, 10], [2, 1], stop=stop)
    assert mixed.drawn == drawn
    counts = np.bincount(np.searchsorted([100], mixed.epoch(0, 0), side="right"), minlength=2)
    assert counts.tolist() == drawn


def test_shares_of_tokens():
    """Equal weights by tokens: the source with samples four times as long gives a quarter of the samples."""
    mixed = mixture([100, 100], [1, 1], MixBy.tokens, lengths=(4, 16))
    chosen = mixed.epoch(0, 0)
    tokens = [int(mixed.lengths[chosen[(chosen >= 100) == second]].sum()) for second in (False, True)]
    assert mixed.drawn == [100, 25] and tokens[0] == tokens[1] == 400


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=3),
    weights=st.lists(st.floats(0.1, 5), min_size=3, max_size=3),
    stop=st.sampled_from(Stop),
    seed=st.integers(0, 3),
)
def test_a_mixture_goes_through_every_source_evenly(sizes, weights, stop, seed):
    """Over epochs no sample comes twice more often than another of its source, and the same seed gives the same."""
    mixed = mixture(sizes, weights[: len(sizes)], stop=stop)
    epochs = [mixed.epoch(seed, e) for e in range(4)]
    times = np.bincount(np.concatenate(epochs), minlength=len(mixed))
    for first, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
        assert np.ptp(times[first : first + size]) <= 1
    again = mixture(sizes, weights[: len(sizes)], stop=stop)
    assert np.array_equal(again.epoch(seed, 2), epochs[2])
    assert [len(e) for e in epochs] == [sum(mixed.drawn)] * 4


def test_a_mixture_is_evaluated_source_by_source():
    mixed = mixture([5, 3], [1, 1])
    batches = list(evaluation_batches(mixed, BestFit(100), train(micro_batch_tokens=12)))
    assert [batch.source for batch in batches] == ["source 0", "source 0", "source 1"]
    assert sum(batch.num_samples for batch in batches) == 8


def test_samples_of_a_mixture_are_its_members():
    mixed = mixture([2, 3], [1, 1])
    for i in range(5):
        member, inside = (mixed.members[0], i) if i < 2 else (mixed.members[1], i - 2)
        assert np.array_equal(mixed.sample(i)[0], member.sample(inside)[0])
    assert mixed.num_tokens == 20 and mixed.num_targets == sum(int(m.is_target.sum()) for m in mixed.members)
