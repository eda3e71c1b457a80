"""The section `train`: the loop, and when it looks up from its work."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from trainer.data.batches.batching import Batching
from trainer.ranges import AT_LEAST_1, NOT_NEGATIVE, POSITIVE

ANSWER_TOKENS = 64
"""Of an answer to a held-out prompt, at most."""


class Resume(Enum):
    auto = "auto"
    never = "never"
    force = "force"


@dataclass
class Train(Batching):
    """The loop."""

    max_grad_norm: Annotated[float | None, POSITIVE]
    """gradients are scaled down to this total norm; null: never"""
    log_every: Annotated[int, AT_LEAST_1]
    """steps between rows of metrics; the device is read only then"""
    eval_every: Annotated[int, NOT_NEGATIVE]
    """steps between evaluations; 0: only before the first and after the last step"""
    save_every: Annotated[int, NOT_NEGATIVE]
    """steps between checkpoints; 0: only at the end and when interrupted"""
    keep_checkpoints: Annotated[int, AT_LEAST_1]
    """newest checkpoints kept; the best and the last one are always kept"""
    resume: Resume
    """what to do in a folder that holds a run: auto continues it if the configuration is the same, force
    also if it is not, never refuses"""
    deterministic: bool
    """kernels that add in one order on a GPU too, so that a run and its resume are bit for bit the same there; slower,
    and an operation without such a kernel ends the run (on a CPU it is so without)"""
    compare_prompts: Annotated[int, NOT_NEGATIVE]
    """held-out prompts answered by base and by adapter at the end of the run"""

    samples: list[str]
    """prompts answered at each evaluation, on the screen and in metrics.jsonl; track.log_samples sends them too"""
    model_card: bool
    """whether the result gets a README.md: base, data, settings and figures"""
    report: bool
    """whether report.html is written at the end of the run: about half a second"""

    def problems(self, config):
        data, problems = config.data, []
        if not data.streaming:
            return problems
        if self.max_steps is None:
            problems.append(
                "data.streaming=true needs train.max_steps: how many steps an epoch has is not known before it is read"
            )
        if data.eval_path is None and data.eval_fraction > 0:
            problems.append(
                f"data.streaming=true cannot hold out data.eval_fraction={data.eval_fraction} of what it has not "
                "read: give data.eval_path, or set data.eval_fraction=0"
            )
        return problems
