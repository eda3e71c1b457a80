"""Findings: courses of known faults are told apart, and a good course has none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trainer.export.findings import findings

STEPS = range(1, 61)
NOISE = np.random.default_rng(0).normal(0, 0.02, len(STEPS) + 1)


def train(loss, memory=lambda step: 1.0) -> dict[str, list[dict]]:
    return {
        "train": [
            {"step": step, "loss": loss(step) + NOISE[step], "memory_allocated_gib": memory(step), "rss_peak_gib": 2.0}
            for step in STEPS
        ]
    }


def falling(step: int) -> float:
    return 1.0 + math.exp(-step / 25)


def kinds(rows, norms=None, **summary) -> list[str]:
    return [found.kind for found in findings(rows, {"status": "completed", **summary}, norms or {})]


def test_a_good_course_has_none():
    norms = {step: 2.0 * math.exp(-step / 20) + 0.5 + NOISE[step] for step in STEPS}
    assert kinds(train(falling), norms) == []


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("spike", train(lambda step: falling(step) + (3.0 if step == 40 else 0))),
        ("divergence", train(lambda step: falling(step) if step < 35 else falling(35) + (step - 35) * 0.15)),
        ("plateau", train(lambda step: 1.6 if step < 5 else 1.5)),
        ("memory creep", train(falling, lambda step: 1.0 + 0.01 * step)),
    ],
)
def test_each_fault_is_named(kind, rows):
    if kind == "plateau":
        rows = {"train": [{**row, "loss": round(row["loss"], 1)} for row in rows["train"]]}
    assert kinds(rows) == [kind]


def test_a_spike_is_narrowed_to_its_step():
    rows = train(lambda step: falling(step) + (3.0 if step == 40 else 0))
    rows["train"] = [row for row in rows["train"] if row["step"] % 5 == 0]
    norms = {step: 1.0 + NOISE[step] for step in STEPS} | {38: 9.0}
    found = findings(rows, {}, norms)
    assert [f.steps for f in found] == [(38,), (38,)], "by the loss of steps 36 to 40, and by its gradient norm"
    assert "steps 36 to 40" in found[0].text and "step 38" in found[1].text


def test_what_is_not_finite_and_what_ended_are_told():
    rows = train(falling) | {"skipped": [{"step": 7}, {"step": 9}]}
    found = findings(rows, {"status": "failed", "error": "it broke", "steps": 9}, {})
    assert [f.kind for f in found] == ["failed", "non-finite"]
    assert "it broke" in found[0].text and found[1].steps == (7, 9)


def test_rows_learnt_by_heart():
    losses = [2.0, 1.0, 0.9, 1.1, 1.3]
    rows = train(falling) | {"eval": [{"step": 10 * i, "eval_loss": loss} for i, loss in enumerate(losses)]}
    (found,) = findings(rows, {}, {})
    assert found.kind == "overfitting" and "step 20 (0.9)" in found.text
