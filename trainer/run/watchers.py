"""What a run watches besides training/watch.py: allocations, each step's samples, compilation in mid-run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import torch

from trainer.memory.snapshot import AllocationSnapshot
from trainer.model.kernels import Kernels
from trainer.run.journal import Journal
from trainer.tracking.flight_record import FLIGHT, FlightRecord
from trainer.training.loop import Loop


@contextmanager
def recorded_allocations(steps: int, device: torch.device, journal: Journal) -> Iterator[Callable[[], None]]:
    """Records the allocations of the first steps. Gives what is to be called before the first and after every one."""
    snapshot = AllocationSnapshot(device, steps, journal.folder.path)

    def after_step() -> None:
        if steps == 0:
            return
        if not snapshot.started:
            snapshot.start()
            journal.memory.recording = snapshot.mark
            return
        file = snapshot.after_step()
        if file is not None:
            journal.memory.recording = None
            journal.screen.say(f"memory snapshot: {file}; {snapshot.shape()}")

    try:
        yield after_step
    finally:
        if snapshot.started:
            snapshot.abandon()


@contextmanager
def kept_samples(loop: Loop, journal: Journal) -> Iterator[Callable[[float], None]]:
    """Keeps each step's samples and gradient norm in the flight record. Gives what is to be called after every step."""
    written = None

    def after_step(grad_norm: float) -> None:
        nonlocal written
        taken, step = loop.steps.taken, journal.state.step
        # Also called before the first step, and again after a step whose evaluation, or whose successor, failed.
        if taken is not None and taken is not written and taken[0] == step:
            flight.write(step, grad_norm, taken[1])
            written = taken

    with closing(FlightRecord(journal.folder.file(FLIGHT), journal.state.step)) as flight:
        yield after_step


def told_compilations(kernels: Kernels, journal: Journal) -> Callable[[], None]:
    """To be called after every step: compiling costs seconds, and more than once it is a mistake."""

    def after_step() -> None:
        graphs, before = kernels.graphs(), journal.facts.get("compiled_graphs")
        if graphs is None or graphs == before:
            return
        if before is not None:
            step = journal.state.step
            journal.row("compiled", step=step, graphs=graphs)
            journal.screen.say(f"step {step}: compiled again, {graphs} graphs so far", style="yellow")
        journal.facts["compiled_graphs"] = graphs

    return after_step
