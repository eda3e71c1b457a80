"""The loss scale of fp16 beside torch's GradScaler, in the loop, and across a resume."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from tests.support import metrics, train_here
from trainer.errors import NonFiniteError
from trainer.training import loss_scaling
from trainer.training.checkpoint import load_state
from trainer.training.loss_scaling import LossScaling
from trainer.training.state import State

FINITE = [False, False, True, True, True, True, False, *[True] * 7, False]


def test_the_scale_is_grad_scalers(monkeypatch):
    monkeypatch.setattr(loss_scaling, "GROWTH_INTERVAL", 3)
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    ours, state = LossScaling(torch.float16), State()
    for finite in FINITE:
        (theirs.scale(parameter.sum()) * (1.0 if finite else math.inf)).backward()
        assert parameter.grad[0] == (ours.scale(state) if finite else math.inf)
        copy = torch.nn.Parameter(torch.ones(2))
        copy.grad = parameter.grad.clone()
        ours.unscale([copy], state)
        theirs.unscale_(optimizer)
        assert torch.equal(copy.grad, parameter.grad)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert ours.update(state, finite) is not finite
        assert state.loss_scale == theirs.get_scale()


def test_other_dtypes_have_none():
    state, scaling = State(), LossScaling(torch.bfloat16)
    assert scaling.scale(state) == 1.0 and scaling.update(state, False) is False and state.loss_scale == 65536
    lowest = State(loss_scale=1.0)
    assert LossScaling(torch.float16).update(lowest, False) is False and lowest.loss_scale == 1.0


@pytest.fixture
def words(base_overrides, monkeypatch):
    """A run in fp16 whose second step overflows."""
    real, calls = torch.nn.utils.clip_grad_norm_, {"step": 0}

    def clip(parameters, limit):
        calls["step"] += 1
        if calls["step"] == 2:
            parameters[0].grad[0, 0] = math.inf
        return real(parameters, limit)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    return [*base_overrides, "precision=fp16", "train.resume=force", "train.save_every=1"], calls


def test_a_run_in_fp16_keeps_its_scale_across_a_resume(words, tmp_path):
    words, calls = words
    for name, parts in {"whole": [5], "halves": [3, 5]}.items():
        calls["step"] = 0
        for steps in parts:
            summary = train_here([*words, f"train.max_steps={steps}"], tmp_path / name)
        assert summary["skipped_steps"] == 1
    state = load_state(tmp_path / "halves/checkpoints/step-00000005")
    assert (state.loss_scale, state.scaled_steps, state.skipped_in_a_row) == (32768, 3, 0)
    assert state.to_json()["loss_scale"] == load_state(tmp_path / "whole/checkpoints/step-00000005").loss_scale
    whole, halves = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("whole", "halves"))
    assert all(torch.equal(whole[key], halves[key]) for key in whole)
    (row,) = metrics(tmp_path / "halves", "skipped")
    assert row["step"] == 2
    calls["step"] = -99
    exact = train_here([w for w in words if w != "precision=fp16"] + ["train.max_steps=5"], tmp_path / "exact")
    assert abs(exact["final_loss"] - summary["final_loss"]) < 0.3  # one step more, and rounding


def test_sixteen_halvings_are_all_that_may_mend_a_run(base_overrides, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, limit: torch.tensor(math.nan))
    with pytest.raises(NonFiniteError, match="up to step 21,"):
        train_here([*base_overrides, "precision=fp16", "train.epochs=50"], tmp_path / "run")
