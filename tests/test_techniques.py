"""Each technique by itself: its plan beside a real step, and the second half of a run beside the whole."""

from __future__ import annotations

import pytest

from tests.bench._memory_step import real_step, worst_shape
from tests.support import metrics, train_here
from trainer.config.compose import compose
from trainer.memory.predict.planner import Planner
from trainer.training.weights import ADAPTER_FILE, MODEL_FILE

BASE = ["recipe=quickstart", "device=cpu", "precision=fp32", "data.max_length=128", "train.micro_batch_tokens=256"]
RUN = [
    "train.max_steps=2",
    "train.save_every=1",
    "train.log_every=1",
    "train.compare_prompts=0",
    "train.report=false",
    "data.eval_fraction=0",
    "schedule=constant",
]
TECHNIQUES = {
    "optim=lion_8bit": [],
    "optim=adafactor": [],
    "optim=muon": ["adapter=none", "quant=none"],
    "optim=galore_adamw": ["adapter=none", "quant=none", "optim.rank=8", "optim.update_interval=2"],
    "optim=galore_adamw_8bit": ["adapter=none", "quant=none", "optim.rank=32", "optim.update_interval=2"],
    "optim=adamw_schedule_free": ["quant=none"],
    "train.neftune_alpha=5": ["train.label_smoothing=0.1", "train.skip_outliers=6", "quant=none"],
    "model.rope_scaling=yarn": ["model.rope_factor=4", "data.max_length=2048", "train.micro_batch_tokens=2048"],
    "precision=fp16": [],
    "adapter=rslora": [],
    "adapter=dora": ["quant=nf4"],
    "adapter=lora_plus": ["quant=nf4", "optim=adamw_8bit"],
    "adapter=pissa": ["quant=nf4"],
    "adapter=loftq": ["quant=nf4"],
    "adapter=ia3": ["quant=nf4"],
    "adapter=peft": ["adapter.method=hra", "adapter.fields={r: 4}", "quant=none"],
}


SAMPLE = ("optim=lion_8bit", "optim=muon", "optim=galore_adamw", "adapter=pissa", "train.neftune_alpha=5")
"""Those that CI runs; the others are slow tests."""
CASES = [
    pytest.param(choice, more, id=choice, marks=() if choice in SAMPLE else pytest.mark.slow)
    for choice, more in TECHNIQUES.items()
]


@pytest.mark.parametrize(("choice", "more"), CASES)
def test_a_technique_plans_trains_and_resumes(choice, more, tmp_path):
    words = [*BASE, choice, *more, *RUN]
    config = compose(words).config
    planner = Planner(config, shape=worst_shape(config))
    assert planner.predict().peak == pytest.approx(real_step(config, planner.shape)[0], rel=0.05)
    train_here(words, tmp_path / "whole")
    train_here([*words, "train.max_steps=1"], tmp_path / "halves")
    train_here([*words, "train.resume=force"], tmp_path / "halves")
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert [row["loss"] for row in metrics(whole)] == [row["loss"] for row in metrics(halves)]
    assert len(metrics(whole)) == 2
    results = [
        file.read_bytes()
        for folder in (whole, halves)
        for file in folder.glob("*/*.safetensors")  # adapter/ or model/
        if file.name in (ADAPTER_FILE, MODEL_FILE)
    ]
    assert len(results) == 2 and results[0] == results[1]
