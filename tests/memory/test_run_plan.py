"""Memory in a run: predicted and measured, probe, snapshots, no leak, and running out anywhere (G1, G2, D5)."""

from __future__ import annotations

import gc
import json
import re
import time

import pytest
import torch

from tests.support import metrics, train_here, write_jsonl
from trainer.config.compose import compose
from trainer.errors import OutOfMemoryError
from trainer.memory import memory_probe as probe_module
from trainer.run import build, journal, train
from trainer.training import checkpoint, loop

OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_summary_and_plan_tell_predicted_and_measured(base_overrides, tmp_path):
    summary = train_here([*base_overrides, "memory.stats=true"], tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert summary["predicted_peak_memory_gib"] == plan["peak_gib"] > 0
    stages = summary["memory_stages_gib"]
    names = ["weights loaded", "adapter attached", "first forward", "first backward", "first step", "first save"]
    assert list(stages) == names
    for stage in stages.values():
        # 0: what an earlier run in this process left was given back in the meantime.
        assert 0 <= stage["allocated"] <= stage["peak"] and stage["gap"] >= 0
        assert stage["reserved"] == pytest.approx(stage["allocated"] + stage["gap"])
    assert summary["memory_baseline_gib"] > 0
    # All the C library allocates is in the measured peak: tensors, and a few MiB of rows, tokenizer and threads.
    assert 0 < summary["peak_memory_gib"] < summary["predicted_peak_memory_gib"] + 0.25
    log = (tmp_path / "train.log").read_text()
    for words in (
        "predicted in ",
        "workspace of libraries",
        "allocated by stage: weights loaded",
        "fragmentation",
        "GiB reserved",
        "fordblks",
    ):
        assert words in log, words
    figures = [int(line.split()[-1].replace(",", "")) for line in log.partition("allocator\n")[2].splitlines() if line]
    assert len(figures) > 3 and figures == sorted(figures, reverse=True)


def test_the_roofs_matrices_are_in_no_peak(base_overrides, tmp_path, monkeypatch):
    """They come and go before memory is watched."""

    def greedy(device, dtype):
        matrix = torch.ones(2**26)  # 256 MiB
        time.sleep(0.05)
        return float(matrix[0]) * 1e9

    monkeypatch.setattr(journal, "matmul_flops", greedy)
    summary = train_here(base_overrides, tmp_path)
    assert summary["peak_memory_gib"] < 0.2


def test_the_probe_changes_nothing(base_overrides, tmp_path):
    """D5 and exact restoration: losses with dropout are bit-equal to a run without the probe."""
    words = [*base_overrides, "adapter.dropout=0.1", "data.eval_fraction=0.3"]
    train_here([*words, "memory.probe=never"], tmp_path / "without")
    train_here([*words, "memory.probe=always"], tmp_path / "with")
    assert _probes(tmp_path / "with") and not _probes(tmp_path / "without")
    for event, key in (("train", "loss"), ("train", "grad_norm"), ("eval", "eval_loss")):
        first = [row[key] for row in metrics(tmp_path / "without", event)]
        assert first and first == [row[key] for row in metrics(tmp_path / "with", event)]


def _probes(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == "probe"]


def test_one_long_sample_is_tried_first(base_overrides, tmp_path):
    rows = [{"prompt": f"say {n}", "completion": "ok"} for n in range(9)]
    rows.insert(7, {"prompt": "a " * 40, "completion": "long " * 20})
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    words = [*base_overrides, f"data.path={data}", "data.max_length=512", "train.micro_batch_tokens=512"]
    words += ["packing=none", "train.micro_batch_size=1", "memory.probe=always"]
    train_here([*words], tmp_path / "run")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    (row,) = _probes(tmp_path / "run")
    assert row["num_tokens"] == max(plan["micro_batch"]["lengths"]) > 100


def test_a_snapshot_on_a_cpu_names_the_lines_that_hold_the_most(base_overrides, tmp_path):
    train_here([*base_overrides, "memory.snapshot=2", "train.max_steps=3"], tmp_path)
    snapshot = json.loads((tmp_path / "memory_snapshot.json").read_text())
    assert len(snapshot["live_after_step"]) == 2
    before, after = snapshot["live_before"], snapshot["live_after_step"][0]
    assert 500_000 < before < after < 1.5 * before, "the model was there before; the optimizer's state came"
    assert any(row["line"] == "before the recording" for row in snapshot["largest_at_peak"])
    sizes = [row["bytes"] for row in snapshot["largest_at_peak"]]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) <= snapshot["peak_bytes"]
    marks = snapshot["timeline"]
    assert [(m["step"], m["stage"]) for m in marks] == [
        (n, stage) for n in (1, 2) for stage in ("forward", "backward", "forward", "backward", "step")
    ]
    assert max(mark["peak"] for mark in marks) == snapshot["peak_bytes"]
    assert "within a step: a plateau of activations" in snapshot["shape"]
    assert snapshot["shape"] in (tmp_path / "train.log").read_text().replace("\n", " ")
    assert any("transformers" in row["line"] or "model/" in row["line"] for row in snapshot["largest_at_peak"])


def _shape_of(run_dir):
    return json.loads((run_dir / "memory_snapshot.json").read_text())["shape"]


def test_a_leak_in_a_run_is_a_staircase(base_overrides, tmp_path, monkeypatch):
    left_behind = []
    real = train.Watch.after_step

    def leaking(self, state, grad_norm):
        real(self, state, grad_norm)
        left_behind.append(torch.zeros(100_000))

    monkeypatch.setattr(train.Watch, "after_step", leaking)
    train_here([*base_overrides, "memory.snapshot=5", "train.max_steps=6"], tmp_path)
    assert re.search(r"after each step: a staircase: [34]\d\d,\d{3} bytes more after every step", _shape_of(tmp_path))


def test_a_runs_optimizer_state_is_one_rise_and_its_step_a_spike(base_overrides, tmp_path):
    """Every parameter trains on short rows: the moments outweigh the activations."""
    words = ["adapter=none", "quant=none", "optim=adamw", "memory.snapshot=4", "train.max_steps=6"]
    words += ["train.micro_batch_tokens=64", "data.max_length=64", "train.accumulation_steps=1"]
    train_here([*base_overrides, *words], tmp_path / "run")
    assert "one rise at the first step, then level: optimizer state" in _shape_of(tmp_path / "run")
    train_here([*base_overrides, *words, "memory.snapshot=1"], tmp_path / "first")
    assert re.search(r"within a step: a spike of [\d,]+ bytes at the optimizer's step", _shape_of(tmp_path / "first"))


@pytest.mark.slow
def test_500_steps_leave_nothing_behind(base_overrides, tmp_path, monkeypatch):
    """G1: number and bytes of living tensors are after 490 steps what they were after 50, but for a batch that is
    prepared ahead or not. A tensor a step would be 440."""
    counts = {}

    class Counting(train.Watch):
        def after_step(self, state, grad_norm):
            super().after_step(state, grad_norm)
            if state.step in range(50, 55) or state.step in range(490, 495):
                gc.collect()
                tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
                counts[state.step] = (len(tensors), sum(t.numel() * t.element_size() for t in tensors))

    monkeypatch.setattr(train, "Watch", Counting)
    train_here([*base_overrides, "train.max_steps=500", "train.accumulation_steps=1", "train.log_every=50"], tmp_path)
    early, late = ([counts[step] for step in range(begin, begin + 5)] for begin in (50, 490))
    for before, after, batch in zip(map(max, zip(*early)), map(max, zip(*late)), (10, 2**14), strict=True):
        assert abs(after - before) <= batch


def test_auto_trains_within_its_budget(base_overrides, tmp_path):
    summary = train_here([*base_overrides, "checkpointing=auto", "memory.budget_gib=1"], tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert "2 blocks kept whole" in plan["checkpointing"]
    assert summary["status"] == "completed"


def _break_load(monkeypatch):
    monkeypatch.setattr(build, "load_base", _raise)


def _break_probe(monkeypatch):
    monkeypatch.setattr(probe_module, "collate", _raise)


def _break_step(monkeypatch):
    calls = []
    original = loop.rng_state

    def later(device):
        calls.append(1)
        if len(calls) == 3:
            raise OOM
        return original(device)

    monkeypatch.setattr(loop, "rng_state", later)


def _break_evaluation(monkeypatch):
    monkeypatch.setattr(train, "evaluate", _raise)


def _break_save(monkeypatch):
    monkeypatch.setattr(checkpoint, "save_optimizer", _raise)


def _raise(*args, **kwargs):
    raise OOM


@pytest.mark.parametrize(
    ("breaking", "where"),
    [
        (_break_load, "loading"),
        pytest.param(_break_probe, "the probe", marks=pytest.mark.slow),
        (_break_step, "step"),
        pytest.param(_break_evaluation, "the evaluation or checkpoint after step 0", marks=pytest.mark.slow),
        (_break_save, "the evaluation or checkpoint after step 1"),
    ],
    ids=["load", "probe", "step", "evaluation", "save"],
)
def test_out_of_memory_says_where_what_and_the_ways_out(breaking, where, base_overrides, tmp_path, monkeypatch):
    """G2."""
    breaking(monkeypatch)
    words = [*base_overrides, "data.eval_fraction=0.3", "memory.probe=always", "train.save_every=1"]
    words.append("memory.on_oom=fail")
    with pytest.raises(OutOfMemoryError) as caught:
        train_here([*words, "train.epochs=4", "train.accumulation_steps=1"], tmp_path)
    assert caught.value.exit_code == 7
    text = str(caught.value)
    assert text.startswith(f"at {where}")
    for part in ("Tried to allocate 2.00 GiB", "peak so far", "predicted", "longest sample", "GiB (", "ways out"):
        assert part in text, part
    kept = "checkpoint kept: step-00000002" if breaking is _break_step else "no checkpoint yet"
    assert kept in text
    if breaking is _break_step:
        assert (tmp_path / "checkpoints" / "step-00000002").is_dir()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed" and "Tried to allocate" in summary["error"]


def test_other_errors_are_left_alone(base_overrides, tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(build, "load_base", fails)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        train_here(base_overrides, tmp_path)


def test_probe_by_default_is_for_gpus():
    probe = compose(["recipe=quickstart"]).config.memory.probe
    assert probe_module.wanted(probe, torch.device("cuda", 0))
    assert not probe_module.wanted(probe, torch.device("cpu"))
