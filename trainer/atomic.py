"""Files and folders that are there whole or not at all, also after a kill or a loss of power."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def write_atomically(file: Path, text: str) -> None:
    """The file has its old content or the new one, never a part."""
    building = file.with_name(f".{file.name}.building")
    building.write_text(text, encoding="utf-8")
    flush(building)
    os.replace(building, file)
    flush(file.parent)


def replace_folder(building: Path, target: Path) -> None:
    """Renames a finished folder to its name, replacing one that is there. All it holds is on the disk before that."""
    for path in (*building.rglob("*"), building):
        flush(path)
    old = target.with_name(f".old-{target.name}")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
    os.rename(building, target)
    flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def flush(path: Path) -> None:
    """What was written to a file, or renamed in a folder, is on the disk afterwards."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
