"""A run in its folder: signals at every stage (R8), two runs in one folder (C4), and the files the contract names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise

import pytest

from tests.factories import load
from tests.processes import in_child
from tests.support import REPO, metrics, train_here
from trainer.config.compose import compose
from trainer.errors import Interrupted, OutOfMemoryError, StorageError
from trainer.run import build as build_module
from trainer.run import export as export_module
from trainer.run import prepare as prepare_module
from trainer.run import train as train_module
from trainer.tracking.run_folder import RunFolder
from trainer.training.checkpoint import Checkpoints, damage
from trainer.training.interrupts import Interrupts
from trainer.training.losses import Chunked

TRAIN_FIELDS = (
    "event step epoch loss learning_rate grad_norm num_tokens num_targets tokens_per_second mfu memory_allocated_gib "
    "memory_peak_gib rss_peak_gib seconds"
).split()
SUMMARY_FIELDS = (
    "status steps num_tokens final_loss eval_loss best_eval_loss tokens_per_second peak_memory_gib rss_peak_gib "
    "trainable_parameters total_parameters wall_seconds adapter"
).split()

STAGES = {
    "tokenise": (prepare_module, "load_data", 1),
    "load": (build_module, "load_base", 1),
    "probe": (build_module, "check_packing", 1),
    "first evaluation": (train_module, "evaluate", 1),
    "step": (Chunked, "sum", 12),
    "evaluation": (train_module, "evaluate", 2),
    "save": (Checkpoints, "save", 2),
    "result": (export_module, "export", 1),
}
"""Where the signal comes: at which call of what."""


@pytest.fixture
def job(base_overrides):
    return [*base_overrides, "data.eval_fraction=0.2", "train.save_every=2", "train.eval_every=3", "train.max_steps=8"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The adapter of the run of `job` that no signal met."""
    made = {}

    def run(job):
        if not made:
            folder = tmp_path_factory.mktemp("whole") / "run"
            train_here(job, folder)
            made["adapter"] = (folder / "adapter/adapter_model.safetensors").read_bytes()
        return made["adapter"]

    return run


@pytest.mark.parametrize(
    ("stage", "signum"),
    [
        ("tokenise", signal.SIGTERM),
        ("evaluation", signal.SIGTERM),
        ("save", signal.SIGTERM),
        ("load", signal.SIGINT),
        ("step", signal.SIGHUP),
        *(
            pytest.param(stage, signum, marks=pytest.mark.slow)
            for stage, signum in [
                ("load", signal.SIGTERM),
                ("probe", signal.SIGTERM),
                ("first evaluation", signal.SIGTERM),
                ("step", signal.SIGTERM),
                ("step", signal.SIGINT),
                ("result", signal.SIGTERM),
            ]
        ),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_signal_saves_and_the_run_can_go_on(stage, signum, job, whole, tmp_path, monkeypatch):
    """R8."""
    owner, name, at_call = STAGES[stage]
    real, calls, sent = getattr(owner, name), [], []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == at_call and not sent:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signum)
        return real(*args, **kwargs)

    run = tmp_path / "run"
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch, pytest.raises(Interrupted) as stop:
        patch.setattr(owner, name, interrupted)
        train_here(job, run)
    assert stop.value.exit_code == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}[signum]
    assert time.monotonic() - sent[0] < 10
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    newest = Checkpoints(run / "checkpoints", 2).newest(lambda _: None)
    if stage == "tokenise":
        assert not run.exists(), "nothing had begun, so nothing is left"
    else:
        summary = json.loads((run / "summary.json").read_text())
        assert summary["status"] == "interrupted"
        assert (newest is None) == (summary["steps"] == 0)
        if newest is not None:
            assert damage(newest) is None and newest.name == f"step-{summary['steps']:08d}"
    assert not (run / "adapter").exists()
    assert train_here(job, run)["status"] == "completed"
    assert (run / "adapter/adapter_model.safetensors").read_bytes() == whole(job)


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
    ids=["SIGTERM", "SIGINT"],
)
def test_the_program_exits_with_the_signals_code(signum, code, job, tmp_path):
    run = tmp_path / "run"
    words = [*job, "train.max_steps=100000", f"output_dir={run}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *words],
        cwd=REPO,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "last").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    steps = json.loads((run / "summary.json").read_text())["steps"]
    assert f"The state after step {steps} is saved" in errors and "trainer resume run=" in errors
    assert "Traceback" not in errors
    assert damage(run / "checkpoints" / f"step-{steps:08d}") is None


def test_a_second_run_in_a_folder_at_work_is_refused(job, tmp_path):
    """C4: another process holds the folder's lock."""
    run = tmp_path / "run"
    folder = RunFolder(run)
    folder.open()
    try:
        assert in_child(lambda: train_here(job, run)) == 5
        with pytest.raises(StorageError, match="another process is running in this folder"):
            train_here(job, run)
        assert [entry.name for entry in run.iterdir()] == [".lock"]
    finally:
        folder.close()
    assert train_here(job, run)["status"] == "completed"


def test_time_to_the_first_step_is_told_by_stage(job, tmp_path):
    """The stages add up to it, it is a part of the whole, and a caller's time for imports counts."""
    run = tmp_path / "run"
    summary = train_module.run_training(compose([*job, f"output_dir={run}"]), run, import_seconds=1000.0)
    stages = summary["stages_to_first_step"]
    assert {"imports", "tokenizer", "data", "plan", "weights", "adapter", "first evaluation", "other"} <= set(stages)
    assert "training" not in stages
    assert all(seconds >= 0 for seconds in stages.values())
    assert summary["seconds_to_first_step"] == pytest.approx(sum(stages.values()))
    assert 1000 < summary["seconds_to_first_step"] < summary["wall_seconds"]
    assert f"{summary['seconds_to_first_step']:.1f} s: imports 1000.0 s" in (run / "train.log").read_text()


def test_rows_have_the_contracts_fields_and_add_up(job, tmp_path):
    run = tmp_path / "run"
    train_here([*job, "train.log_every=3"], run)
    rows = metrics(run)
    assert [row["step"] for row in rows] == [3, 6, 8]
    for row in rows:
        assert set(TRAIN_FIELDS) <= set(row)
        assert 0 < row["mfu"] < 1.5, "a share of the matrix products' rate, measured here; 1.5: a noisy machine"
        assert row["roof_share"] / row["mfu"] == pytest.approx(rows[0]["roof_share"] / rows[0]["mfu"], rel=0.05)
        assert row["roof_share"] > row["mfu"], "recomputation is arithmetic too"
        assert row["matmul_tflops"] == rows[0]["matmul_tflops"] > 0
        assert 0 < row["memory_allocated_gib"] <= row["memory_peak_gib"] <= row["rss_peak_gib"] * 4
        assert row["learning_rate"] == 1e-2
    every = metrics_of(job, tmp_path / "every")
    by_step = {row["step"]: row for row in every}
    for first, last in ((0, 3), (3, 6), (6, 8)):
        row = by_step[last]
        counted = [by_step[s] for s in range(first + 1, last + 1)]
        before = [by_step[s - 1]["num_targets"] if s > 1 else 0 for s in range(first + 1, last + 1)]
        weights = [r["num_targets"] - b for r, b in zip(counted, before, strict=True)]
        mean = sum(w * r["loss"] for w, r in zip(weights, counted, strict=True)) / sum(weights)
        (coarse,) = [r for r in rows if r["step"] == last]
        assert coarse["loss"] == pytest.approx(mean, abs=1e-6), "the token mean over the steps since the last row"
        for key in ("num_tokens", "num_targets", "epoch", "grad_norm"):
            assert coarse[key] == row[key]
    assert all(a["seconds"] < b["seconds"] for a, b in pairwise(rows))
    rate = (rows[1]["num_tokens"] - rows[0]["num_tokens"]) / (rows[1]["seconds"] - rows[0]["seconds"])
    assert rows[1]["tokens_per_second"] == pytest.approx(rate)

    evaluations = metrics(run, "eval")
    assert [row["step"] for row in evaluations] == [0, 3, 6, 8]
    for row in evaluations:
        assert {"event", "step", "eval_loss", "perplexity", "num_targets"} <= set(row)


def metrics_of(job, run):
    train_here(job, run)
    return metrics(run)


def test_summary_and_manifest_say_what_the_contract_says(job, tiny, tmp_path):
    run = tmp_path / "run"
    returned = train_here(job, run)
    summary = json.loads((run / "summary.json").read_text())
    assert summary == returned and set(SUMMARY_FIELDS) <= set(summary)
    rows, evaluations = metrics(run), metrics(run, "eval")
    assert summary["status"] == "completed" and summary["steps"] == 8
    assert summary["num_tokens"] == rows[-1]["num_tokens"] and summary["final_loss"] == rows[-1]["loss"]
    assert summary["eval_loss"] == evaluations[-1]["eval_loss"]
    assert summary["first_eval_loss"] == evaluations[0]["eval_loss"]
    assert summary["best_eval_loss"] == min(row["eval_loss"] for row in evaluations[1:])
    base = sum(p.numel() for p in load(tiny.path).parameters())
    linears = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    adapter = 2 * sum(16 * (i + o) for i, o in linears)
    assert summary["trainable_parameters"] == adapter and summary["total_parameters"] == base + adapter
    assert summary["peak_memory_gib"] >= max(row["memory_peak_gib"] for row in rows)
    assert summary["adapter"] == "adapter" and (run / "adapter/adapter_config.json").is_file()
    manifest = json.loads((run / "manifest.json").read_text())
    assert {"run_id", "versions", "git_commit", "data_hash", "model", "seed", "fresh_adapter_hash", "hardware"} <= set(
        manifest
    )
    names = {entry.name for entry in run.iterdir()}
    assert {"config.yaml", "overrides.yaml", "manifest.json", "metrics.jsonl", "checkpoints", "train.log"} <= names
    assert "held-out loss" in (run / "train.log").read_text()


def test_two_steps_in_bf16(job, tmp_path):
    """Autocast is the GPU's path: fp32 masters learn, and losses stay near those of fp32."""
    from safetensors.torch import load_file

    rows = {}
    for precision in ("bf16", "fp32"):
        run = tmp_path / precision
        train_here([*job, "quant=nf4", f"precision={precision}", "train.max_steps=2"], run)
        rows[precision] = metrics(run) + metrics(run, "eval")
        weights = load_file(run / "adapter/adapter_model.safetensors")
        assert {str(w.dtype) for w in weights.values()} == {"torch.float32"}
        assert all(w.abs().max() > 0 for w in weights.values())
    for half, full in zip(rows["bf16"], rows["fp32"], strict=True):
        key = "loss" if "loss" in half else "eval_loss"
        assert half[key] == pytest.approx(full[key], rel=0.02)
        assert half[key] != full[key]
    assert "base bfloat16, compute bfloat16, trainable float32" in (tmp_path / "bf16/train.log").read_text()


def test_an_allocators_failure_says_what_to_change(job, tmp_path, monkeypatch):
    import torch

    calls = []
    real = Chunked.sum

    def out_of_memory(self, model, batch):
        calls.append(1)
        if len(calls) == 15:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, model, batch)

    monkeypatch.setattr(Chunked, "sum", out_of_memory)
    with pytest.raises(OutOfMemoryError) as error:
        train_here([*job, "train.save_every=1", "memory.on_oom=fail"], tmp_path / "run")
    assert error.value.exit_code == 7
    message = str(error.value)
    assert "train.micro_batch_tokens=64 train.accumulation_steps=4 data.max_length=64" in message
    assert "step-0000000" in message
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_training_imports_no_library_that_only_some_runs_use():
    """Each costs every start tenths of a second or more; what needs one imports it itself."""
    names = ("pandas", "scipy", "sklearn", "matplotlib", "datasets", "wandb", "tensorboard")
    code = f"import sys, trainer.run.train; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_closed_terminal_saves_like_a_signal(job, tmp_path):
    """The terminal goes away while the run draws its bar there: SIGHUP, and every word to it is refused."""
    import pty

    run = tmp_path / "run"
    words = [*job, "train.max_steps=100000", f"output_dir={run}"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(REPO)
        os.execv(sys.executable, [sys.executable, "-m", "trainer", *words])
    os.set_blocking(terminal, False)
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "last").exists():
        assert time.monotonic() < deadline
        with suppress(BlockingIOError):
            os.read(terminal, 65536)
        time.sleep(0.01)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 129
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "interrupted" and "SIGHUP" in summary["error"]
    assert damage(run / "checkpoints" / f"step-{summary['steps']:08d}") is None


def test_nohup_is_kept():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)
