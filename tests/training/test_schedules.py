"""Schedules as pure functions of the step: their ends, their shapes, and transformers' where the shapes agree."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_scheduler

from tests.factories import option, options
from trainer.training.schedules import Constant, Cosine, Linear, WarmupStableDecay

ALL = options("schedule")


def factors(schedule, num_steps):
    return [schedule.factor(step, num_steps) for step in range(1, num_steps + 1)]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("warmup", [{"warmup_steps": 0}, {"warmup_steps": 500}, {"warmup_ratio": 0.1}])
@pytest.mark.parametrize("name", ALL)
def test_every_factor_is_above_zero_and_at_most_the_peak(name, warmup, num_steps):
    schedule = option("schedule", name, **warmup)
    values = factors(schedule, num_steps)
    assert all(0 < value <= 1 for value in values)
    assert values == [schedule.factor(step, num_steps) for step in range(1, num_steps + 1)], "pure"


@pytest.mark.parametrize("final_ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("make", [Linear, Cosine, lambda *a: WarmupStableDecay(*a, decay_ratio=0.3)])
def test_what_decays_ends_exactly_at_its_final_share(make, warmup, final_ratio):
    for num_steps in (8, 20, 1000):
        values = factors(make(warmup, 0.0, final_ratio), num_steps)
        assert values[-1] == pytest.approx(final_ratio, abs=1e-12)
        assert max(values) == pytest.approx(1.0) and values[warmup] == pytest.approx(1.0)
        assert values[warmup:] == sorted(values[warmup:], reverse=True)


def test_warmup_rises_in_equal_parts_and_never_from_zero():
    assert factors(Constant(3, 0.0), 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(Constant(None, 0.5), 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(Constant(0, 0.9), 3) == [1, 1, 1], "warmup_steps=0 is given: the ratio is unused"


def test_shapes_by_hand():
    assert factors(Linear(0, 0.0, 0.0), 5) == [1, 0.75, 0.5, 0.25, 0]
    assert factors(Cosine(0, 0.0, 0.0), 5) == pytest.approx(
        [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]
    )
    wsd = factors(WarmupStableDecay(0, 0.0, 0.0, decay_ratio=0.4), 10)
    assert wsd == pytest.approx([1] * 6 + [1 - math.sqrt(n / 4) for n in range(1, 5)])


@pytest.mark.parametrize(("name", "make"), [("linear", Linear), ("cosine", Cosine), ("constant", None)])
def test_transformers_shapes_agree(name, make):
    """Without warm-up, transformers' step n of N - 1 is our step n + 1 of N: it ends one step after the last."""
    num_steps = 50
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=num_steps - 1)
    rates = []
    for _ in range(num_steps):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    ours = factors(make(0, 0.0, 0.0) if make else Constant(0, 0.0), num_steps)
    assert ours == pytest.approx(rates, abs=1e-12)


def test_warmup_agrees_with_transformers_but_for_its_zero_first_step():
    """transformers' linear warm-up of W + 1 steps begins at 0; ours of W leaves that step out."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=5)
    rates = []
    for _ in range(9):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert rates[0] == 0
    assert factors(Constant(4, 0.0), 8) == pytest.approx(rates[1:])
