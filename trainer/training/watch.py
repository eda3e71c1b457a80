"""What happens after a step: a row of metrics, an evaluation, a checkpoint. None of it can change gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.data.batches.batch import MicroBatch
from trainer.tracking.console import Bar
from trainer.training.early_stopping import EarlyStopping
from trainer.training.evaluate import Evaluation
from trainer.training.loop import Loop
from trainer.training.state import State, Window
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.training.train_settings import Train


@dataclass
class Watch:
    """Called by the loop after every step, and once before the first."""

    train: Train
    loop: Loop
    say: Callable[..., None]
    """Screen.say"""
    row: Callable[..., dict[str, Any]]
    """writes a row of metrics: its event, and its values by name; returns it"""
    bar: Bar
    matmul_flops: float
    """operations a second that this device reaches in matrix products; MFU is the share of them"""
    held_out: Callable[[], Iterable[MicroBatch]] | None
    stopping: EarlyStopping
    evaluate: Callable[[Iterable[MicroBatch]], Evaluation]
    ask: Callable[[], list[dict[str, str]]] | None
    """asks the prompts of train.samples; gives each with its answer"""
    save: Callable[[State], Any]
    amend: Callable[[State], Any]
    saved: tuple[int, int | None]
    """step of the newest checkpoint, and that of the newest evaluation it knows"""
    _known: tuple[int, int] | None = None
    """skipped steps and outliers at the last call"""

    def after_step(self, state: State, grad_norm: float) -> None:
        """Does what is due at this step and has not been done: a resumed run makes up for what a stop cut off."""
        self.bar.at(state.step)
        self._tell_skipped(state, grad_norm)
        at_end = state.step == self.loop.steps.num_steps
        if state.step > state.logged_step and (at_end or state.step % self.train.log_every == 0):
            self._log(state, grad_norm)
        save_due = at_end or _every(state.step, self.train.save_every)
        if save_due:
            self.save_now(state)  # what fails in the evaluation does not take the step along
        if at_end or state.step == 0 or _every(state.step, self.train.eval_every):
            self._evaluate(state)
        if not state.stopped and self.stopping.due(state):
            self._tell_stop(state, grad_norm)
        state.stopped = self.stopping.due(state)  # a resumed run may have more patience
        if save_due or state.stopped or self._improved(state):
            self.save_now(state)

    def _tell_skipped(self, state: State, grad_norm: float) -> None:
        skipped, outliers = self._known or (state.skipped_steps, state.outlier_steps)
        if state.skipped_steps > skipped:
            self.row("skipped", step=state.step, grad_norm=grad_norm)
            self.say(f"step {state.step}: skipped, its gradient norm is {grad_norm}", style="yellow")
        if state.outlier_steps > outliers:
            self.row("outlier", step=state.step, grad_norm=grad_norm)
            self.say(f"step {state.step}: skipped, its gradient norm {grad_norm:.3f} is an outlier", style="yellow")
        self._known = state.skipped_steps, state.outlier_steps

    def _tell_stop(self, state: State, grad_norm: float) -> None:
        if state.step > state.logged_step:
            self._log(state, grad_norm)
        self.row("stopped", step=state.step)
        self.say(
            f"step {state.step}: stops early, {self.stopping.metric} has its lowest, {state.stopping_best:.4f}, "
            f"since {state.stale_evaluations} evaluations",
            style="green",
        )

    def save_now(self, state: State) -> None:
        """A checkpoint of this step, unless it is there; an evaluation that it does not know yet is added to it."""
        now = state.step, state.evaluated_step
        if state.step > self.saved[0]:
            self.loop.memory.expect("save")
            self.save(state)
            self.loop.memory.at("first save")
        elif state.step > 0 and now != self.saved:
            self.amend(state)
        self.saved = now

    def _improved(self, state: State) -> bool:
        """A new best is saved at once, where saving in between is wanted at all."""
        return self.train.save_every > 0 and state.best_step == state.step

    def _log(self, state: State, grad_norm: float) -> None:
        window, position = state.window, self.loop.steps.position(state.step)
        loss = float(window.loss_sum) / window.num_targets  # reads the device
        memory = self.loop.memory.read()
        state.peak_memory = max(state.peak_memory, memory.peak)
        roof = window.seconds * self.matmul_flops
        mfu = window.flops / roof
        row = self.row(
            "train",
            step=state.step,
            epoch=None if position.epochs_done is None else round(position.epochs_done, 4),
            loss=loss,
            learning_rate=self.loop.learning_rate(state.step),
            grad_norm=grad_norm,
            num_tokens=state.num_tokens,
            num_targets=state.num_targets,
            tokens_per_second=window.num_tokens / window.seconds,
            mfu=mfu,
            roof_share=window.step_flops / roof,
            matmul_tflops=self.matmul_flops / 1e12,
            memory_allocated_gib=memory.allocated / GIB,
            memory_peak_gib=memory.peak / GIB,
            rss_peak_gib=memory.rss_peak / GIB,
            seconds=state.seconds,
        )
        self.say(
            f"step {state.step:>{len(str(self.loop.steps.num_steps))}}/{self.loop.steps.num_steps}"
            f"  loss {loss:.4f}  lr {row['learning_rate']:.2e}  grad norm {grad_norm:.3f}"
            f"  {row['tokens_per_second']:,.0f} tokens/s"
            f"  mfu {mfu:.1%}  memory {row['memory_peak_gib']:.2f} GiB"
        )
        state.last_loss = loss
        state.window, state.logged_step = Window(), state.step

    def _evaluate(self, state: State) -> None:
        """The held-out loss and the answers to train.samples, as far as there are any."""
        if state.evaluated_step == state.step or (self.held_out is None and self.ask is None):
            return
        if self.held_out is not None:
            self._held_out_loss(state, self.held_out)
        if self.ask is not None:
            self._answers(state, self.ask)
        state.evaluated_step = state.step

    def _answers(self, state: State, ask: Callable[[], list[dict[str, str]]]) -> None:
        answers = ask()
        self.row("samples", step=state.step, answers=answers)
        for found in answers:
            self.say(f"step {state.step}: {found['prompt']} → {found['answer']}")

    def _held_out_loss(self, state: State, held_out: Callable[[], Iterable[MicroBatch]]) -> None:
        result = self.evaluate(self._announced(held_out()))
        self.row(
            "eval",
            step=state.step,
            eval_loss=result.loss,
            perplexity=result.perplexity,
            num_targets=result.num_targets,
            **{f"eval_loss/{source}": loss for source, loss in result.by_source.items()},
        )
        state.eval_loss = result.loss
        if state.step == 0:
            state.first_eval_loss = result.loss
        else:
            self.stopping.note(result, state)
        best = ""
        lowest = math.inf if state.best_eval_loss is None else state.best_eval_loss
        if state.step > 0 and result.loss < lowest:  # never one that is not finite
            state.best_eval_loss, state.best_step, best = result.loss, state.step, "  (best)"
        self.say(
            f"step {state.step}: held-out loss {result.loss:.4f}, perplexity {result.perplexity:.2f}"
            f" over {result.num_targets:,} targets{best}",
            style="green",
        )
        if result.by_source:
            losses = ", ".join(f"{source} {loss:.4f}" for source, loss in result.by_source.items())
            self.say(f"step {state.step}: held-out loss of each source: {losses}")
        self.loop.memory.sample()
        self.loop.memory.at("first evaluation")

    def _announced(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in batches:
            self.loop.memory.expect("evaluation", batch.input_ids.numel())
            yield batch


def _every(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0
