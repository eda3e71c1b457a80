"""A lack of memory at any stage of a step costs a retreat and no bit of the result: against the untouched run."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.support import metrics, slow_but, train_here
from trainer.errors import Interrupted, OutOfMemoryError
from trainer.run import train as train_module
from trainer.tracking.metrics import read_metrics
from trainer.training.losses import Chunked

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Scarce:
    """Memory that runs out at one call of one stage: `stage` is forward, backward, loss, optimizer or evaluation."""

    def __init__(self, monkeypatch, optimizer: type, stage: str, call: int, block: int = 0, times: int = 1):
        self.stage, self.call, self.block, self.times = stage, call, block, times
        self.calls = 0
        self.armed = False
        """whether the loop runs, not a check before it"""
        self.outputs: list[weakref.ref] = []
        """of the block, in all passes so far"""
        self.alive_afterwards: int | None = None
        """of them when the first pass after the failure begins"""
        self.real = LlamaDecoderLayer.forward, Chunked.sum, optimizer.step
        monkeypatch.setattr(train_module, "train", self.loop(train_module.train))
        monkeypatch.setattr(LlamaDecoderLayer, "forward", self.forward())
        monkeypatch.setattr(Chunked, "sum", self.sum())
        monkeypatch.setattr(optimizer, "step", self.step())

    @property
    def failed(self) -> bool:
        return self.calls >= self.call

    def meet(self, stage: str) -> None:
        if stage != self.stage or not self.armed:
            return
        self.calls += 1
        if self.call <= self.calls < self.call + self.times:
            raise torch.OutOfMemoryError(OOM)

    def loop(self, real):
        def train(*args):
            self.armed = True
            try:
                real(*args)
            finally:
                self.armed = False

        return train

    def forward(self):
        def forward(block, hidden, *args, **kwargs):
            index = block.self_attn.layer_idx
            if block.training and index == self.block and torch._C._current_graph_task_id() == -1:
                if self.failed and self.alive_afterwards is None:
                    self.alive_afterwards = sum(ref() is not None for ref in self.outputs)
                self.meet("forward")
            out = self.real[0](block, hidden, *args, **kwargs)
            if block.training and index == self.block:
                self.outputs.append(weakref.ref(out))
                out = Backward.apply(out, self)
            return out

        return forward

    def sum(self):
        def summed(loss, model, batch):
            self.meet("loss" if model.training else "evaluation")
            return self.real[1](loss, model, batch)

        return summed

    def step(self):
        def step(optimizer, closure=None):
            """Half of the parameters move before memory runs out."""
            try:
                self.meet("optimizer")
            except torch.OutOfMemoryError:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                for parameter in parameters[len(parameters) // 2 :]:
                    parameter.grad = None
                self.real[2](optimizer)
                raise
            return self.real[2](optimizer)

        return step


class Backward(torch.autograd.Function):
    """Identity, whose backward pass can run out of memory."""

    @staticmethod
    def forward(ctx, x, scarce):
        ctx.scarce = scarce
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.scarce.meet("backward")
        return gradient, None


@pytest.fixture
def job(base_overrides):
    words = ["data.eval_fraction=0.3", "train.save_every=2", "train.eval_every=3", "train.max_steps=5"]
    return [*base_overrides, *words, "train.micro_batch_tokens=128", "adapter.dropout=0.1", "checkpointing=none"]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """The run that never lacks memory, made once for each job."""
    made = {}

    def run(words):
        key = tuple(words)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("untouched") / "run"
            train_here(list(words), made[key])
        return made[key]

    return run


def adapter(run):
    return (run / "adapter/adapter_model.safetensors").read_bytes()


def told(run) -> list[dict]:
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["event"] == "retreat"]
    manifest = json.loads((run / "manifest.json").read_text())["retreats"]
    assert [{k: v for k, v in row.items() if k not in ("event", "time")} for row in rows] == manifest
    return rows


def assert_same_run(run, other) -> None:
    assert adapter(run) == adapter(other)
    for event, keys in (("train", ("loss", "grad_norm", "num_targets", "num_tokens")), ("eval", ("num_targets",))):
        rows = [[{key: row[key] for key in ("step", *keys)} for row in metrics(r, event)] for r in (run, other)]
        assert rows[0] == rows[1]
    losses = [[row["eval_loss"] for row in metrics(r, "eval")] for r in (run, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


ADAMW = "torch.optim.AdamW"
STAGES = [
    ("forward", 1, 0),
    ("forward", 5, 1),
    ("loss", 4, 0),
    ("backward", 2, 1),
    ("backward", 6, 0),
    ("optimizer", 1, 0),
    ("optimizer", 4, 0),
    ("evaluation", 1, 0),
    ("evaluation", 2, 0),
]
QUICK = [
    ("fp32", "forward", 5, 1),
    ("fp32", "loss", 4, 0),
    ("fp32", "backward", 2, 1),
    ("fp32", "optimizer", 1, 0),
    ("fp32", "evaluation", 2, 0),
    ("nf4", "backward", 6, 0),
    ("nf4", "optimizer", 4, 0),
]
"""Those that every run of the tests takes; the others are slow ones."""
SETTINGS = {
    "fp32": ["quant=none"],
    "nf4": ["quant=nf4", "optim=adamw_8bit"],
}


def optimizer_of(words) -> type:
    import bitsandbytes as bnb

    return bnb.optim.AdamW8bit if "optim=adamw_8bit" in words else torch.optim.AdamW


@pytest.mark.parametrize(
    ("settings", "stage", "call", "block"),
    slow_but(QUICK, [(name, *stage) for name in SETTINGS for stage in STAGES]),
)
def test_a_step_that_ran_out_is_made_again(settings, stage, call, block, job, untouched, tmp_path, monkeypatch):
    words = [*job, *SETTINGS[settings]]
    expected = untouched(words)
    scarce = Scarce(monkeypatch, optimizer_of(words), stage, call, block)
    summary = train_here(words, tmp_path)
    assert scarce.calls > call and summary["status"] == "completed"
    assert scarce.alive_afterwards == 0, "the broken step's graph is gone before its memory is needed"
    assert_same_run(tmp_path, expected)
    (row,) = told(tmp_path)
    assert row["error"] == OOM
    assert row["checkpointing"] == (None if stage == "evaluation" else "selective")
    assert not (tmp_path / ".start").exists()


def test_of_all_parameters_half_moved_none_stays_moved(job, untouched, tmp_path, monkeypatch):
    """adapter=none, before there is a checkpoint: the run goes back to its beginning."""
    words = [word for word in job if not word.startswith("adapter.")] + ["adapter=none", "optim.learning_rate=1e-3"]
    expected = untouched(words)
    Scarce(monkeypatch, torch.optim.AdamW, "optimizer", 2)
    train_here(words, tmp_path)
    name = "model/model.safetensors"
    assert (tmp_path / name).read_bytes() == (expected / name).read_bytes()
    assert told(tmp_path)[0]["step"] == 0, "the first step was made again too"


@pytest.mark.parametrize(
    ("words", "first"),
    [
        pytest.param(["checkpointing=attention"], "selective", marks=pytest.mark.slow),
        pytest.param(["checkpointing=selective"], "full", marks=pytest.mark.slow),
        (["checkpointing=selective", "offload=activations"], "full"),
        (["checkpointing=selective", "offload=base_cpu", "quant=nf4"], "full"),
        pytest.param(["checkpointing=auto", "memory.budget_gib=4"], "selective", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(w.partition("=")[2] for w in value),
)
def test_the_next_policy_has_the_same_gradients(words, first, job, untouched, tmp_path, monkeypatch):
    words = [*job, *words]
    expected = untouched(words)
    scarce = Scarce(monkeypatch, torch.optim.AdamW, "backward", 4, block=0)
    train_here(words, tmp_path)
    assert_same_run(tmp_path, expected)
    assert [row["checkpointing"] for row in told(tmp_path)] == [first]
    assert scarce.alive_afterwards == 0


def test_policies_come_before_halving_and_halving_is_the_same_to_rounding(job, untouched, tmp_path, monkeypatch):
    words = [word for word in job if not word.startswith("adapter.dropout")]  # its draws differ with the shape
    expected = untouched(words)
    Scarce(monkeypatch, torch.optim.AdamW, "loss", 3, times=3)
    train_here(words, tmp_path)
    rows = told(tmp_path)
    assert [(row["checkpointing"], row["halvings"]) for row in rows] == [("selective", 0), ("full", 0), ("full", 1)]
    for key in ("loss", "grad_norm", "num_targets"):
        got, wanted = ([row[key] for row in metrics(run)] for run in (tmp_path, expected))
        assert got == pytest.approx(wanted, rel=1e-4)
    weights, wanted = (load_file(run / "adapter/adapter_model.safetensors") for run in (tmp_path, expected))
    assert max((weights[name] - wanted[name]).abs().max() for name in wanted) < 1e-4
    log = (tmp_path / "train.log").read_text().replace("\n", " ")
    assert (
        "step 2: CUDA out of memory. Tried to allocate 2.00 GiB." in log
        and "2 blocks recomputed but for attention" in log
        and "micro-batches cut in 2" in log
    )


def test_a_run_keeps_its_retreat_when_it_goes_on(job, untouched, tmp_path, monkeypatch):
    expected = untouched(job)
    with monkeypatch.context() as patch:
        scarce = Scarce(patch, torch.optim.AdamW, "loss", 5)
        real = scarce.real[1]

        def stopped(loss, model, batch):
            if scarce.calls == 9:
                raise Interrupted(15, "stopped.")
            return scarce_sum(loss, model, batch)

        scarce_sum = Chunked.sum
        patch.setattr(Chunked, "sum", stopped)
        with pytest.raises(Interrupted):
            train_here(job, tmp_path)
        assert Chunked.sum is not real
    policies = []
    monkeypatch.setattr(
        train_module,
        "train",
        lambda loop, *rest, real=train_module.train: (
            policies.append([block._gradient_checkpointing_func for block in loop.model.model.layers]),
            real(loop, *rest),
        ),
    )
    train_here(job, tmp_path)
    assert_same_run(tmp_path, expected)
    assert [row["checkpointing"] for row in told(tmp_path)] == ["selective"]
    assert all("context_fn" in run.keywords for run in policies[0]), "selective from its first step"


@pytest.mark.parametrize("setting", ["fail", "retreat"])
def test_a_lack_that_stays_ends_the_run(setting, job, tmp_path, monkeypatch):
    """After all that can be given up: two policies, then halvings while the largest micro-batch gets smaller."""
    Scarce(monkeypatch, torch.optim.AdamW, "loss", 1, times=1000)
    with pytest.raises(OutOfMemoryError, match="at step 1: CUDA out of memory"):
        train_here([*job, f"memory.on_oom={setting}"], tmp_path)
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["event"] == "retreat"]
    steps = [(row["checkpointing"], row["halvings"]) for row in rows]
    assert steps == ([] if setting == "fail" else [("selective", 0), ("full", 0), ("full", 1), ("full", 2)])
    assert (tmp_path / ".start").exists() is False
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_the_probe_retreats_too(job, untouched, tmp_path, monkeypatch):
    expected = untouched(job)
    real, calls = train_module.probe_memory, []

    def probe(*args):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError(OOM)
        return real(*args)

    monkeypatch.setattr(train_module, "probe_memory", probe)
    train_here([*job, "memory.probe=always"], tmp_path)
    assert_same_run(tmp_path, expected)
    (row,) = told(tmp_path)
    assert row["during"] == "the probe of the largest micro-batch" and row["checkpointing"] == "selective"
