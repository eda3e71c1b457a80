"""The section `train`: the loop, and when it looks up from its work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated

from trainer.data.batches.batching import Batching
from trainer.errors import ModelError
from trainer.model.roles import is_table, set_decays, set_rate_ratio
from trainer.ranges import AT_LEAST_1, BELOW_1, NOT_NEGATIVE, POSITIVE

if TYPE_CHECKING:
    import torch

ANSWER_TOKENS = 64
"""Of an answer to a held-out prompt, at most."""


class Resume(Enum):
    auto = "auto"
    never = "never"
    force = "force"


class Decayed(Enum):
    matrices = "matrices"
    hidden = "hidden"
    all = "all"


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
    label_smoothing: Annotated[float, BELOW_1]
    """share of a target's probability that goes to the whole vocabulary in equal parts, in training only"""
    neftune_alpha: Annotated[float, NOT_NEGATIVE]
    """noise on embeddings in training (NEFTune): at most this over the root of tokens times hidden size"""
    skip_outliers: Annotated[float | None, POSITIVE]
    """a step whose gradient norm is so many standard deviations above the mean of the last 128 changes nothing and is
    counted; null: never"""
    early_stopping_patience: Annotated[int | None, AT_LEAST_1]
    """evaluations in a row without a new lowest value after which the run ends; null: it never ends early"""
    early_stopping_metric: str
    """the value: eval_loss, or eval_loss/NAME of a source of data.sources"""
    embedding_learning_rate: Annotated[float | None, POSITIVE]
    """of embeddings and output head, where they train, at the schedule's peak; null: optim.learning_rate"""
    weight_decay_on: Decayed
    """what optim.weight_decay shrinks: matrices (no norms, no biases), hidden (matrices but for embeddings and head),
    or all"""
    report: bool
    """whether report.html is written at the end of the run: about half a second"""

    def problems(self, config):
        data, problems = config.data, self._early_problems(config.data)
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

    def _early_problems(self, data):
        if self.early_stopping_patience is None:
            return []
        problems = []
        if data.eval_path is None and data.eval_fraction == 0:
            problems.append(
                "train.early_stopping_patience: needs held-out data: set data.eval_fraction or data.eval_path"
            )
        if self.eval_every == 0:
            problems.append("train.early_stopping_patience: needs evaluations in between: set train.eval_every")
        if not self.early_stopping_metric.startswith("eval_loss"):
            problems.append(
                f"train.early_stopping_metric={self.early_stopping_metric}: must be eval_loss, or eval_loss/NAME of a "
                "source"
            )
        return problems

    def group(self, parameters: Iterable[torch.nn.Parameter], learning_rate: float) -> None:
        """Says of each parameter whether it decays and how fast it learns. Raises ModelError where no embedding that
        is to learn at its own rate trains."""
        parameters = list(parameters)
        tables = [p for p in parameters if is_table(p)]
        if self.embedding_learning_rate is not None:
            if not tables:
                raise ModelError(
                    f"train.embedding_learning_rate={self.embedding_learning_rate:g}: neither embeddings nor head "
                    "train here. Name them in adapter.modules_to_save, or use adapter=none."
                )
            for parameter in tables:
                set_rate_ratio(parameter, self.embedding_learning_rate / learning_rate)
        for parameter in parameters:
            if self.weight_decay_on is Decayed.all or (self.weight_decay_on is Decayed.hidden and is_table(parameter)):
                set_decays(parameter, self.weight_decay_on is Decayed.all)
