"""Memory that runs out at any stage: code 7, one sentence, and a run that can go on."""

from __future__ import annotations

import json

import pytest
import torch

from tests.program import here
from tests.support import train_here
from trainer.commands import data as data_module
from trainer.memory.advice import whatif
from trainer.run import build as build_module
from trainer.run import export as export_module
from trainer.run import prepare as prepare_module
from trainer.run import restore as restore_module
from trainer.run import train as train_module
from trainer.training.checkpoint import Checkpoints, damage
from trainer.training.losses import Chunked

ERRORS = {
    "card": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "host": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    "Python": lambda: MemoryError(),
}
STAGES = {
    "tokenizer": (prepare_module, "load_tokenizer", 1, "Python"),
    "rows": (prepare_module, "load_data", 1, "Python"),
    "shape": (prepare_module, "skeleton", 1, "host"),
    "plan": (prepare_module, "plan_run", 1, "host"),
    "weights": (build_module, "load_base", 1, "card"),
    "packing check": (build_module, "check_packing", 1, "card"),
    "first evaluation": (train_module, "evaluate", 1, "card"),
    "step": (Chunked, "sum", 8, "card"),
    "evaluation": (train_module, "evaluate", 2, "card"),
    "save": (Checkpoints, "save", 2, "host"),
    "result": (export_module, "export", 1, "Python"),
    "answers": (export_module, "answer", 1, "card"),
}
"""Where, at which call of what, and which allocator."""
SAMPLE = ("plan", "weights")
"""Those that CI runs; the others are slow tests."""


@pytest.fixture
def job(base_overrides):
    words = ["data.eval_fraction=0.3", "train.save_every=2", "train.eval_every=3", "train.max_steps=6"]
    words += ["train.compare_prompts=1"]
    return [*base_overrides, *words, "train.accumulation_steps=1", "memory.on_oom=fail"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    made = {}

    def run(job):
        if not made:
            made["run"] = tmp_path_factory.mktemp("whole") / "run"
            train_here(job, made["run"])
        return (made["run"] / "adapter/adapter_model.safetensors").read_bytes()

    return run


def scarce(monkeypatch, owner, name: str, call: int, error: str) -> None:
    """Memory runs out once, at this call. The advice, whose plans take seconds, has its own tests."""
    monkeypatch.setattr(whatif, "rows", lambda *_: [])
    real, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise ERRORS[error]()
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize(
    "stage", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in STAGES]
)
def test_at_any_stage_of_a_run(stage, job, whole, tmp_path, monkeypatch, capfd):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        scarce(patch, *STAGES[stage])
        assert here(*job, f"output_dir={run}") == 7
    said = capfd.readouterr().err
    assert said.startswith("trainer: out of memory: ") and "Traceback" not in said
    newest = Checkpoints(run / "checkpoints", 2).newest(lambda _: None)
    if list(STAGES).index(stage) < list(STAGES).index("weights"):
        assert not run.exists(), "nothing had begun, so nothing is left"
    else:
        assert json.loads((run / "summary.json").read_text())["status"] == "failed"
        assert newest is None or damage(newest) is None
    assert here(*job, f"output_dir={run}") == 0
    assert (run / "adapter/adapter_model.safetensors").read_bytes() == whole(job)


@pytest.mark.slow
def test_when_a_run_goes_on(job, whole, tmp_path, monkeypatch, capfd):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        scarce(patch, Chunked, "sum", 10, "card")
        assert here(*job, f"output_dir={run}") == 7
    with monkeypatch.context() as patch:
        scarce(patch, restore_module, "load_checkpoint", 1, "card")
        assert here(*job, f"output_dir={run}") == 7
    assert here("resume", f"run={run}") == 0
    assert "resumed at step" in capfd.readouterr().out
    assert (run / "adapter/adapter_model.safetensors").read_bytes() == whole(job)


@pytest.mark.parametrize("error", ERRORS)
def test_in_another_command(error, chats, monkeypatch, capfd):
    def failing(*_):
        raise ERRORS[error]()

    monkeypatch.setattr(data_module, "run", failing)
    assert here("data", f"data.path={chats}") == 7
    said = capfd.readouterr().err
    assert said.startswith("trainer: out of memory: ") and said.count("\n") == 1
