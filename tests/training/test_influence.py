"""Each row's gradient and effect: by autograd on padded rows, and by really moving the weights."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from tests.factories import FP32, llama, option, packed_batch, padded_batch, random_tokens, summed_loss
from trainer.training.influence import influences

LENGTHS = [12, 20, 7, 31]


@pytest.fixture(scope="module")
def loop():
    model = llama(initializer_range=0.3)
    dropout = torch.nn.Dropout(0.5)
    model.model.embed_tokens = torch.nn.Sequential(model.model.embed_tokens, dropout)
    model.train()
    parameters = [p for name, p in model.named_parameters() if "layers" in name]
    return SimpleNamespace(
        model=model,
        parameters=parameters,
        optimizer=torch.optim.SGD(parameters, lr=0.1),
        loss=option("loss", "full"),
        steps=SimpleNamespace(packing=option("packing", "best_fit")),
        dtypes=FP32,
        accelerator=Accelerator(cpu=True),
    )


def plain_gradient(loop, batch) -> torch.Tensor:
    loop.model.eval()
    loss = summed_loss(loop.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits, batch.labels)
    grads = torch.autograd.grad(loss, loop.parameters)
    loop.model.train()
    return torch.cat([grad.flatten() for grad in grads])


def held_out_loss(loop, batch) -> float:
    loop.model.eval()
    with torch.no_grad():
        total = loop.loss.sum(loop.model, batch).item() / batch.num_targets
    loop.model.train()
    return total


def test_norms_and_effects_are_those_of_each_row_alone(loop):
    rows, held_out = random_tokens(LENGTHS), random_tokens([15, 25], seed=1)
    generator = torch.get_rng_state()
    found = influences(loop, 7, [(rows, np.array([2, 0])), (rows, np.array([3]))], [packed_batch(held_out)])
    assert torch.equal(torch.get_rng_state(), generator) and all(p.grad is None for p in loop.parameters)
    assert all(m.training for m in loop.model.modules()), "as it was"
    assert [(i.step, i.index) for i in found] == [(7, 2), (7, 0), (7, 3)]
    targets = sum(padded_batch(rows, i).num_targets for i in (2, 0, 3))
    held = padded_batch(held_out)
    direction = plain_gradient(loop, held) / held.num_targets
    for influence in found:
        part = plain_gradient(loop, padded_batch(rows, influence.index)) / targets
        assert influence.norm == pytest.approx(part.norm().item(), rel=1e-4)
        assert influence.effect == pytest.approx(-(part @ direction).item(), rel=1e-3, abs=1e-6)


def test_a_small_step_along_a_row_changes_the_held_out_loss_by_its_effect(loop):
    rows, held = random_tokens(LENGTHS), packed_batch(random_tokens([15, 25], seed=1))
    (influence,) = influences(loop, 1, [(rows, np.array([1]))], [held])
    batch = padded_batch(rows, 1)
    part = plain_gradient(loop, batch) / batch.num_targets
    rate, before = 1e-3 / influence.norm, held_out_loss(loop, held)
    flat = torch.nn.utils.parameters_to_vector(loop.parameters)
    torch.nn.utils.vector_to_parameters(flat - rate * part, loop.parameters)
    after = held_out_loss(loop, held)
    torch.nn.utils.vector_to_parameters(flat, loop.parameters)
    assert (after - before) / rate == pytest.approx(influence.effect, rel=0.1)


def test_without_held_out_rows_there_is_no_effect(loop):
    (influence,) = influences(loop, 1, [(random_tokens(LENGTHS), np.array([1]))], None)
    assert influence.effect is None and influence.norm > 0
