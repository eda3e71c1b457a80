"""What to do in a folder that already holds a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.saved import Run, differences, load_run
from trainer.data.sources.file_marks import FileMark, changes
from trainer.errors import StorageError
from trainer.tracking.run_folder import RunFolder
from trainer.training.checkpoint import Checkpoints
from trainer.training.train_settings import Resume

FREE_KEYS = ("recipe", "output_dir", "debug", "track", "train.resume", "train.log_every", "train.save_every")
FREE_KEYS += ("train.keep_checkpoints", "train.compare_prompts", "data.cache_dir", "data.workers")
FREE_KEYS += ("model.trust_remote_code", "model.quantized_cache", "memory.probe", "memory.snapshot", "memory.stats")
"""Settings that may differ between a run and its continuation: none of them changes a weight."""


@dataclass(frozen=True)
class Beginning:
    """How a run starts: fresh, from a checkpoint, or not at all because it is finished."""

    checkpoint: Path | None = None
    run_id: str | None = None
    """of the run that is continued"""
    finished: dict[str, Any] | None = None
    """summary of a completed run"""
    changed: tuple[str, ...] = ()
    """settings that it was forced to go on with"""


def decide(run: Run, folder: RunFolder, checkpoints: Checkpoints, say: Callable[[str], None]) -> Beginning:
    """Looks into the folder. Raises StorageError where it holds another run, or where resuming is not wanted."""
    saved = load_run(folder.path)
    if saved is None:
        return Beginning()
    resume = run.config.train.resume
    if resume is Resume.never:
        raise StorageError(
            f"output_dir={folder.path}: holds a run already, and train.resume=never. Choose another folder."
        )
    changed = differences(saved, run, FREE_KEYS)
    told = tuple(f"{key}: {old} there, {new} here" for key, old, new in changed)
    if changed and resume is not Resume.force:
        raise StorageError(
            f"output_dir={folder.path}: holds another run. Different here:\n"
            + "\n".join(f"  {line}" for line in told)
            + "\nChoose another output_dir, or continue that run with these settings: train.resume=force."
        )
    summary, manifest = folder.summary(), folder.manifest()
    if summary is not None and summary["status"] == "completed" and not changed:
        return Beginning(finished=summary)
    run_id = manifest["run_id"] if manifest else None
    return Beginning(checkpoint=checkpoints.newest(say), run_id=run_id, changed=told)


def check_same_data(
    folder: RunFolder, beginning: Beginning, data_hash: str, marks: dict[str, FileMark], resume: Resume
) -> None:
    """Raises StorageError where a run would go on with other data than it started with.

    `marks`: of the files of streamed data, which are not read whole to compare them.
    """
    manifest = folder.manifest()
    if beginning.checkpoint is None or manifest is None or resume is Resume.force or manifest["data_hash"] == data_hash:
        return
    then = {name: FileMark(**mark) for name, mark in manifest.get("data_files", {}).items()}
    changed = "; ".join(changes(then, marks)) or "its samples would come in another order"
    text = (
        f"output_dir={folder.path}: the training data has changed since the run began: {changed}. Put the data back "
        "or choose another output_dir; train.resume=force goes on with it."
    )
    if marks:
        text += (
            " Streamed files are known by size, time of modification and both ends, not read whole: where a touch or "
            "a copy changed the time alone, the samples are the same, and force is right."
        )
    raise StorageError(text)
