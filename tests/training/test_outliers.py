"""Steps skipped for their gradient norm: which, what they leave alone, and where the count is told."""

from __future__ import annotations

from statistics import NormalDist, fmean, stdev

import torch
from safetensors.torch import load_file

from tests.support import metrics, train_here
from trainer.training import outliers
from trainer.training.outliers import FEWEST, WINDOW, Outliers


def judged(norms, deviations=4.0):
    known, found = [], []
    for norm in norms:
        found.append(Outliers(deviations).found(norm, known))
        Outliers(deviations).remember(norm, known)
    return found, known


def test_one_far_norm_is_an_outlier_and_a_lasting_rise_soon_none():
    usual = [NormalDist(1.0, 0.1).inv_cdf((i % 19 + 1) / 20) for i in range(200)]
    assert not any(judged(usual)[0])
    found, known = judged([*usual, 3.0, float("inf"), 1.0])
    assert found[-3:] == [True, False, False] and len(known) == WINDOW
    limit = fmean(usual[-WINDOW:]) + 4 * stdev(usual[-WINDOW:])
    for norm, is_one in ((limit * 1.0001, True), (limit * 0.9999, False)):
        assert judged([*usual, norm])[0][-1] is is_one
    assert judged([*usual, *[3.0] * 20])[0].count(True) < 15
    assert not any(judged([1.0] * (FEWEST - 1) + [99.0])[0])
    assert judged([*usual, 99.0], None) == ([False] * 201, [])


def test_an_outlier_changes_no_weight_is_counted_and_looked_for_after_a_resume(base_overrides, tmp_path, monkeypatch):
    monkeypatch.setattr(outliers, "FEWEST", 3)
    real, calls = torch.nn.utils.clip_grad_norm_, {"step": 0}

    def clip(parameters, limit):
        calls["step"] += 1
        if calls["step"] == 5:
            parameters[0].grad *= 1e6
        return real(parameters, limit)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    words = [*base_overrides, "train.skip_outliers=20", "train.save_every=1", "train.keep_checkpoints=9"]
    words += ["schedule=constant", "train.resume=force"]
    run = tmp_path / "run"
    train_here([*words, "train.max_steps=4"], run)
    summary = train_here([*words, "train.max_steps=6"], run)
    assert summary["outlier_steps"] == 1 and summary["skipped_steps"] == 0
    (row,) = metrics(run, "outlier")
    assert row["step"] == 5 and row["grad_norm"] > 100
    weights = [load_file(f / "adapter_model.safetensors") for f in sorted((run / "checkpoints").glob("step-*"))[-3:]]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert any(not torch.equal(weights[1][key], weights[2][key]) for key in weights[1])
    assert "outliers skipped" in (run / "train.log").read_text()
