"""From data.path to the files it means: one file, a folder of shards, or a data set on the hub.

Only regular files are opened. A folder is walked in the order of names; what could hang a reader (a pipe, a device)
or lead out of the folder (a link) is refused, not skipped.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainer.errors import DataError
from trainer.resources import resolve

KINDS = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "txt",
}
COMPRESSIONS: dict[str, Callable[[Path], IO[bytes]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
LAYOUT_FILES = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files that `datasets` writes beside a data set's shards; they hold no rows."""

ALLOWED = f"{', '.join(KINDS)}, and each of them with {', '.join(COMPRESSIONS)}"


@dataclass(frozen=True)
class DataFile:
    """One readable file."""

    path: Path
    name: str
    """as the user wrote it; a shard's is the folder's name and its own"""
    kind: str
    compression: str | None

    def open(self) -> IO[bytes]:
        """Its bytes, decompressed. Raises DataError."""
        try:
            if self.compression is None:
                return self.path.open("rb")
            return COMPRESSIONS[self.compression](self.path)
        except OSError as error:
            raise DataError(f"{self.name}: cannot be read: {error.strerror}.") from None


def is_hub_id(path: str) -> bool:
    """Whether a path can only mean a data set on the hub: owner/name, and no such file or folder here."""
    resolved = resolve(path)
    looks_like = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", resolved) is not None
    return looks_like and _kind(resolved)[0] is None and not os.path.lexists(resolved)


def find_files(path: str, key: str, split: str | None) -> list[DataFile]:
    """The files of a local path; `key` names the setting that it came from. Raises DataError."""
    place = Path(os.path.expanduser(resolve(path)))
    if not os.path.lexists(place):
        raise DataError(f"{key}={path}: there is no such file. A hub data set is written owner/name.")
    if place.is_dir():
        return _shards(place, path, key, split)
    _check_regular(place, f"{key}={path}")
    kind, compression = _kind(place.name)
    if kind is None:
        ending = "".join(place.suffixes[-2:]) or "(no ending)"
        raise DataError(f"{key}={path}: unknown kind of file {ending}. Allowed: {ALLOWED}.")
    return [DataFile(place, path, kind, compression)]


def _shards(folder: Path, path: str, key: str, split: str | None) -> list[DataFile]:
    """Every data file below a folder, by name; of one split where it is given."""
    found = []
    for shard in _walk(folder, f"{key}={path}"):
        inside = shard.relative_to(folder)
        kind, compression = _kind(shard.name)
        hidden = any(part.startswith((".", "_")) for part in inside.parts)
        if kind is None or hidden or shard.name in LAYOUT_FILES or not _of_split(inside, split):
            continue
        found.append(DataFile(shard, f"{path.rstrip('/')}/{inside}", kind, compression))
    if not found:
        of = f" of the split {split}" if split is not None else ""
        raise DataError(f"{key}={path}: the folder holds no data file{of}. Allowed: {ALLOWED}.")
    return found


def _of_split(inside: Path, split: str | None) -> bool:
    """Whether a shard belongs to a split: by a folder of that name, or a file name that begins with it."""
    if split is None or split in inside.parts[:-1]:
        return True
    return re.match(re.escape(split) + r"([-_.]|$)", inside.name) is not None


def _walk(folder: Path, what: str) -> list[Path]:
    """Regular files below a folder, in order of their names. Raises DataError for links that leave it or loop."""
    root, files = folder.resolve(), []
    for here, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        for name in folders:
            if os.path.islink(os.path.join(here, name)):
                raise DataError(f"{what}: {os.path.join(here, name)} is a link to a folder; it could loop. Remove it.")
        for name in sorted(names):
            file = Path(here) / name
            if file.is_symlink() and not file.resolve().is_relative_to(root):
                raise DataError(f"{what}: {file} is a link that leaves the folder. Copy the file, or remove the link.")
            _check_regular(file, f"{what}: {file}")
            files.append(file)
    return files


def _check_regular(file: Path, what: str) -> None:
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise DataError(f"{what}: cannot be read: {error.strerror}.") from None
    if not stat.S_ISREG(mode):
        raise DataError(f"{what}: is not a regular file (a pipe, a device or a socket). Give a file or a folder.")


def _kind(name: str) -> tuple[str | None, str | None]:
    """Kind and compression by a name's endings."""
    stem, compression = name, None
    for ending in COMPRESSIONS:
        if name.endswith(ending):
            stem, compression = name.removesuffix(ending), ending
    return KINDS.get(Path(stem).suffix.lower()), compression
