"""A disk that is full at W&B's folder alone: tracking is lost from there on, and not the run."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes import in_child
from tests.support import metrics, train_here
from trainer.tracking.wandb import WandBTracker
from trainer.training.watch import Watch

NEW_MOUNTS, RECURSIVE_PRIVATE = 0x20000, 0x4000 | (1 << 18)
"""CLONE_NEWNS; MS_REC | MS_PRIVATE (sched.h, mount.h)."""


def own_disk(folder: Path, num_bytes: int) -> bool:
    """A file system of this size in the folder, seen by this process and its children alone; False: not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS) != 0 or libc.mount(b"none", b"/", None, RECURSIVE_PRIVATE, None) != 0:
        return False
    folder.mkdir(parents=True)
    return libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={num_bytes}".encode()) == 0


@pytest.fixture(scope="module")
def disks(tmp_path_factory):
    if in_child(lambda: os._exit(0 if own_disk(tmp_path_factory.mktemp("disk") / "x", 4096) else 9)) == 9:
        pytest.skip("this machine lets no process have a disk of its own")


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_in_the_folder_of_the_tracking(step, disks, base_overrides, tmp_path, capfd):
    """From the start, or from a step on."""
    run = tmp_path / "run"

    def work() -> None:
        start, after = WandBTracker._start, Watch.after_step

        def started(self, *args):
            if not (run / "wandb").exists():
                assert own_disk(run / "wandb", 1 << 20)
                if step == 0:
                    fill(run / "wandb")
            start(self, *args)

        def after_step(self, state, grad_norm):
            if state.step == step > 0:
                fill(run / "wandb")
            after(self, state, grad_norm)

        WandBTracker._start, Watch.after_step = started, after_step
        train_here([*base_overrides, "train.max_steps=6", "track=wandb", "track.mode=offline"], run)

    assert in_child(work) == 0
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err
    table = " ".join(said.out.split())
    assert table.count("No space left on device: it holds a part, metrics.jsonl every row") == (2 if step == 0 else 1)
    assert [row["step"] for row in metrics(run)] == list(range(1, 7))
    assert (run / "adapter/adapter_model.safetensors").is_file()
