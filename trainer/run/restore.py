"""What a run starts from once it is built: everything of its checkpoint, or a manifest of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainer.config.saved import Run
from trainer.data.tokens.counts import asked_as
from trainer.device.find import hardware
from trainer.run.beginning import Beginning, marks_of, take_folder
from trainer.run.build import Ready
from trainer.run.prepare import Prepared
from trainer.tracking.run_folder import RunFolder, git_commit, versions
from trainer.training.checkpoint import load_checkpoint
from trainer.training.state import rng_state
from trainer.training.weights import trainable_hash

if TYPE_CHECKING:
    from trainer.config.schema import Config


def restore(run: Run, beginning: Beginning, folder: RunFolder, ready: Ready) -> dict[str, torch.Tensor]:
    """Puts everything of the checkpoint back, or writes a fresh run's manifest; returns the generators' states."""
    prepared = ready.prepared
    if beginning.checkpoint is None:
        folder.write("manifest.json", _manifest(run.config, ready, beginning.run_id))
        return rng_state(prepared.device)
    rng = load_checkpoint(beginning.checkpoint, ready.adapted, ready.loop.optimizer, prepared.device, beginning.changed)
    take_folder(run, folder)  # not before: a run that cannot go on leaves it as it was
    if beginning.manifest is not None and beginning.forced:
        folder.write("manifest.json", {**beginning.manifest, **_data(prepared)})  # what it goes on with
    return rng


def _manifest(config: Config, ready: Ready, run_id: str) -> dict[str, Any]:
    """What the run is made from."""
    prepared = ready.prepared
    return {
        "run_id": run_id,
        "versions": versions(),
        "git_commit": git_commit(),
        "model": config.model.path,
        "model_revision": getattr(prepared.config, "_commit_hash", None) or config.model.revision,
        "weights": config.model.weights.value,
        **_data(prepared),
        "seed": config.seed,
        "fresh_adapter_hash": trainable_hash(ready.adapted),
        "hardware": hardware(prepared.device),
    }


def _data(prepared: Prepared) -> dict[str, Any]:
    """What the manifest knows the data by, for a run that goes on with other data is refused, and how such rows ask."""
    files = {name: mark.to_json() for name, mark in marks_of(prepared.train_set).items()}
    return {
        "data_hash": prepared.train_set.content_hash(),
        "data_files": files,
        "today": prepared.today,
        "asked_as": asked_as(prepared.counts),
    }
