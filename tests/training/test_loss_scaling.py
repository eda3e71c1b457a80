"""The loss scale of fp16 beside torch's GradScaler, in the loop, and across a resume."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from tests.support import metrics, train_here
from trainer.errors import NonFiniteError
from trainer.run import build
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
def as_in_fp16(monkeypatch):
    """Runs scale their losses whatever they compute in: a CPU takes a minute for a few steps in fp16."""
    monkeypatch.setattr(build, "LossScaling", lambda dtype: LossScaling(torch.float16))


def spoilt(monkeypatch, chosen):
    """The gradients of these steps overflow."""
    real, calls = torch.nn.utils.clip_grad_norm_, {"step": 0}

    def clip(parameters, limit):
        calls["step"] += 1
        if calls["step"] in chosen:
            parameters[0].grad[0, 0] = math.inf
        return real(parameters, limit)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    return calls


def test_a_run_keeps_its_scale_across_a_resume(as_in_fp16, base_overrides, tmp_path, monkeypatch):
    calls = spoilt(monkeypatch, {2})
    words = [*base_overrides, "train.resume=force", "train.save_every=1", "train.accumulation_steps=1"]
    for name, parts in {"whole": [4], "halves": [3, 4]}.items():
        calls["step"] = 0
        for steps in parts:
            summary = train_here([*words, f"train.max_steps={steps}"], tmp_path / name)
        assert summary["skipped_steps"] == 1
    state = load_state(tmp_path / "halves/checkpoints/step-00000004")
    assert (state.loss_scale, state.scaled_steps, state.skipped_in_a_row) == (32768, 2, 0)
    whole, halves = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("whole", "halves"))
    assert all(torch.equal(whole[key], halves[key]) for key in whole)
    (row,) = metrics(tmp_path / "halves", "skipped")
    assert row["step"] == 2


def test_sixteen_halvings_are_all_that_may_mend_a_run(as_in_fp16, base_overrides, tmp_path, monkeypatch):
    spoilt(monkeypatch, range(100))
    with pytest.raises(NonFiniteError, match="up to step 21,"):
        train_here([*base_overrides, "train.max_steps=30", "train.accumulation_steps=1"], tmp_path / "run")


def test_a_scale_of_a_power_of_two_changes_no_bit(base_overrides, tmp_path, monkeypatch):
    words = [*base_overrides, "train.max_steps=2", "train.max_grad_norm=0.1"]
    train_here(words, tmp_path / "plain")
    monkeypatch.setattr(build, "LossScaling", lambda dtype: LossScaling(torch.float16))
    train_here(words, tmp_path / "scaled")
    plain, scaled = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("plain", "scaled"))
    assert all(torch.equal(plain[key], scaled[key]) for key in plain)
