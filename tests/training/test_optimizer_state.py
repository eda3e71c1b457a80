"""State of every optimizer: saved, restored bit for bit, and going on as if nothing had happened."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.factories import option
from tests.training.test_optimizers import OPTIONS, build, give_gradients, parameters
from trainer.training.optimizer_state import SCALARS, TENSORS, load_optimizer, save_optimizer
from trainer.training.optimizer_state import flat as flattened

SETTINGS = {"learning_rate": 1e-2, "weight_decay": 0.1}
PROJECTED = {"rank": 8, "update_interval": 2}


def settings(name: str) -> dict[str, float]:
    return SETTINGS | (PROJECTED if hasattr(option("optim", name), "rank") else {})


def flat(optimizer) -> dict[str, object]:
    """Every value of the state, by parameter and name, without the constant code tables."""
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{index}.{key}": value
        for index, p in enumerate(ordered)
        for key, value in flattened(optimizer.state[p]).items()
    }


def assert_equal(left, right) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == right[key].dtype and torch.equal(value, right[key]), key
        else:
            assert value == right[key], key


@pytest.mark.parametrize("name", OPTIONS)
def test_restored_state_is_equal_and_goes_on_equal(name, tmp_path):
    params = parameters()
    optimizer = build(name, params, **settings(name))
    for step in range(1, 4):
        give_gradients(params, step)
        optimizer.step()
    save_optimizer(optimizer, tmp_path)

    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    restored = build(name, others, **settings(name))
    load_optimizer(restored, tmp_path)
    assert_equal(flat(restored), flat(optimizer))
    for step in range(4, 7):
        give_gradients(params, step)
        give_gradients(others, step)
        optimizer.step()
        restored.step()
        for p, other in zip(params, others, strict=True):
            assert torch.equal(p, other), step
    assert_equal(flat(restored), flat(optimizer))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_fresh_optimizer_is_saved_and_restored_too(name, tmp_path):
    """A checkpoint before the first applied step, as after a skipped one, holds no state."""
    params = parameters()
    save_optimizer(build(name, params, **settings(name)), tmp_path)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    restored = build(name, others, **settings(name))
    load_optimizer(restored, tmp_path)
    plain = build(name, params, **settings(name))
    for optimizer, ours in ((plain, params), (restored, others)):
        give_gradients(ours, 1)
        optimizer.step()
    for p, other in zip(params, others, strict=True):
        assert torch.equal(p, other)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_files_hold_no_code_tables(name, tmp_path):
    params = parameters()
    optimizer = build(name, params, **settings(name))
    give_gradients(params, 1)
    optimizer.step()
    save_optimizer(optimizer, tmp_path)
    names = [*load_file(tmp_path / TENSORS), *json.loads((tmp_path / SCALARS).read_text())]
    assert names and not [name for name in names if "qmap" in name]
