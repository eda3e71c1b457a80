"""What a run must remember to go on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import torch

if TYPE_CHECKING:
    from trainer.data.batches.batch import MicroBatch


@dataclass
class Window:
    """Sums since the last row of metrics."""

    loss_sum: torch.Tensor | float = 0.0
    """fp32, on the device; read only when a row is written or a checkpoint saved"""
    num_targets: int = 0
    num_tokens: int = 0
    flops: float = 0.0
    """useful ones"""
    seconds: float = 0.0
    step_flops: float = 0.0
    """all of them, recomputation too"""


@dataclass
class State:
    """Position and tallies of a run after `step` optimizer steps; goes to state.json."""

    step: int = 0
    num_tokens: int = 0
    """real tokens so far"""
    num_targets: int = 0
    seconds: float = 0.0
    """wall time of optimizer steps so far"""
    peak_memory: int = 0
    """highest allocated bytes so far"""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    loss_scale: float = 65536.0
    """of the next step, where fp16 needs one"""
    scaled_steps: int = 0
    """finite ones since it changed"""
    outlier_steps: int = 0
    """skipped because their gradient norm was one"""
    grad_norms: list = field(default_factory=list)
    """of the last steps, floats, where outliers are looked for"""
    window: Window = field(default_factory=Window)
    logged_step: int = 0
    evaluated_step: int | None = None
    first_eval_loss: float | None = None
    eval_loss: float | None = None
    best_eval_loss: float | None = None
    """lowest after at least one step"""
    best_step: int | None = None
    last_loss: float | None = None
    stopping_best: float | None = None
    """lowest value of early stopping's metric"""
    stale_evaluations: int = 0
    """evaluations since then"""
    stopped: bool = False
    """before the last step"""

    def count(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_sum: torch.Tensor,
        flops: float,
        step_flops: float,
        seconds: float,
    ) -> None:
        """Adds what a step had to the run's sums and to the window's."""
        num_tokens = sum(batch.num_tokens for batch in micro_batches)
        num_targets = sum(batch.num_targets for batch in micro_batches)
        window = self.window
        self.num_tokens += num_tokens
        window.num_tokens += num_tokens
        self.num_targets += num_targets
        window.num_targets += num_targets
        self.seconds += seconds
        window.seconds += seconds
        window.loss_sum = window.loss_sum + loss_sum
        window.flops += flops
        window.step_flops += step_flops

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["window"]["loss_sum"] = float(self.window.loss_sum)
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> State:
        """Raises KeyError, TypeError or ValueError where the values are not those of a state."""
        return _typed(cls, {**values, "window": _typed(Window, values["window"])})


T = TypeVar("T")


def _typed(cls: type[T], values: dict[str, Any]) -> T:
    """A dataclass of values that come from a file."""
    made, types = cls(**values), get_type_hints(cls)
    wrong = [f"{name}={value!r}" for name, value in vars(made).items() if not isinstance(value, types[name])]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} cannot be")
    return made


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Torch's generators that dropout draws from; data order needs none, it is a function of (seed, epoch)."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Puts generators back to what rng_state returned."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
