"""train.deterministic: torch's switch and cuBLAS's variable, in force inside the run and no longer."""

from __future__ import annotations

import os

import pytest
import torch

from tests.support import metrics, train_here
from trainer.training.deterministic import deterministic_kernels
from trainer.training.loop import Loop


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # put back afterwards, whatever the test sets
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


def test_inside_and_not_after():
    with pytest.raises(RuntimeError, match="stop"), deterministic_kernels(True):
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.empty(1000).isnan().all(), "no pass over fresh memory"
        raise RuntimeError("stop")
    assert not torch.are_deterministic_algorithms_enabled()


def test_not_wanted_not_touched():
    with deterministic_kernels(False):
        assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_run_has_kernels_for_all_it_does(base_overrides, tmp_path, monkeypatch):
    """Every operation of a run passes torch's refusal of those without a deterministic kernel, as far as a CPU has
    such; and on a CPU the losses are those of the run without."""
    seen = []
    real = Loop.learning_rate

    def looking(self, step):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return real(self, step)

    monkeypatch.setattr(Loop, "learning_rate", looking)
    words = [*base_overrides, "data.eval_fraction=0.3"]
    losses = []
    for wanted in (False, True):
        train_here([*words, f"train.deterministic={str(wanted).lower()}"], tmp_path / str(wanted))
        losses.append([row["loss"] for row in metrics(tmp_path / str(wanted), "train")])
    assert losses[0] == losses[1] and set(seen[: len(seen) // 2]) == {False} and set(seen[len(seen) // 2 :]) == {True}
