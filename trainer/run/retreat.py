"""Out of memory in training is a slowdown, not an end: the step is dropped whole and made again with less memory.

What a run retreats to, in order: the policies of memory/ladder.py, whose gradients are equal to the bit, then half the
micro-batch and twice the accumulation, again and again while a micro-batch has two samples. An evaluation that runs
out changes no training: its micro-batches are halved.

What is guaranteed: the step starts from the state before it, to the bit. Weights, moments and generators are those of
the last whole step, which a forward or backward pass does not touch. An optimizer's step that had begun may have moved
some weights and not others, so then the run goes back to its newest checkpoint, or to its beginning, and makes the
steps since then again. Halving adds the same samples' gradients in another order: equal to rounding.
"""

from __future__ import annotations

import gc
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from trainer.config.saved import Run
from trainer.data.batches.batch import MicroBatch, collate, divided
from trainer.device.measure import is_out_of_memory
from trainer.errors import ConfigError, ModelError, PlanError
from trainer.memory.fit import sentence
from trainer.memory.ladder import ladder
from trainer.memory.memory_settings import OnOom
from trainer.model.offload.offloads import Activations, check_host
from trainer.run.beginning import Beginning, stays
from trainer.run.build import Ready
from trainer.run.journal import Journal
from trainer.training.checkpoint import Checkpoints, load_checkpoint, load_state
from trainer.training.state import set_rng_state

if TYPE_CHECKING:
    from trainer.model.checkpointing import Checkpointing

T = TypeVar("T")


@dataclass(frozen=True)
class Position:
    """How far a run has retreated; goes to the manifest."""

    checkpointing: str | None = None
    """name of a rung of the ladder; None: as planned"""
    halvings: int = 0
    """of each training micro-batch"""
    evaluation_halvings: int = 0


class Retreat:
    """Makes a run's steps again where memory runs out, with less."""

    def __init__(
        self,
        run: Run,
        beginning: Beginning,
        ready: Ready,
        journal: Journal,
        checkpoints: Checkpoints,
        rng: dict[str, torch.Tensor],
    ):
        self.run, self.ready, self.journal, self.checkpoints, self.rng = run, ready, journal, checkpoints, rng
        self._wanted = run.config.memory.on_oom is OnOom.retreat
        self._start = Checkpoints(journal.folder.file(".start"), 1, checkpoints.run_id)
        self._evaluating = False
        """whether an evaluation has begun since anything was whole, and the optimizer's step"""
        self._optimizer_began = False
        self._fresh = beginning.checkpoint is None
        self.position = Position()
        known = (beginning.manifest or {}).get("retreats", [])
        self._told: list[dict[str, Any]] = [] if beginning.changed else known  # other settings may need none of it
        if known:
            self._note()
        if self._told:
            self._go_on(self._told[-1])

    @property
    def held_out(self) -> Callable[[], Iterator[MicroBatch]] | None:
        """Makes the held-out micro-batches as they fit."""
        return None if self.ready.held_out is None else self._held_out

    @contextmanager
    def ready_to_go_back(self) -> Iterator[None]:
        """Within it, a run without a checkpoint keeps on disk what it began with."""
        hook = self.ready.loop.optimizer.register_step_pre_hook(self._note_optimizer)
        if self._wanted and self._fresh:
            self._start.save(self.ready.adapted, self.ready.loop.optimizer, self.journal.state, self.rng)
        try:
            yield
        finally:
            hook.remove()
            shutil.rmtree(self._start.folder, ignore_errors=True)

    def settled(self) -> None:
        """To be called where nothing is half done: a step is whole, an evaluation over."""
        self._optimizer_began = self._evaluating = False

    def over(self, work: Callable[[], T]) -> T:
        """The result of `work`, which goes on from the last whole step whenever it is called. Raises the allocator's
        error where nothing more can be given up, and all other errors."""
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not self._wanted or not is_out_of_memory(error):
                    raise
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                _let_go(error)
                upcoming = self._next()
                if upcoming is None:
                    raise
            self._restore()
            self._step_down(upcoming, reason)

    def _held_out(self) -> Iterator[MicroBatch]:
        self._evaluating = True
        for batch in self.ready.held_out():
            yield from divided(batch, self.position.evaluation_halvings)

    def _note_optimizer(self, *_: Any) -> None:
        self._optimizer_began = True

    @cached_property
    def _policies(self) -> dict[str, Checkpointing]:
        """Those below the planned one that this run's other settings allow, by name, the cheapest last."""
        found = {}
        config, prepared = self.run.config, self.ready.prepared
        plan = prepared.plan
        for name, policy in ladder(plan.policy, plan.planner.depth, prepared.device.type):
            with suppress(ConfigError, ModelError, PlanError):
                config.kernels.check_model(prepared.config, policy)
                if policy.moves_inputs and not plan.policy.moves_inputs:
                    if config.kernels.problems(replace(config, offload=Activations())):
                        continue
                    check_host("the inputs of the blocks", plan.planner.host_inputs(policy), "Use on_oom=fail")
                found[name] = policy
        return found

    def _next(self) -> Position | None:
        """One down from here, or None at the end."""
        here = self.position
        if self._evaluating:
            batches = self.ready.held_out()
            return _halved(here, "evaluation_halvings", max(batches, key=lambda batch: batch.input_ids.numel()))
        names = list(self._policies)
        below = names if here.checkpointing is None else names[names.index(here.checkpointing) + 1 :]
        if below:
            return replace(here, checkpointing=below[0])
        steps = self.ready.loop.steps
        return _halved(here, "halvings", collate(*steps.fullest(), steps.packing.packed))

    def _restore(self) -> None:
        """The state after the last whole step, or after the newest that is kept where the optimizer had begun."""
        loop, device, state = self.ready.loop, self.ready.prepared.device, self.journal.state
        loop.optimizer.zero_grad(set_to_none=True)
        set_rng_state(self.rng, device)
        if self._optimizer_began:
            say = self.journal.screen.say
            kept = self.checkpoints.newest(say) or self._start.newest(say)
            loop.optimizer.state.clear()
            self.rng.update(load_checkpoint(kept, self.ready.adapted, loop.optimizer, device))
            vars(state).update(vars(load_state(kept)), peak_memory=state.peak_memory)
            self.journal.metrics.keep_only(lambda row: stays(row, state))
        self.settled()

    def _step_down(self, position: Position, reason: str) -> None:
        """Goes there, and tells it."""
        journal, words = self.journal, self._words(position)
        step, told = journal.state.step, f"{journal.doing}: {reason}"
        self._apply(position)
        row = {"step": step, "during": journal.doing, "error": reason, **asdict(position)}
        journal.row("retreat", **row)
        self._told = [*self._told, row]
        self._note()
        journal.screen.say(f"{told}. On from step {step} with less memory: {words}", style="yellow")

    def _words(self, position: Position) -> str:
        """What is new in it."""
        if position.checkpointing != self.position.checkpointing:
            return sentence(self._policies[position.checkpointing], self.ready.prepared.plan.planner.depth)
        if position.halvings != self.position.halvings:
            return f"micro-batches cut in {2**position.halvings}, with as much more accumulation"
        return f"evaluation's micro-batches cut in {2**position.evaluation_halvings}"

    def _note(self) -> None:
        """All retreats so far, in the manifest."""
        folder = self.journal.folder
        folder.write("manifest.json", {**(folder.manifest() or {}), "retreats": self._told})

    def _go_on(self, row: dict[str, Any]) -> None:
        """A run that had retreated goes on as it was; a rung that the plan is below already is none."""
        name = row["checkpointing"] if row["checkpointing"] in self._policies else None
        self._apply(Position(name, row["halvings"], row["evaluation_halvings"]))
        self.journal.screen.say(f"on with less memory since it ran out at {row['during']}", style="yellow")

    def _apply(self, position: Position) -> None:
        ready, config = self.ready, self.run.config
        plan = ready.prepared.plan
        policy = plan.policy if position.checkpointing is None else self._policies[position.checkpointing]
        if ready.mover is not None:
            ready.mover.copies.close()
        policy.apply(ready.loop.model)  # also where it is the same: what the broken step left in its hands is gone
        config.kernels.install(ready.loop.model)
        ready.mover = getattr(policy, "mover", None)
        ready.loop.recomputed = replace(plan, policy=policy).recomputed
        ready.loop.steps.halvings = position.halvings
        self.position = position


def halvings_at(step: int, retreats: list[dict[str, Any]]) -> int:
    """How often the micro-batches of a step were cut in two, by the manifest's `retreats`."""
    return next((row["halvings"] for row in reversed(retreats) if row["step"] < step), 0)


def _halved(position: Position, key: str, largest: MicroBatch) -> Position | None:
    """The position with one halving more, where that makes the largest micro-batch smaller."""
    now = getattr(position, key)
    sizes = [max(part.input_ids.numel() for part in divided(largest, halvings)) for halvings in (now, now + 1)]
    return replace(position, **{key: now + 1}) if sizes[1] < sizes[0] else None


def _let_go(error: BaseException) -> None:
    """Frees what the error's frames hold, the graph of the step above all, and gives the allocator's blocks back."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
