"""The run folder: who may use it, what it holds, and the two files that identify a run."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import secrets
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trainer.atomic import write_atomically
from trainer.errors import StorageError
from trainer.redact import redacted

BEGUN = (".lock", "train.log", "overrides.yaml", ".overrides.yaml.building", ".config.yaml.building")
"""What a run may have written when it is killed before its config.yaml, which says that a run is here."""
DATA_REPORT = "data_report.json"
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "hydra-core", "wandb")


class RunFolder:
    """A folder that this process, and no other, writes a run into."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = None

    def open(self) -> None:
        """Makes the folder and takes its lock. Raises StorageError where it cannot, or where another run is at work."""
        self.check()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / "config.yaml").is_file():
                self.path.chmod(0o700)  # rows and answers are in it; a run that goes on keeps what it was given since
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise StorageError(f"output_dir={self.path}: cannot be written: {error.strerror}.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise StorageError(
                f"output_dir={self.path}: another process is running in this folder. Choose another output_dir."
            ) from None
        # A helper that outlives a killed trainer for a moment must not hold the lock: closing a copy does not unlock.
        os.register_at_fork(after_in_child=self.close)

    def check(self) -> None:
        """Raises StorageError where the folder is not for this."""
        check_usable(self.path)

    def __enter__(self) -> RunFolder:
        self.open()
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove_if_unused(self) -> None:
        """Removes the folder if it holds nothing but this process's lock."""
        if self._lock is None:
            return
        with suppress(OSError):
            if [entry.name for entry in self.path.iterdir()] == [".lock"]:
                (self.path / ".lock").unlink()
                self.path.rmdir()

    def file(self, name: str) -> Path:
        return self.path / name

    def write(self, name: str, content: dict[str, Any]) -> None:
        """A JSON file without secrets, whole or not at all."""
        write_atomically(self.file(name), redacted(json.dumps(content, indent=1, ensure_ascii=False)))

    def summary(self) -> dict[str, Any] | None:
        """summary.json of a run that ended, or None. Raises StorageError."""
        return self._read("summary.json", {"status": str})

    def manifest(self) -> dict[str, Any] | None:
        """manifest.json, or None. Raises StorageError."""
        return self._read("manifest.json", {"run_id": str, "data_hash": str})

    def _read(self, name: str, needed: dict[str, type]) -> dict[str, Any] | None:
        try:
            content = json.loads(self.file(name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StorageError(f"{self.file(name)}: cannot be read: {error}. Remove it to go on without.") from None
        if not isinstance(content, dict) or not all(isinstance(content.get(k), t) for k, t in needed.items()):
            raise StorageError(
                f"{self.file(name)}: is not what a run wrote there ({', '.join(needed)} are missing or of another "
                "type). Remove it to go on without."
            )
        return content


def check_usable(path: Path) -> None:
    """Raises StorageError for a folder that holds something other than a run, or that cannot be written."""
    check_writable(path)
    if path.is_dir():
        begun = BEGUN if (path / ".lock").is_file() else ("train.log",)
        others = [entry.name for entry in path.iterdir() if entry.name not in begun]
        if others and not (path / "config.yaml").is_file():
            raise StorageError(
                f"output_dir={path}: the folder holds other things ({', '.join(sorted(others)[:3])}) and no run. "
                "Choose a new or empty folder."
            )


def check_writable(path: Path) -> None:
    """Raises StorageError where no such folder can be, or be written in."""
    nearest = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
    if not nearest.is_dir():
        raise StorageError(f"output_dir={path}: {nearest} is a file, not a folder.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise StorageError(f"output_dir={path}: no permission to write in {nearest}.")


def new_run_id() -> str:
    """Eight characters that name the run here and at the tracking service, the same after every resume."""
    return secrets.token_hex(4)


def versions() -> dict[str, str]:
    """Versions of Python and the libraries that decide the numbers."""
    found = {"python": platform.python_version()}
    for name in ("trainer", *LIBRARIES):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def git_commit() -> str | None:
    """Commit of the folder the command was given in, if it is a git checkout."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5)
        if done.returncode == 0:
            return done.stdout.strip()
    return None
