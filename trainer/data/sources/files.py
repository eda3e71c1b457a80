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
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainer.data.sources.splits import named, splits_of
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


def _open_zstd(file: Path) -> IO[bytes]:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), "zstd")


def _open_zip(file: Path) -> IO[bytes]:
    (member,) = _zipped(file)
    try:
        return zipfile.ZipFile(file).open(member)
    except (RuntimeError, NotImplementedError) as error:  # a password, or a rare compression
        raise DataError(f"{file}: cannot be read: {error}. Unpack it.") from None


def _zipped(file: Path) -> list[str]:
    """The one file in an archive. Raises DataError where there are none or several."""
    try:
        names = [name for name in zipfile.ZipFile(file).namelist() if not name.endswith("/")]
    except zipfile.BadZipFile as error:
        raise DataError(f"{file}: cannot be read: {error}.") from None
    names = [name for name in names if not _hidden(Path(name))]  # a Mac adds __MACOSX/
    if len(names) != 1:
        raise DataError(f"{file}: holds {len(names)} files. Unpack it into a folder, and give the folder.")
    return names


COMPRESSIONS: dict[str, Callable[[Path], IO[bytes]]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
    ".zip": _open_zip,
}
BROKEN = (EOFError, OSError, lzma.LZMAError, zlib.error, zipfile.BadZipFile)
"""What reading a cut or broken archive raises."""

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
    return looks_like and _named_kind(resolved)[0] is None and not os.path.lexists(resolved)


def find_files(path: str, key: str, split: str | None) -> list[DataFile]:
    """The files of a local path; `key` names the setting that it came from. Raises DataError.

    Of a folder that has splits they are those of `split`, null is train.
    """
    place = _place(path, key)
    if place.is_dir():
        return _shards(place, path, key, split)[0]
    _check_regular(place, f"{key}={path}")
    kind, compression = _kind(place)
    if kind is None:
        ending = "".join(place.suffixes[-2:]) or "(no ending)"
        raise DataError(f"{key}={path}: unknown kind of file {ending}. Allowed: {ALLOWED}.")
    return [DataFile(place, path, kind, compression)]


def passed_over(path: str, key: str, split: str | None) -> list[str]:
    """The files of a folder that are not read, each with the reason; hidden ones are not told. Raises DataError."""
    if is_hub_id(path) or not (place := _place(path, key)).is_dir():
        return []
    return _shards(place, path, key, split)[1]


def _place(path: str, key: str) -> Path:
    place = Path(os.path.expanduser(resolve(path)))
    if not os.path.lexists(place):
        raise DataError(f"{key}={path}: there is no such file. A hub data set is written owner/name.")
    return place


def _shards(folder: Path, path: str, key: str, split: str | None) -> tuple[list[DataFile], list[str]]:
    """The data files of a split below a folder, by name, and the others that are there."""
    files: dict[str, DataFile] = {}
    others = []
    for shard in _walk(folder, f"{key}={path}"):
        inside = shard.relative_to(folder)
        if _hidden(inside) or shard.name in LAYOUT_FILES:
            continue
        try:
            kind, compression = _kind(shard)
        except DataError:
            kind = None  # an archive of other things
        if kind is None:
            others.append(f"{inside} (no kind of data file)")
            continue
        files[str(inside)] = DataFile(shard, f"{path.rstrip('/')}/{inside}", kind, compression)
    chosen = _of_split(list(files), f"{key}={path}", split)
    if not chosen:
        of = f" of the split {split}" if split is not None else ""
        raise DataError(f"{key}={path}: the folder holds no data file{of}. Allowed: {ALLOWED}.")
    others += [f"{name} (not of the split {split or 'train'})" for name in files if name not in chosen]
    return [file for name, file in files.items() if name in chosen], sorted(others)


def _of_split(files: list[str], what: str, split: str | None) -> set[str]:
    """The shards of a split: a folder of that name, names that begin with it, or what the hub's loader takes for it.

    Raises DataError where there are splits and null could mean any.
    """
    splits = splits_of(files)
    if split is None:
        if splits and "train" not in splits:
            names = ", ".join(splits)
            raise DataError(f"{what}: has the splits {names} and no train: choose data.split={[*splits][0]}.")
        return set(splits.get("train", files))
    begins = re.compile(re.escape(split) + r"([-_.]|$)")
    exact = {name for name in files if split in Path(name).parts[:-1] or begins.match(Path(name).name)}
    return exact or set(splits.get(named(split), ()))


def _hidden(inside: Path) -> bool:
    return any(part.startswith((".", "_")) for part in inside.parts)


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


def _kind(file: Path) -> tuple[str | None, str | None]:
    """Kind and compression of a file by its endings; of x.zip by those of the file in it. Raises DataError."""
    kind, compression = _named_kind(file.name)
    if kind is None and compression == ".zip":
        kind = _named_kind(_zipped(file)[0])[0]
    return kind, compression


def _named_kind(name: str) -> tuple[str | None, str | None]:
    ending = Path(name).suffix.lower()
    compression = ending if ending in COMPRESSIONS else None
    stem = name[: -len(ending)] if compression else name
    return KINDS.get(Path(stem).suffix.lower()), compression
