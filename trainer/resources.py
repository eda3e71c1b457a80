"""Files that come with the trainer: conf/, recipes/ and the embedded model and data.

In a source checkout conf/ and recipes/ lie beside the package, in an installed wheel inside it.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
EMBEDDED = "embedded:"
"""Prefix of a path in the configuration that means a file in trainer/assets."""


def shipped(folder: str) -> Path:
    """The folder `conf` or `recipes` that belongs to this package."""
    inside = PACKAGE / folder
    return inside if inside.is_dir() else PACKAGE.parent / folder


def resolve(path: str) -> str:
    """A path as the file system (or the hub) knows it: embedded:NAME becomes the file in the package."""
    if path.startswith(EMBEDDED):
        return str(PACKAGE / "assets" / path.removeprefix(EMBEDDED))
    return path
