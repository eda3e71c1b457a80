"""What evaluation and answers take, against torch.profiler's allocator events; and that a run counts them."""

from __future__ import annotations

import json

import pytest
import torch

from tests.bench._memory_cases import BASE, A
from tests.bench._memory_step import peak_of, random_batch, training, worst_shape
from tests.support import train_here, write_jsonl
from trainer.config.compose import compose
from trainer.errors import ConfigError
from trainer.export.answering import generating
from trainer.memory.predict.beside_steps import HeldOut
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.profile import Shape
from trainer.training.evaluate import evaluate

PADDED = Shape((400, 399), 797, packed=False)
PACKED = Shape((512, 512), 1022, packed=True)


@pytest.mark.parametrize(
    ("words", "shape"),
    [(["packing=none", "loss=full"], PADDED), ([], PACKED), ([f"{A}model_type=gemma2", f"{A}head_dim=32"], PACKED)],
    ids=["padded, full loss", "packed", "block mask"],
)
def test_an_evaluation_and_answers_take_what_is_planned(words, shape):
    config = compose([*BASE, *words]).config
    planner = Planner(config, shape=worst_shape(config), held_out=HeldOut(shape, 300))
    made = training(config, planner.shape)
    model, dtypes = made.parts[0], planner.dtypes
    batch = random_batch(shape, planner.model_config.vocab_size)
    peak, live = peak_of(lambda: evaluate(model, config.loss, [batch], dtypes))
    found = planner.between_steps()
    assert found["evaluation"] == pytest.approx(peak - live, rel=0.05)

    def answer():
        with torch.no_grad(), generating(model):
            model.generate(torch.ones((1, 299), dtype=torch.int64), max_new_tokens=1, do_sample=False)

    model.config.use_cache = True
    peak, live = peak_of(answer)
    assert found["answers"] == pytest.approx(peak - live, rel=0.05)


def test_the_highest_moment_of_a_prediction_can_be_an_evaluation():
    config = compose([*BASE, "train.accumulation_steps=1"]).config
    small = Planner(config, shape=Shape((32,), 31, packed=True))
    long = Planner(config, shape=small.shape, held_out=HeldOut(PACKED, 0))
    step, whole = small.predict(), long.predict()
    assert step.highest.name != "evaluation" == whole.highest.name
    static = whole.static
    assert whole.peak == static.total - static.gradients + long.between_steps()["evaluation"] > step.peak
    assert sum(whole.lines().values()) == whole.peak and "gradients" not in whole.lines()
    padded = long.changed(packing=compose([*BASE, "packing=none"]).config.packing)
    assert not padded.held_out.evaluation.packed


@pytest.fixture
def longer_evaluation(base_overrides, tmp_path):
    """A run on short rows that is evaluated on long ones."""

    def rows(count, words):
        return [{"prompt": f"say {n}", "completion": "long " * words} for n in range(count)]

    train = write_jsonl(tmp_path / "train.jsonl", rows(12, 1))
    held_out = write_jsonl(tmp_path / "eval.jsonl", rows(4, 60))
    words = [f"data.path={train}", f"data.eval_path={held_out}", "data.max_length=512", "packing=none", "loss=full"]
    return [*base_overrides, *words, "train.micro_batch_tokens=512", "data.eval_fraction=0"]


def test_a_run_plans_its_evaluation_and_auto_counts_it(longer_evaluation, tmp_path):
    summary = train_here([*longer_evaluation, "train.compare_prompts=2"], tmp_path / "run")
    assert summary["predicted_peak_at"] == "evaluation"
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["peak_at"] == "evaluation" and plan["moments_gib"]["answers"] > 0
    step = max(size for name, size in plan["moments_gib"].items() if name not in ("evaluation", "answers"))
    assert plan["peak_gib"] > step
    assert "predicted in evaluation" in " ".join((tmp_path / "run" / "train.log").read_text().split())
    between = (step + plan["peak_gib"]) / 2
    words = [*longer_evaluation, "checkpointing=auto", f"memory.budget_gib={between}"]
    with pytest.raises(ConfigError, match="in evaluation"):
        train_here(words, tmp_path / "auto")
