"""A model's folder, looked into before anything of it is loaded: foreign files name paths, and some hold code."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.errors import ModelError

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
WEIGHTS = ".safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def check_folder(folder: Path, asked: str) -> None:
    """Raises ModelError where the folder holds no model whose weights can be loaded; reads no weight.

    `asked` is how the user named it: model.path=...
    """
    if not folder.is_dir():
        raise ModelError(f"{asked}: there is no such folder.")
    _check_links(folder, asked)
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{asked}: the folder holds no {CONFIG}, so it is no model.")
    if not any(folder.glob("*" + WEIGHTS)) and not (folder / INDEX).is_file():
        pickled = any(file.suffix in PICKLED for file in folder.iterdir())
        why = "only pickled weights, which can run code and are not loaded" if pickled else "no weights"
        raise ModelError(f"{asked}: the folder holds {why}. It needs *{WEIGHTS} files.")
    names = weight_files(folder, asked)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{asked}: {len(missing)} of {len(names)} weight files are missing: {', '.join(missing[:3])}. The folder "
            "is incomplete: download or copy it again."
        )
    for name in names:
        _check_whole(folder / name, asked)


def weight_files(folder: Path, asked: str) -> list[str]:
    """Names of the weight files, relative to the folder. Raises ModelError for an index that leads out of it."""
    if not (folder / INDEX).is_file():
        return [SINGLE]
    weights = read_json(folder / INDEX, asked).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise ModelError(f"{asked}: {INDEX} has no weight_map that names a file for each weight.")
    names = sorted(set(weights.values()))
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or path.suffix != WEIGHTS:
            raise ModelError(
                f"{asked}: {INDEX} names the file {name!r}. Only *{WEIGHTS} files inside the folder are read; do not "
                "trust this model."
            )
    return names


def _check_links(folder: Path, asked: str) -> None:
    """Raises ModelError for links out of the folder: what they lead to would be read, and some of it passed on.

    The hub's cache links each file of a snapshot to a blob of the same model.
    """
    root = folder.resolve()
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    for file in folder.rglob("*"):
        if not file.is_symlink():
            continue
        target = file.resolve()
        if not target.is_relative_to(root) and (blobs is None or not target.is_relative_to(blobs)):
            raise ModelError(
                f"{asked}: {file.relative_to(folder)} is a link out of the folder, to {target}. Only files inside it "
                "are read. If you trust it, put the file itself there."
            )


def own_code(folder: Path, asked: str) -> list[str]:
    """Files that ask for the model's own Python code to be run (auto_map)."""
    names = (CONFIG, "tokenizer_config.json")
    return [n for n in names if (folder / n).is_file() and "auto_map" in read_json(folder / n, asked)]


def read_json(file: Path, asked: str) -> dict[str, Any]:
    """A JSON object. Raises ModelError with the line."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ModelError(f"{asked}: {file.name}:{error.lineno}: not JSON: {error.msg}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{asked}: {file.name} cannot be read: {error}.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{asked}: {file.name} holds no JSON object.")
    return value


def _check_whole(file: Path, asked: str) -> None:
    """Raises ModelError for a safetensors file that was cut off: its header says how long it must be."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        try:
            header = json.loads(handle.read(length)) if 0 < length <= size - 8 else None
            ends = [entry["data_offsets"][1] for name, entry in (header or {}).items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            header = None
    if header is None or 8 + length + max(ends, default=0) != size:
        raise ModelError(
            f"{asked}: {file.name} is damaged or cut off ({size:,} bytes are not what its header says). Download or "
            "copy it again."
        )
