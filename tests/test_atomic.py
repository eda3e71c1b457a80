"""Files that are there whole or not at all."""

from __future__ import annotations

import errno

import pytest

from trainer import atomic as module
from trainer.atomic import write_atomically


def test_an_atomic_write_never_shows_a_part(tmp_path, monkeypatch):
    file = tmp_path / "f"
    write_atomically(file, "old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "flush", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "new")
    assert file.read_text() == "old"
