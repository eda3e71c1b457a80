"""The section `train`: the loop, and when it looks up from its work."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainer.data.batches.batching import Batching


class Resume(Enum):
    auto = "auto"
    never = "never"
    force = "force"


@dataclass
class Train(Batching):
    """The loop."""

    max_grad_norm: float | None
    """gradients are scaled down to this total norm; null: never"""
    log_every: int
    """steps between rows of metrics; the device is read only then"""
    eval_every: int
    """steps between evaluations; 0: only before the first and after the last step"""
    save_every: int
    """steps between checkpoints; 0: only at the end and when interrupted"""
    keep_checkpoints: int
    """newest checkpoints kept; the best and the last one are always kept"""
    resume: Resume
    """what to do in a folder that holds a run: auto continues it if the configuration is the same, force
    also if it is not, never refuses"""
    deterministic: bool
    """kernels that add in one order on a GPU too, so that a run and its resume are bit for bit the same there; slower,
    and an operation without such a kernel ends the run (on a CPU it is so without)"""
    compare_prompts: int
    """held-out prompts answered by base and by adapter at the end of the run"""
