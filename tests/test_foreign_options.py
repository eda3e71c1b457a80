"""Options from outside the package: one class and one YAML each, and they compose, plan, train, resume and are listed.

None of the classes says anything about memory or speed: what a plan needs of them is traced or measured.
"""

from __future__ import annotations

import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.bench._memory_step import real_step, worst_shape
from tests.factories import largest_difference
from tests.support import metrics, train_here
from trainer import registry
from trainer.__main__ import dispatch
from trainer.config.compose import compose
from trainer.config.own import OWN, bring_along
from trainer.config.shelf import all_options
from trainer.memory.advice import whatif
from trainer.memory.predict.planner import Planner
from trainer.memory.run_plan import plan_run
from trainer.model.checkpointing import FullCheckpointing, NoCheckpointing

OPTIONS = '''
from dataclasses import dataclass

import torch

from trainer.model.adapters import Adapter, decoder_linears
from trainer.model.checkpointing import Checkpointing
from trainer.model.quant import Quant
from trainer.registry import option
from trainer.training.optimizers import Optim


@option("optim", "asgd")
@dataclass
class ASGD(Optim):
    def build(self, parameters):
        import torch

        return torch.optim.ASGD(self.groups(parameters), lr=self.learning_rate)


@option("optim", "adagrad")
@dataclass
class Adagrad(Optim):
    def build(self, parameters):
        import torch

        return torch.optim.Adagrad(self.groups(parameters), lr=self.learning_rate)


@option("optim", "lbfgs")
@dataclass
class LBFGS(Optim):
    def build(self, parameters):
        import torch

        return torch.optim.LBFGS(parameters, lr=self.learning_rate)


@option("adapter", "directions")
@dataclass
class Directions(Adapter):
    r: int

    def check(self, model):
        pass

    def attach(self, model, new_ids=()):
        import peft

        model.requires_grad_(False)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=self.r, use_dora=True, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(model, config)


@option("checkpointing", "again")
@dataclass
class Again(Checkpointing):
    """Runs each MLP again."""

    def apply_block(self, block):
        from functools import partial

        from torch.utils.checkpoint import checkpoint

        block.gradient_checkpointing = False
        block.mlp.forward = partial(checkpoint, block.mlp.forward, use_reentrant=False)


@option("quant", "rows")
@dataclass
class Rows(Quant):
    """int8 codes and one scale a row, in plain torch."""

    def config(self, compute_dtype):
        return None

    def linear(self, linear, compute_dtype, device):
        return RowsLinear(linear, compute_dtype).to(device)


class RowsLinear(torch.nn.Linear):
    def __init__(self, linear, compute_dtype):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = torch.nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale.to(compute_dtype), persistent=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)
'''

YAMLS = {
    "optim/asgd": "learning_rate: 1e-3\nweight_decay: 0.0\n",
    "optim/adagrad": "learning_rate: 1e-3\nweight_decay: 0.0\n",
    "optim/lbfgs": "learning_rate: 1e-3\nweight_decay: 0.0\n",
    "adapter/directions": "r: 4\n",
    "checkpointing/again": "",
    "quant/rows": "",
}


@pytest.fixture
def brought(tmp_path, monkeypatch):
    """A folder with the class and the YAML of each; they are gone after the test."""
    (tmp_path / "foreign_options.py").write_text(OPTIONS)
    for name, values in YAMLS.items():
        group, _, choice = name.partition("/")
        file = tmp_path / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"defaults: [/schema/{group}/{choice}@_here_]\n{values}")
    monkeypatch.chdir(tmp_path)
    before = {group: dict(classes) for group, classes in registry.OPTIONS.items()}
    bring_along(["--options", "foreign_options.py"])
    yield tmp_path
    registry.OPTIONS.clear()
    registry.OPTIONS.update(before)
    sys.modules.pop("own_options_foreign_options", None)
    for held in (OWN.folders, OWN.modules, OWN.module_of):
        held.clear()


BASE = ["recipe=quickstart", "device=cpu", "precision=fp32", "data.max_length=128", "train.micro_batch_tokens=256"]
RUN = [
    "train.max_steps=2",
    "train.log_every=1",
    "train.save_every=1",
    "train.compare_prompts=0",
    "train.report=false",
    "data.eval_fraction=0",
    "schedule=constant",
]
CHOICES = {
    "optim=asgd": [],
    "optim=adagrad": [],
    "adapter=directions": ["quant=nf4"],
    "checkpointing=again": [],
    "quant=rows": [],
}


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "more"), CHOICES.items(), ids=CHOICES)
def test_a_foreign_option_plans_trains_and_resumes(brought, choice, more):
    """The prediction beside the live storages of a real step; the second half of a run beside the whole."""
    words = [*BASE, choice, *more, *RUN]
    config = compose(words).config
    planner = Planner(config, shape=worst_shape(config))
    assert planner.predict().peak == pytest.approx(real_step(config, planner.shape)[0], rel=0.05)
    summary = train_here(words, brought / "whole")
    assert summary["steps"] == 2 and summary["predicted_peak_memory_gib"] > 0
    train_here([*words, "train.max_steps=1"], brought / "halves")
    train_here([*words, "train.resume=force"], brought / "halves")
    losses = [[row["loss"] for row in metrics(brought / name)] for name in ("whole", "halves")]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    ends = [load_file(brought / name / "adapter" / "adapter_model.safetensors") for name in ("whole", "halves")]
    assert largest_difference(*ends) == 0


def test_they_are_listed_and_are_rows_of_other_plans(brought, capsys):
    assert dispatch(["--help", "--options", "foreign_options.py"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("asgd", "adagrad", "directions", "again", "rows"))
    rows = {row.change: row.needed for row in whatif.rows(Planner(compose(BASE).config), all_options())}
    for choice in ("optim=asgd", "checkpointing=again", "quant=rows"):
        changed = Planner(compose([*BASE, choice]).config)
        assert rows[choice] == changed.needed(changed.predict()), choice


def test_what_cannot_be_planned_is_a_warning_and_runs(brought, capsys):
    """A step of L-BFGS wants a function that computes the loss again: nothing can try it."""
    from trainer.commands import plan

    assert plan.run([*BASE, "optim=lbfgs"]) == 0
    assert "no prediction: optim=lbfgs" in capsys.readouterr().out.replace("\n", " ")
    config = compose([*BASE, "optim=lbfgs"]).config
    dtypes = config.precision.build(torch.device("cpu"))
    run = plan_run(config, Planner(config).model_config, dtypes, None)
    assert run.prediction is None and "optim=lbfgs" in run.unplanned and run.elsewhere == 0


def test_the_share_that_runs_again_is_counted():
    """The default of a policy that says nothing, against those that say it."""
    planner = Planner(compose([*BASE, "adapter.fused=false", "quant=none"]).config)
    for policy in (NoCheckpointing(), FullCheckpointing()):
        assert planner.counted_again(policy) == pytest.approx(policy.recomputed(None), abs=0.01)
