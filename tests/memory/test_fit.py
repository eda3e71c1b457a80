"""checkpointing=auto: within the budget, less recompute the more there is; too small a budget is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench._memory_cases import BASE, A
from tests.bench._memory_step import real_step, worst_shape
from trainer.config.compose import compose
from trainer.errors import ConfigError
from trainer.memory.fit import fit
from trainer.memory.predict.planner import GIB, Planner
from trainer.memory.predict.speed import recomputed_share
from trainer.model.checkpointing import FullCheckpointing, NoCheckpointing, PerBlock

WORDS = [*BASE, f"{A}num_hidden_layers=6", "checkpointing=auto"]


@pytest.fixture(scope="module")
def planner():
    config = compose(WORDS).config
    return Planner(config, shape=worst_shape(config))


def test_three_budgets(planner):
    """A tight, a middle and a loose one: predicted and real peak within each, and ever fewer blocks run again."""
    least = planner.predict(FullCheckpointing()).peak
    most = planner.predict(NoCheckpointing()).peak
    shares = []
    for budget in (least * 1.01, (least + most) / 2, most * 1.01):
        chosen = fit(planner, budget / GIB)
        assert chosen.peak <= budget
        real, _ = real_step(replace(planner.config, checkpointing=chosen.policy), planner.shape)
        assert real <= budget * 1.01
        kept = sum(isinstance(policy, NoCheckpointing) for policy in chosen.policy.policies)
        shares.append((recomputed_share(planner, chosen.policy), -kept))
    assert shares[0] > shares[1] > shares[2]
    assert shares[2] == (0.0, -6)


def test_one_block_more_kept_would_not_fit(planner):
    least = planner.predict(FullCheckpointing()).peak
    most = planner.predict(NoCheckpointing()).peak
    budget = (least + most) / 2
    chosen = fit(planner, budget / GIB).policy.policies
    first_kept = next(i for i, policy in enumerate(chosen) if isinstance(policy, NoCheckpointing))
    more = PerBlock([*chosen[: first_kept - 1], *[NoCheckpointing()] * (len(chosen) - first_kept + 1)])
    assert planner.predict(more).peak > budget


def test_a_smaller_micro_batch_with_the_same_batch(planner):
    budget = planner.predict(FullCheckpointing(), tokens=256).peak * 1.005
    chosen = fit(planner, budget / GIB)
    assert (chosen.micro_batch_tokens, chosen.accumulation_steps) == (256, 4)
    assert chosen.micro_batch_tokens * chosen.accumulation_steps == 512 * 2


def test_a_budget_below_the_least_is_refused_with_the_least_that_works(planner):
    with pytest.raises(ConfigError, match=r"memory\.budget_gib=0\.00: .* the least that works is 0\.\d+"):
        fit(planner, planner.static.total / 2 / GIB)
