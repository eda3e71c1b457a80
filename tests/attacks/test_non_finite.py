"""NaN and infinity in weights, loss, gradient and evaluation: no such number is saved, and each is said."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import metrics, train_here
from trainer.errors import ModelError, NonFiniteError
from trainer.run import train as train_module
from trainer.training.checkpoint import damage
from trainer.training.losses import Chunked

NAN, INF = float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow, id="inf")
BAD = pytest.mark.parametrize("bad", [pytest.param(NAN, id="nan"), INF])


@pytest.fixture
def job(base_overrides):
    return [*base_overrides, "train.max_steps=6", "train.save_every=2", "train.accumulation_steps=1"]


def saved(run) -> dict[str, dict[str, torch.Tensor]]:
    """Trained weights of every checkpoint, and of the result."""
    return {file.parent.name: load_file(file) for file in run.rglob("adapter_model.safetensors")}


@pytest.fixture
def at_call(monkeypatch):
    """`at_call(owner, name, number, spoil)`: while the loop runs, `spoil` changes what this call of owner.name does."""

    def install(owner, name, number, spoil):
        loop, real, calls = train_module.train, getattr(owner, name), []

        def counted(*args, **kwargs):
            calls.append(1)
            return spoil(real, *args, **kwargs) if len(calls) == number else real(*args, **kwargs)

        def train(*args):
            with monkeypatch.context() as patch:  # the plan traces what is patched here, too: not before the loop
                patch.setattr(owner, name, counted)
                loop(*args)

        monkeypatch.setattr(train_module, "train", train)

    return install


@BAD
def test_in_the_models_weights(bad, tiny, job, tmp_path):
    folder = shutil.copytree(tiny.path, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = bad
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="not all finite") as error:
        train_here([*job, f"model.path={folder}"], tmp_path / "run")
    assert "packed samples" not in str(error.value) and not metrics(tmp_path / "run")


@BAD
@pytest.mark.parametrize(
    "step", [pytest.param(3, marks=pytest.mark.slow, id="in between"), pytest.param(6, id="at the end")]
)
def test_in_the_trained_weights(bad, step, job, tmp_path, at_call):
    """The optimizer itself spoils one of them, its gradient being finite."""

    def spoil(real, optimizer, *args):
        real(optimizer, *args)
        optimizer.param_groups[0]["params"][-1].data.view(-1)[7] = bad

    at_call(torch.optim.AdamW, "step", step, spoil)
    with pytest.raises(NonFiniteError, match=r"not saved; the last checkpoint kept is step-0000000[24]") as error:
        train_here(job, tmp_path)
    assert error.value.exit_code == 6 and not (tmp_path / "adapter").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    kept = saved(tmp_path)
    assert list(kept) and all(w.isfinite().all() for weights in kept.values() for w in weights.values())
    assert all(damage(folder) is None for folder in (tmp_path / "checkpoints").glob("step-*"))


@pytest.mark.slow
@BAD
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_in_one_step(bad, where, job, tmp_path, at_call):
    """The step is left out whole."""

    def spoil_gradient(real, parameters, limit):
        parameters[0].grad[0, 0] = bad
        return real(parameters, limit)

    if where == "loss":
        at_call(Chunked, "sum", 3, lambda real, *args: real(*args) * bad)
    else:
        at_call(torch.nn.utils, "clip_grad_norm_", 3, spoil_gradient)
    summary = train_here(job, tmp_path)
    assert summary["status"] == "completed" and summary["skipped_steps"] == 1
    assert [row["step"] for row in metrics(tmp_path, "skipped")] == [3]
    rows = {row["step"]: row for row in metrics(tmp_path)}
    assert rows[3]["grad_norm"] is None and (rows[3]["loss"] is None) == (where == "loss")
    assert all(row["grad_norm"] is not None for step, row in rows.items() if step != 3)
    assert all(w.isfinite().all() for weights in saved(tmp_path).values() for w in weights.values())


@pytest.mark.slow
@BAD
def test_in_every_loss(bad, job, tmp_path, monkeypatch):
    real = Chunked.sum
    monkeypatch.setattr(
        Chunked, "sum", lambda loss, model, batch: real(loss, model, batch) * (bad if model.training else 1)
    )
    with pytest.raises(NonFiniteError, match="5 steps in a row"):
        train_here(job, tmp_path)
    adapters = saved(tmp_path)
    assert adapters and all(not w.any() for weights in adapters.values() for n, w in weights.items() if "lora_B" in n)


@BAD
def test_in_an_evaluation(bad, job, tmp_path, monkeypatch):
    """It is no best result, and those after it can be."""
    real, losses = train_module.evaluate, iter([3.0, bad, 2.5, 2.75])

    def evaluate(*args):
        return replace(real(*args), loss=next(losses))

    monkeypatch.setattr(train_module, "evaluate", evaluate)
    summary = train_here([*job, "data.eval_fraction=0.3", "train.eval_every=2"], tmp_path)
    assert (summary["best_eval_loss"], summary["best_step"], summary["eval_loss"]) == (2.5, 4, 2.75)
    assert [row["eval_loss"] for row in metrics(tmp_path, "eval")] == [3.0, None, 2.5, 2.75]
    assert (tmp_path / "checkpoints/best").read_text() == "step-00000004\n"


def test_in_the_first_gradient(job, tmp_path):
    """A scale at the end of its range, before any step."""
    with pytest.raises(NonFiniteError, match=r"lower adapter\.alpha"):
        train_here([*job, "adapter.alpha=1e38"], tmp_path / "run")
