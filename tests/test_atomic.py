"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support import train_here
from trainer import atomic as module
from trainer.atomic import replace_folder, write_atomically


class Disk:
    """Watches what a loss of power could take: content not synced when it is renamed, names not synced at the end.

    A file counts as synced in the state (size, time of change) that it had at its last fsync.
    """

    def __init__(self, root: Path, monkeypatch):
        self.root, self.synced, self.unsynced_names, self.renamed, self.lost = root, {}, set(), [], []
        self._real = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}
        monkeypatch.setattr(os, "fsync", self._fsync)
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, lambda source, target, name=name: self._move(name, source, target))

    def _fsync(self, handle) -> None:
        self._real["fsync"](handle)
        entry = os.fstat(handle)
        self.synced[entry.st_ino] = (entry.st_size, entry.st_mtime_ns)
        self.unsynced_names = {folder for folder in self.unsynced_names if folder != entry.st_ino}

    def _move(self, name, source, target) -> None:
        source, target = Path(source), Path(target)
        if target.is_relative_to(self.root):
            held = [source, *source.rglob("*")] if source.is_dir() else [source]
            files = [file for file in held if file.is_file()]
            stats = {file: file.stat() for file in files}
            self.lost += [f for f, s in stats.items() if self.synced.get(s.st_ino) != (s.st_size, s.st_mtime_ns)]
            if not target.name.startswith(".old-"):
                self.unsynced_names.add(target.parent.stat().st_ino)
            name_there = str(target.relative_to(self.root))
            if name_there.startswith("run/checkpoints/step-"):
                rows = (self.root / "run/metrics.jsonl").stat()
                self.lost += [rows] if self.synced.get(rows.st_ino) != (rows.st_size, rows.st_mtime_ns) else []
            self.renamed.append(name_there)
        self._real[name](source, target)


def test_an_atomic_write_never_shows_a_part(tmp_path, monkeypatch):
    file = tmp_path / "f"
    write_atomically(file, "old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "flush", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "new")
    assert file.read_text() == "old"


def test_what_is_renamed_is_on_the_disk_before_and_its_name_after(tmp_path, monkeypatch):
    disk = Disk(tmp_path, monkeypatch)
    write_atomically(tmp_path / "file", "text")
    building = tmp_path / ".building"
    (building / "deep").mkdir(parents=True)
    (building / "deep/a").write_text("a")
    replace_folder(building, tmp_path / "folder")
    assert disk.renamed == ["file", "folder"] and disk.lost == [] and disk.unsynced_names == set()


def test_a_whole_run_renames_nothing_that_a_loss_of_power_could_take(base_overrides, tmp_path, monkeypatch):
    """Checkpoints, their names, the result, the configuration: a power loss at any moment leaves old or new."""
    disk = Disk(tmp_path, monkeypatch)
    words = ["train.max_steps=4", "train.save_every=2", "train.keep_checkpoints=1", "data.eval_fraction=0.2"]
    train_here([*base_overrides, *words, "train.eval_every=2"], tmp_path / "run")
    names = [name.removeprefix("run/") for name in disk.renamed]
    first = ["checkpoints/step-00000002", "checkpoints/last", "checkpoints/best"]
    places = [names.index(name) for name in first]
    assert places == sorted(places)  # a name is written once what it names is there
    assert {"config.yaml", "overrides.yaml", "manifest.json", "summary.json", "adapter"} <= set(names)
    assert disk.lost == [] and disk.unsynced_names == set()
