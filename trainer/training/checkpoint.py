"""Checkpoints: written whole or not at all, verified by hash, rotated without losing the best or the last.

A checkpoint is written into a hidden folder, flushed whole, and renamed; its manifest.json, written last, holds a
sha256 of every other file. A folder without a complete manifest does not exist as far as loading goes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainer.atomic import replace_folder, write_atomically
from trainer.errors import StorageError
from trainer.training.optimizer_state import load_optimizer, save_optimizer
from trainer.training.state import State, set_rng_state
from trainer.training.weights import load_trainable, save_trainable

MANIFEST, STATE, RNG = "manifest.json", "state.json", "rng.safetensors"


class Checkpoints:
    """The folder `checkpoints/` of a run."""

    def __init__(self, folder: Path, keep: int, run_id: str | None = None):
        """`run_id`: of the run whose they are; None: not known, so none is foreign."""
        self.folder, self.keep, self.run_id = folder, keep, run_id

    def save(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: State, rng: dict[str, torch.Tensor]
    ) -> Path:
        """Writes step-XXXXXXXX, then the names `last` and `best`, then removes what rotation no longer keeps."""
        with self._replacing(state) as building:
            building.mkdir(parents=True)
            save_trainable(model, building)
            save_optimizer(optimizer, building)
            save_file(rng, building / RNG)
            (building / STATE).write_text(json.dumps(state.to_json(), indent=1))
            seal(building, {"step": state.step, "run_id": self.run_id})
        self._rotate()
        return self.path(state.step)

    def amend(self, state: State) -> None:
        """Puts into this step's checkpoint what was learnt since it was saved: its other files are linked, not
        written again."""
        with self._replacing(state) as building:
            shutil.copytree(self.path(state.step), building, copy_function=_link)
            manifest = json.loads((building / MANIFEST).read_text())
            write_atomically(building / STATE, json.dumps(state.to_json(), indent=1))  # a new file, not the linked one
            manifest["files"][STATE] = _sha256(building / STATE)
            write_atomically(building / MANIFEST, json.dumps(manifest, indent=1))

    @contextmanager
    def _replacing(self, state: State) -> Iterator[Path]:
        """A hidden folder to fill, which then becomes the checkpoint of this step, and `last`, and `best` if it is."""
        target = self.path(state.step)
        building = self.folder / f".building-{target.name}"
        try:
            self._remove_leftovers()
            yield building
            replace_folder(building, target)
            write_atomically(self.folder / "last", target.name + "\n")
            if state.best_step == state.step:
                write_atomically(self.folder / "best", target.name + "\n")
        except (OSError, SafetensorError) as error:  # safetensors has its own error, also for a full disk
            shutil.rmtree(building, ignore_errors=True)
            raise StorageError(_save_failed(target, error, self.names())) from error

    def path(self, step: int) -> Path:
        return self.folder / _name(step)

    def names(self) -> list[str]:
        """Names of the checkpoints there, oldest first, complete or not."""
        if not self.folder.is_dir():
            return []
        return sorted(entry.name for entry in self.folder.iterdir() if entry.name.startswith("step-"))

    def newest(self, say: Callable[[str], None], last: int | None = None) -> Path | None:
        """The newest checkpoint of this run whose every byte is as written, of step `last` or before; what is damaged,
        foreign or misnamed is said and passed over."""
        self._put_back()
        for name in reversed(self.names()):
            if last is not None and name > _name(last):
                continue
            problem = damage(self.folder / name) or self._foreign(self.folder / name)
            if problem is None:
                return self.folder / name
            say(f"checkpoint {name} is not used: {problem}")
        return None

    def _foreign(self, folder: Path) -> str | None:
        """Why a whole checkpoint is not this run's at the step that its name says, or None. One that an earlier version
        wrote carries no run id: it is taken for this run's."""
        facts = json.loads((folder / MANIFEST).read_text())
        if folder.name != _name(facts.get("step")):
            return f"it was saved as step {facts.get('step')}"
        if self.run_id is not None and facts.get("run_id", self.run_id) != self.run_id:
            return f"it is of another run ({facts['run_id']}, this one is {self.run_id})"
        return None

    def _put_back(self) -> None:
        """A kill between the two renames of a replacement leaves the old folder under its hidden name."""
        for old in self.folder.glob(".old-step-*"):
            target = self.folder / old.name.removeprefix(".old-")
            if not target.exists() and damage(old) is None:
                with suppress(OSError):
                    old.rename(target)

    def _remove_leftovers(self) -> None:
        """What a killed save left half-done, whatever its step was."""
        self._put_back()
        for left in [*self.folder.glob(".building-step-*"), *self.folder.glob(".old-step-*")]:
            shutil.rmtree(left, ignore_errors=True)

    def _rotate(self) -> None:
        kept = {self.pointer("best"), self.pointer("last"), *self.names()[-self.keep :]}
        for name in self.names():
            if name not in kept:
                # The manifest goes first: a half-removed checkpoint must not look complete.
                (self.folder / name / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def pointer(self, name: str) -> str | None:
        """The checkpoint that `best` or `last` names."""
        with suppress(OSError):
            return (self.folder / name).read_text().strip()
        return None


def load_state(folder: Path) -> State:
    """Position and tallies only, before any weight is read. Raises StorageError."""
    with _readable(folder):
        state = State.from_json(json.loads((folder / STATE).read_text()))
        if folder.name != _name(state.step):
            raise ValueError(f"{STATE} is of step {state.step}")
        return state


def load_checkpoint(
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    changed: Sequence[str] = (),
) -> dict[str, torch.Tensor]:
    """Puts weights, optimizer state and generators back; returns the generators' states. Raises StorageError.

    `changed`: settings, in words, that are others than those the checkpoint was made with.
    """
    with _readable(folder, changed):
        load_trainable(model, folder)
        load_optimizer(optimizer, folder)
        rng = load_file(folder / RNG)
        set_rng_state(rng, device)
    return rng


@contextmanager
def _readable(folder: Path, changed: Sequence[str] = ()) -> Iterator[None]:
    """A checkpoint whose hashes fit but whose content is not this run's was made with other settings, or by something
    else."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        text = f"checkpoint {folder.name} in {folder.parent} cannot be loaded into this run"
        if changed:
            raise StorageError(
                f"{text}, which was made with other settings:\n"
                + "\n".join(f"  {line}" for line in changed)
                + "\nWhat is trained has another shape. Go on with the settings there, or choose another output_dir."
            ) from error
        raise StorageError(
            f"{text}: {' '.join(str(error).split())[:300]}. Its files are as its manifest says, so something else "
            "wrote them. Remove the folder to go on from the checkpoint before it."
        ) from error


def seal(folder: Path, facts: dict) -> None:
    """Writes the manifest of a folder that is otherwise finished."""
    files = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            files[str(file.relative_to(folder))] = _sha256(file)
    write_atomically(folder / MANIFEST, json.dumps({**facts, "files": files}, indent=1))


def damage(folder: Path) -> str | None:
    """Why a sealed folder cannot be trusted, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is missing or incomplete"
    for name, digest in files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if _sha256(file) != digest:
            return f"{name} is not as it was written"
    if STATE not in files:
        return f"{STATE} is missing"
    return None


def _name(step: object) -> str:
    return f"step-{str(step):0>8}"


def _link(source: str, target: str) -> None:
    """One file under two names, or where the disk has no such thing a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _save_failed(target: Path, error: Exception, kept: list[str]) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    with suppress(OSError):
        free = shutil.disk_usage(target.parent).free / 2**20
        reason += f" ({free:.0f} MiB free)"
    kept_text = f"The newest checkpoint kept is {kept[-1]}." if kept else "There is no earlier checkpoint."
    return (
        f"checkpoint {target.name} could not be written to {target.parent}: {reason}. {kept_text} "
        "Free some space and start the same command again."
    )
