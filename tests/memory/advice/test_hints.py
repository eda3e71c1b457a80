"""The plan's advice: each sentence where it applies, and not where it does not."""

from __future__ import annotations

import pytest

from trainer.config.compose import compose
from trainer.config.shelf import all_options
from trainer.errors import ConfigError
from trainer.memory.advice.report import full_plan
from trainer.memory.predict.outline import Outline
from trainer.memory.predict.planner import Planner
from trainer.model.checkpointing import NoCheckpointing
from trainer.units import GIB

SMALL = ["recipe=quickstart", "device=cpu", "precision=fp32"]


def planned(*words: str) -> dict:
    return full_plan(Planner(compose([*SMALL, *words]).config), all_options()).plain()


def sentences(plan: dict, words: str) -> list[str]:
    return [said for said in plan["advice"] if words in said]


@pytest.fixture(scope="module")
def loose():
    return planned("memory.budget_gib=1")


def test_the_largest_line_is_named(loose):
    largest = max(loose["lines_gib"], key=loose["lines_gib"].get)
    assert loose["advice"][0].startswith(f"The largest line is {largest}: {loose['lines_gib'][largest]:.2f} GiB")


def test_techniques_that_the_budget_does_not_need_are_named_with_their_cost(loose):
    (recompute,) = sentences(loose, "checkpointing=none")
    costs = {change["change"]: change for change in loose["changes"]}
    none = costs["checkpointing=none"]
    assert f"takes {none['needed_gib']:.2f} GiB" in recompute
    share = float(none["cost"].rpartition(", ")[2].partition("%")[0]) / 100  # of the work, when it is left out
    said = float(recompute.partition("costs ")[2].partition("%")[0]) / 100
    assert said == pytest.approx(-share / (1 + share), abs=0.02)
    assert len(sentences(loose, "is not needed for 1 GiB")) == 3


def test_nothing_is_unneeded_where_it_would_not_fit(loose):
    needed = loose["needed_gib"]
    tight = planned(f"memory.budget_gib={needed * 1.001}")
    assert not sentences(tight, "is not needed")
    assert not sentences(tight, "adapter=none quant=none")
    assert not sentences(planned(), "is not needed"), "without a budget nothing is"


def test_small_models_are_offered_all_their_parameters(loose):
    (offer,) = sentences(loose, "adapter=none quant=none")
    real = Planner(compose([*SMALL, "adapter=none", "quant=none"]).config)
    said = float(offer.partition("train: ")[2].partition(" GiB")[0])
    assert said == pytest.approx(real.needed(real.predict()) / GIB, abs=0.005)
    assert not sentences(planned("adapter=none", "quant=none"), "adapter=none quant=none")


def test_an_adapter_on_random_weights_is_warned_about(loose):
    assert not sentences(loose, "random weights")
    assert sentences(planned("model.weights=random"), "random weights")
    assert not sentences(planned("model.weights=random", "adapter=none", "quant=none"), "random weights")


def test_a_budget_below_the_static_part_is_told_the_least_that_works():
    plan = planned("memory.budget_gib=0.001")
    assert plan["fits"] is False
    least = Planner(compose([*SMALL, "checkpointing=full", "train.micro_batch_tokens=512"]).config)
    assert plan["least_gib"] == pytest.approx(least.needed(least.predict()) / GIB, rel=0.02)
    assert not sentences(plan, "adapter=none quant=none"), "all parameters do not fit either"


def test_a_model_without_known_blocks_is_traced_whole_and_said_so(monkeypatch):
    """The same model either way: traced whole, the peak is what blocks and their number give."""
    by_blocks = Planner(compose([*SMALL, "checkpointing=none"]).config)
    expected = by_blocks.predict(NoCheckpointing()).peak
    monkeypatch.setattr(Outline, "layers", lambda self: [])
    plan = planned("checkpointing=none")
    assert plan["peak_gib"] * GIB == pytest.approx(expected, rel=1e-6)
    assert plan["peak_at"] in ("forward", "backward")
    (said,) = sentences(plan, "the whole of it was traced")
    assert not any(change["change"].startswith("checkpointing") for change in plan["changes"])


def test_segments_longer_than_the_model_are_refused():
    with pytest.raises(ConfigError, match=r"checkpointing\.k=9: the model has 4 blocks. Allowed: 1 to 4"):
        planned("checkpointing=every_k", "checkpointing.k=9")
