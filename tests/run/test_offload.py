"""Whole runs with offloading: the same run as without, from first loss to adapter; faults leave a checkpoint."""

from __future__ import annotations

import json
import os
import time

import pytest
from safetensors.torch import load_file

from tests.support import metrics, slow_but, train_here
from trainer.config.saved import load_run
from trainer.errors import ConfigError, ModelError, StorageError
from trainer.export.reload import load_trained
from trainer.model.offload import block_sources as sources
from trainer.run.train import run_training
from trainer.training.checkpoint import Checkpoints

DEEP = ["model.weights=random", "model.architecture.num_hidden_layers=5"]
"""More blocks than there are slots; the pretrained tiny model has two, which both stay."""
NUMBERS = ("loss", "grad_norm", "num_targets", "learning_rate")


@pytest.fixture
def job(base_overrides):
    return [*base_overrides, "quant=nf4", "adapter.dropout=0.1", "train.max_steps=4", "train.save_every=2",
            "data.eval_fraction=0.2"]  # fmt: skip


def numbers(folder):
    rows = [[row[name] for name in NUMBERS] for row in metrics(folder)]
    return rows, [row["eval_loss"] for row in metrics(folder, "eval")]


def same_adapter(left, right) -> bool:
    a, b = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (left, right))
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


@pytest.mark.parametrize(
    ("weights", "offload"),
    slow_but(
        [("pretrained", "base_disk"), ("random", "base_cpu")],
        [(weights, offload) for weights in ("pretrained", "random") for offload in ("base_disk", "base_cpu")],
    ),
)
def test_a_run_is_bit_equal_to_the_resident_one(offload, weights, job, tmp_path):
    words = job if weights == "pretrained" else [*job, *DEEP]
    train_here(words, tmp_path / "resident")
    train_here([*words, f"offload={offload}"], tmp_path / "streamed")
    assert len(numbers(tmp_path / "resident")[0]) == 4
    assert numbers(tmp_path / "streamed") == numbers(tmp_path / "resident")
    assert same_adapter(tmp_path / "streamed", tmp_path / "resident")
    configs = [(tmp_path / name / "adapter" / "adapter_config.json").read_text() for name in ("resident", "streamed")]
    assert configs[0] == configs[1]
    if weights == "pretrained":
        folders = [tmp_path / name for name in ("resident", "streamed")]
        answers = [load_trained(load_run(f), f).answer([{"role": "user", "content": "Hi"}], 12) for f in folders]
        assert answers[0] == answers[1]
    row = metrics(tmp_path / "streamed", "offload")[-1]
    assert row["step"] == 4 and row["what"] == "blocks"
    assert row["moved_gib"] > 0 and 0 <= row["hidden_share"] <= 1


def test_a_streamed_run_goes_on_where_it_stopped(job, tmp_path):
    job = [*job, *DEEP]
    train_here(job, tmp_path / "whole")
    words = [*job, "offload=base_disk", f"offload.folder={tmp_path / 'blocks'}"]
    folder = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        original = sources.FileSource.read

        def read(self, index, buffer):
            if (folder / "checkpoints" / "last").exists():
                raise KeyboardInterrupt
            original(self, index, buffer)

        patch.setattr(sources.FileSource, "read", read)
        train_here(words, folder)
    assert (folder / "checkpoints" / "last").read_text().strip() == "step-00000002"
    run_training(load_run(folder), folder)
    assert numbers(folder) == numbers(tmp_path / "whole")
    assert same_adapter(folder, tmp_path / "whole")
    assert list((tmp_path / "blocks").iterdir()) == []


def test_a_disk_that_fails_keeps_the_checkpoint(job, tmp_path, monkeypatch):
    folder, opened = tmp_path / "run", []
    opening, saving = sources.FileSource._open, Checkpoints.save

    def noted(self, block, name):
        opening(self, block, name)
        opened.append(self._files[block.index])

    def breaking(self, *args):
        saved = saving(self, *args)
        for file in opened:
            os.truncate(f"/proc/self/fd/{file}", 50)
        return saved

    monkeypatch.setattr(sources.FileSource, "_open", noted)
    monkeypatch.setattr(Checkpoints, "save", breaking)
    with pytest.raises(StorageError, match=r"block \d of the base cannot be read back.*last checkpoint is kept"):
        train_here([*job, *DEEP, "offload=base_disk", "memory.on_oom=fail"], folder)
    assert (folder / "checkpoints" / "last").read_text().strip() == "step-00000002"
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    monkeypatch.undo()
    assert run_training(load_run(folder), folder)["status"] == "completed"


def test_host_memory_that_is_too_small_is_said_before_weights_are_read(job, tmp_path, monkeypatch):
    free = type("Memory", (), {"available": 20 * 2**10})
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    monkeypatch.setattr("trainer.run.build.streamed_base", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(ConfigError, match=r"base_cpu: the blocks of the base take 0\.00 GiB of host memory.*are free"):
        train_here([*job, "offload=base_cpu"], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_module_that_trains_whole_cannot_be_streamed(job, tmp_path):
    with pytest.raises(ModelError, match=r"adapter.modules_to_save=\['up_proj'\].*offload=none"):
        train_here([*job, "offload=base_disk", "adapter.modules_to_save=[up_proj]"], tmp_path / "run")


def test_moved_inputs_change_no_number(job, tmp_path, capsys):
    train_here([*job, *DEEP], tmp_path / "kept")
    train_here([*job, *DEEP, "offload=activations"], tmp_path / "moved")
    row = metrics(tmp_path / "moved", "offload")[-1]
    assert row["step"] == 4 and row["what"] == "block inputs"
    assert row["moved_gib"] > 0 and 0 <= row["hidden_share"] <= 1
    assert numbers(tmp_path / "moved") == numbers(tmp_path / "kept")
    assert same_adapter(tmp_path / "moved", tmp_path / "kept")
    assert "GiB of block inputs in host memory" in capsys.readouterr().out


def test_an_embedding_that_trains_whole_can(job, tmp_path):
    words = [*job, "adapter.modules_to_save=[embed_tokens]", "train.max_steps=2"]
    train_here(words, tmp_path / "resident")
    train_here([*words, "offload=base_disk"], tmp_path / "streamed")
    assert numbers(tmp_path / "streamed") == numbers(tmp_path / "resident")


def test_a_slow_disk_is_named_with_its_rate(job, tmp_path, monkeypatch, capsys):
    original = sources.FileSource._fill

    def slowly(self, index, buffer):
        time.sleep(0.1)
        original(self, index, buffer)

    monkeypatch.setattr(sources.FileSource, "_fill", slowly)
    train_here([*job, *DEEP, "offload=base_disk", "train.max_steps=2"], tmp_path / "run")
    shown = " ".join(capsys.readouterr().out.split())
    assert "gives 0.00 GiB/s, so at least 0.6" in shown  # 6 of 5 blocks fetched in a micro-batch, 0.1 s each
    assert "More tokens a micro-batch hide more; a faster disk: offload.folder" in shown
