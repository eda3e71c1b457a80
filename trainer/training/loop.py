"""The training loop. Read it from top to bottom; everything else in this package prepares or watches it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer.data.batches.loader import TrainingSteps
from trainer.device.measure import Memory
from trainer.errors import NonFiniteError
from trainer.model.precision import Dtypes
from trainer.training.loss_scaling import LossScaling
from trainer.training.losses import Loss, Smoothed
from trainer.training.optimizers.optim import RATE_RATIO
from trainer.training.outliers import Outliers
from trainer.training.schedules import Schedule
from trainer.training.state import State, rng_state
from trainer.training.throughput import Arithmetic

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from trainer.data.batches.streamed_steps import StreamedSteps

MAX_SKIPPED_IN_A_ROW = 5
"""Steps with a non-finite gradient before the run gives up."""


@dataclass
class Loop:
    """What a step needs. Nothing here changes while it runs but the model, the optimizer and the state."""

    model: PreTrainedModel
    """the transformers model; an adapter's modules lie inside it"""
    parameters: list[torch.nn.Parameter]
    """trainable ones"""
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    loss: Loss | Smoothed
    steps: TrainingSteps | StreamedSteps
    dtypes: Dtypes
    accelerator: Accelerator
    arithmetic: Arithmetic
    recomputed: float
    """share of the blocks' forward that runs again in backward"""
    memory: Memory
    max_grad_norm: float | None
    outliers: Outliers
    scaling: LossScaling
    peak_learning_rate: float

    def learning_rate(self, step: int) -> float:
        """Of a step (from 1)."""
        return self.peak_learning_rate * self.schedule.factor(step, self.steps.num_steps)


def train(
    loop: Loop,
    state: State,
    rng: dict[str, torch.Tensor],
    after_step: Callable[[State, float], None],
    check_interrupt: Callable[[], None],
    last: int | None = None,
) -> None:
    """Runs from `state.step` to the step `last`, or to the run's last step, or to the one after which `state.stopped`
    is set.

    `after_step(state, grad_norm)` is called after every step, and once before the first: it logs, evaluates and
    saves, and cannot change gradients. `rng` always holds the generators' states after the last whole step, so that
    a step broken off by `check_interrupt` leaves nothing behind.
    """
    device = loop.accelerator.device
    grad_norm, stepped = float("nan"), False
    loop.model.train()
    while True:
        after_step(state, grad_norm)
        if state.stopped or state.step in (last, loop.steps.num_steps):
            return

        started = time.perf_counter()
        step = state.step + 1
        learning_rate = loop.learning_rate(step)
        for group in loop.optimizer.param_groups:
            group["lr"] = learning_rate * group.get(RATE_RATIO, 1.0)

        micro_batches = loop.steps.step(step)
        # The loss is the mean over the targets of the whole step: one divisor for all its micro-batches.
        num_targets = sum(batch.num_targets for batch in micro_batches)
        divisor = num_targets / loop.scaling.scale(state)
        step_loss = torch.zeros((), dtype=torch.float32, device=device)
        flops = step_flops = 0.0
        for position, batch in enumerate(micro_batches):
            check_interrupt()
            # Gradients lie beside all but the first micro-batch, the optimizer's state beside all but the first step.
            loop.memory.expect(("micro-batch", position > 0, stepped), batch.input_ids.numel())
            flops += loop.arithmetic.flops(batch)
            step_flops += loop.arithmetic.step_flops(batch, loop.recomputed)
            with loop.dtypes.autocast():
                micro_loss = loop.loss.sum(loop.model, batch.to(device))
            loop.memory.at("first forward")
            loop.accelerator.backward(micro_loss / divisor)
            loop.memory.at("first backward")
            step_loss += micro_loss.detach()
            del micro_loss  # and its graph with it: else the next micro-batch's forward pass runs beside it

        loop.scaling.unscale(loop.parameters, state)
        norm = (
            torch.nn.utils.get_total_norm([p.grad for p in loop.parameters if p.grad is not None])
            if loop.max_grad_norm is None
            else torch.nn.utils.clip_grad_norm_(loop.parameters, loop.max_grad_norm)
        )
        grad_norm = norm.item()  # the one device read of a step
        mends = loop.scaling.update(state, math.isfinite(grad_norm))
        loop.memory.expect(("optimizer", stepped))
        if loop.outliers.found(grad_norm, state.grad_norms):
            state.outlier_steps += 1
        elif math.isfinite(grad_norm):
            loop.optimizer.step()
            stepped = True
            loop.memory.at("first step")
            state.skipped_in_a_row = 0
        else:
            # Skipped whole: under AdamW even a zero gradient would move the weights.
            state.skipped_steps += 1
            state.skipped_in_a_row = 0 if mends else state.skipped_in_a_row + 1
            if state.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
                raise NonFiniteError(
                    f"the gradient norm was {grad_norm} in {MAX_SKIPPED_IN_A_ROW} steps in a row (up to step {step}, "
                    f"learning rate {learning_rate:.2e}). No weight was changed by these steps. Lower "
                    "optim.learning_rate, lengthen the warm-up, or look at the data of these steps."
                )
        loop.optimizer.zero_grad(set_to_none=True)

        state.step = step
        loop.outliers.remember(grad_norm, state.grad_norms)
        state.count(micro_batches, step_loss, flops, step_flops, time.perf_counter() - started)
        rng.update(rng_state(device))
