"""How a run begins in its folder: what it does where one is already, and what it puts there or takes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.saved import Run, differences, load_run, save_run
from trainer.data.sources.file_marks import FileMark, changes
from trainer.data.tokens.row_stream import RowStream
from trainer.data.tokens.tokenize import Tokens
from trainer.errors import StorageError
from trainer.tracking.run_folder import RunFolder, new_run_id
from trainer.training.checkpoint import Checkpoints, load_state
from trainer.training.state import State
from trainer.training.train_settings import Resume

if TYPE_CHECKING:
    from trainer.data.data_settings import Data

FREE_KEYS = ("recipe", "output_dir", "debug", "track", "train.resume", "train.log_every", "train.save_every")
FREE_KEYS += ("train.keep_checkpoints", "train.compare_prompts", "data.cache_dir", "data.workers")
FREE_KEYS += ("train.report", "train.samples", "train.model_card")
FREE_KEYS += ("model.trust_remote_code", "model.quantized_cache")
FREE_KEYS += ("search", "memory.over_budget", "memory.probe", "memory.on_oom", "memory.snapshot", "memory.stats")
"""Settings that may differ between a run and its continuation: none of them changes a weight."""


@dataclass(frozen=True)
class Beginning:
    """How a run starts: fresh, from a checkpoint, or not at all because it is finished."""

    run_dir: Path
    run_id: str = field(default_factory=new_run_id)
    state: State = field(default_factory=State)
    """where it starts from; it becomes the run's"""
    checkpoint: Path | None = None
    manifest: dict[str, Any] | None = None
    """of the run that is continued"""
    finished: dict[str, Any] | None = None
    """summary of a completed run"""
    changed: tuple[str, ...] = ()
    """settings that it was forced to go on with"""
    forced: bool = False

    def day(self, data: Data) -> str:
        """What chat templates are told: a run keeps the day on which it began."""
        known = None if self.manifest is None else self.manifest.get("today")
        return data.today or known or date.today().isoformat()

    def check_not_past(self, num_steps: int) -> None:
        """Raises StorageError where the run has done more steps than it shall have now."""
        if self.state.step > num_steps:
            raise StorageError(
                f"output_dir={self.run_dir}: the run is at step {self.state.step} already, past the {num_steps} that "
                "train.max_steps or train.epochs ask for. Give it more; or take its result as it is: "
                f"train.max_steps={self.state.step} train.resume=force."
            )

    def check_same_data(self, train_set: Tokens | RowStream) -> None:
        """Raises StorageError where a run would go on with other data than it started with."""
        known = self.manifest
        if self.checkpoint is None or known is None or self.forced or known["data_hash"] == train_set.content_hash():
            return
        try:
            then = {name: FileMark(**mark) for name, mark in known.get("data_files", {}).items()}
        except TypeError:
            then = {}
        marks = marks_of(train_set)
        changed = "; ".join(changes(then, marks)) or "its samples would come in another order"
        text = (
            f"output_dir={self.run_dir}: the training data has changed since the run began: {changed}. Put the data "
            "back or choose another output_dir; train.resume=force goes on with it."
        )
        if marks:
            text += (
                " Streamed files are known by size, time of modification and both ends, not read whole: where a touch "
                "or a copy changed the time alone, the samples are the same, and force is right."
            )
        raise StorageError(text)


def decide(run: Run, folder: RunFolder, say: Callable[[str], None]) -> Beginning:
    """Looks into the folder. Raises StorageError where it holds another run, or where resuming is not wanted."""
    saved = load_run(folder.path)
    if saved is None:
        return Beginning(folder.path)
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
        return Beginning(folder.path, finished=summary)
    known_id = manifest["run_id"] if manifest else None
    checkpoint = Checkpoints(folder.file("checkpoints"), run.config.train.keep_checkpoints, known_id).newest(say)
    return Beginning(
        folder.path,
        run_id=known_id or new_run_id(),
        state=State() if checkpoint is None else load_state(checkpoint),
        checkpoint=checkpoint,
        manifest=manifest,
        changed=told,
        forced=resume is Resume.force,
    )


def stays(row: dict[str, Any], state: State) -> bool:
    """Whether a row of metrics is of a step that a run which goes on from `state` does not make again."""
    evaluated = -1 if state.evaluated_step is None else state.evaluated_step
    known = {"train": state.logged_step, "eval": evaluated, "samples": evaluated}
    event = row.get("event")
    return event in ("resumed", "retreat") or row.get("step", 0) <= known.get(event, state.step)


def take_folder(run: Run, folder: RunFolder) -> None:
    """The folder is this run's from here on."""
    folder.file("summary.json").unlink(missing_ok=True)
    save_run(run, folder.path)


def marks_of(train_set: Tokens | RowStream) -> dict[str, FileMark]:
    """Of the files of a stream; what is read whole is known by its tokens."""
    return train_set.marks if isinstance(train_set, RowStream) else {}
