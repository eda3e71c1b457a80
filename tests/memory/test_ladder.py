"""The rungs below each policy, by what a planner predicts that they need."""

from __future__ import annotations

import pytest

from tests.factories import option
from trainer.config.compose import compose
from trainer.memory.ladder import ladder
from trainer.memory.predict.planner import Planner
from trainer.model.checkpointing import FullCheckpointing, NoCheckpointing, PerBlock, Selective
from trainer.model.offload.activations import MovedInputs
from trainer.model.recompute import Keep

SELECTIVE = Selective(keep=Keep.attention)
MIXED = PerBlock([FullCheckpointing(), SELECTIVE, NoCheckpointing(), NoCheckpointing()])


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (NoCheckpointing(), ["selective", "full", "activations"]),
        (option("checkpointing", "attention"), ["selective", "full", "activations"]),
        (MIXED, ["selective", "full", "activations"]),
        (SELECTIVE, ["full", "activations"]),
        (FullCheckpointing(), ["activations"]),
        (option("checkpointing", "sqrt"), ["activations"]),
        (MovedInputs(SELECTIVE), ["full"]),
        (MovedInputs(FullCheckpointing()), []),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else type(value).__name__,
)
def test_each_rung_needs_less_than_the_one_above(policy, names):
    """On a GPU; a CPU has no other memory to move inputs to."""
    planner = Planner(compose(["device=cpu", "train.micro_batch_tokens=1024", "model=tiny"]).config)
    depth = planner.depth
    assert depth == len(MIXED.policies)
    rungs = dict(ladder(policy, depth, "cuda"))
    assert list(rungs) == names
    assert list(dict(ladder(policy, depth, "cpu"))) == [name for name in names if name != "activations"]
    backward = [kept_for_backward(planner, rung) for rung in (policy, *rungs.values())]
    assert backward == sorted(set(backward), reverse=True), backward
    for rung in rungs.values():
        assert rung.moves_inputs == (policy.moves_inputs or rung is rungs.get("activations"))


def kept_for_backward(planner, policy) -> int:
    """Most bytes at once in the blocks' own part of the step."""
    return max(moment.kept for moment in planner.predict(policy).moments)
