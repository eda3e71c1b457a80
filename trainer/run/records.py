"""What a run writes about itself: manifest.json at its beginning, summary.json at its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from trainer.data.sources.file_marks import FileMark
from trainer.data.tokens.row_stream import RowStream
from trainer.data.tokens.tokenize import Tokens
from trainer.device.find import hardware
from trainer.device.measure import rss_peak
from trainer.run.session import Ready
from trainer.tracking.run_folder import git_commit, versions
from trainer.training.weights import trainable_hash
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.config.schema import Config
    from trainer.run.train import TrainingRun


def manifest(config: Config, ready: Ready, run_id: str) -> dict[str, Any]:
    """What the run was made from."""
    prepared = ready.prepared
    return {
        "run_id": run_id,
        "versions": versions(),
        "git_commit": git_commit(),
        "model": config.model.path,
        "model_revision": getattr(prepared.config, "_commit_hash", None) or config.model.revision,
        "weights": config.model.weights.value,
        **data_of(prepared.train_set),
        "seed": config.seed,
        "fresh_adapter_hash": trainable_hash(ready.adapted),
        "hardware": hardware(prepared.device),
    }


def data_of(train_set: Tokens | RowStream) -> dict[str, Any]:
    """What the manifest knows the data by: a run that goes on with other data is refused."""
    files = {name: mark.to_json() for name, mark in marks_of(train_set).items()}
    return {"data_hash": train_set.content_hash(), "data_files": files}


def marks_of(train_set: Tokens | RowStream) -> dict[str, FileMark]:
    """Of the files of a stream; what is read whole is known by its tokens."""
    return train_set.marks if isinstance(train_set, RowStream) else {}


def summary_of(training: TrainingRun, status: str) -> dict[str, Any]:
    """What came out so far."""
    state, ready, memory = training.state, training.ready, training.memory
    return {
        "status": status,
        "steps": state.step,
        "num_tokens": state.num_tokens,
        "num_targets": state.num_targets,
        "skipped_steps": state.skipped_steps,
        "final_loss": state.last_loss,
        "first_eval_loss": state.first_eval_loss,
        "eval_loss": state.eval_loss,
        "best_eval_loss": state.best_eval_loss,
        "best_step": state.best_step,
        "tokens_per_second": state.num_tokens / state.seconds if state.seconds else None,
        "peak_memory_gib": training.peak_memory / GIB,
        "predicted_peak_memory_gib": ready.prepared.plan.prediction.peak / GIB if ready else None,
        "memory_baseline_gib": memory.baseline / GIB if memory else None,
        "memory_stages_gib": {n: s.as_gib() for n, s in memory.stages.items()} if memory else None,
        "rss_peak_gib": rss_peak() / GIB,
        "trainable_parameters": ready.trainable_parameters if ready else None,
        "total_parameters": ready.total_parameters if ready else None,
        "wall_seconds": time.perf_counter() - training.started,
        "compiled_graphs": training.graphs,
        "stages": training.stages.seconds,
        "seconds_to_first_step": sum(training.start_up.values()) if training.start_up else None,
        "stages_to_first_step": training.start_up,
        "adapter": None,
    }
