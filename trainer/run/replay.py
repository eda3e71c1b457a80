"""A step of a run again, bit for bit, from what lies in its folder: the nearest checkpoint before it and the data.

Nothing is written there.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.config.saved import Run
from trainer.data.batches.loader import Samples
from trainer.data.tokens.token_sets import Tokens, TokenSet
from trainer.data.tokens.tokenize import opening
from trainer.device.measure import Memory
from trainer.errors import ConfigError, StorageError
from trainer.export.report.run_record import RunRecord
from trainer.run.beginning import Beginning
from trainer.run.build import Ready, build
from trainer.run.clock import Clock
from trainer.run.prepare import Prepared, prepare
from trainer.run.retreat import halvings_at
from trainer.tracking.console import Bar, Screen
from trainer.tracking.flight_record import Flights, read_flight
from trainer.tracking.run_folder import versions
from trainer.training.checkpoint import Checkpoints, load_checkpoint, load_state
from trainer.training.deterministic import deterministic_kernels
from trainer.training.influence import Influence, influences
from trainer.training.loop import train
from trainer.training.state import State, Window, rng_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 60
"""Characters of a row's question, and of its answer."""


@dataclass(frozen=True)
class RankedRow:
    """A row of a replayed step."""

    place: str
    """file:line"""
    begins: str
    """its question and answer, in short"""
    influence: Influence


@dataclass
class Replayed:
    """What came of it."""

    first: int
    last: int
    started_from: str
    """in words"""
    rows: list[RankedRow] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    """what was compared with the run's own figures, and is equal to the last bit"""
    differs: list[str] = field(default_factory=list)
    """what is not"""


def replay(run: Run, folder: Path, first: int, last: int, screen: Screen) -> Replayed:
    """Remakes the steps from the state before `first` to `last` and ranks their rows. Raises TrainerError."""
    record, flights = RunRecord.read(folder), read_flight(folder)
    _check_steps(folder, flights, first, last)
    checkpoint = Checkpoints(folder / "checkpoints", 1, record.manifest.get("run_id")).newest(screen.say, first - 1)
    state = State() if checkpoint is None else load_state(checkpoint)
    beginning = Beginning(folder, state=state, checkpoint=checkpoint, manifest=record.manifest or None)
    start = "its beginning" if checkpoint is None else f"checkpoint {checkpoint.name}"
    replayed = Replayed(first, last, f"{start}, {last - state.step} steps")
    clock = Clock()
    with ExitStack() as stack:
        stack.enter_context(deterministic_kernels(run.config.train.deterministic))
        prepared = stack.enter_context(closing(prepare(run, beginning, clock)))
        check_data(folder, record, prepared)
        memory = stack.enter_context(Memory(prepared.device))
        ready = stack.enter_context(closing(build(run, prepared, memory, clock)))
        rng = rng_state(prepared.device)
        if checkpoint is not None:
            rng = load_checkpoint(checkpoint, ready.adapted, ready.loop.optimizer, prepared.device)
        bar = stack.enter_context(screen.bar("replaying", last, state.step))
        _Pilot(ready, record, flights, replayed, bar).fly(state, rng)
    if replayed.differs and record.manifest.get("versions") not in (None, versions()):
        replayed.differs.append(f"versions then {record.manifest['versions']}, now {versions()}")
    return replayed


class _Pilot:
    """Drives the loop over the steps, compares and ranks on the way."""

    def __init__(self, ready: Ready, record: RunRecord, flights: Flights, replayed: Replayed, bar: Bar):
        self.ready, self.flights, self.replayed, self.bar = ready, flights, replayed, bar
        self._logged = {row["step"]: row for row in record.rows.get("train", [])}
        self._retreats = record.manifest.get("retreats", [])

    def fly(self, state: State, rng: dict[str, torch.Tensor]) -> None:
        train(self.ready.loop, state, rng, self._after_step, lambda: None, self.replayed.last)

    def _after_step(self, state: State, grad_norm: float) -> None:
        steps, step = self.ready.loop.steps, state.step
        self.bar.at(step)
        if step >= self.replayed.first:
            self._compare(state, grad_norm)
        if step in self._logged:
            state.window = Window()  # as the run's own row did
        if step < self.replayed.last:
            steps.halvings = halvings_at(step + 1, self._retreats)
            if step + 1 >= self.replayed.first:
                self._rank(step + 1)

    def _compare(self, state: State, grad_norm: float) -> None:
        """With the flight record and, where this step has a row of metrics, with its loss."""
        step, flight = state.step, self.flights[state.step]
        self._note(f"gradient norm of step {step}", grad_norm, flight.grad_norm)
        taken = self.ready.loop.steps.taken
        if taken is None or [tuple(s.tolist()) for s in flight.samples] != list(taken[1]):
            self.replayed.differs.append(f"the samples of step {step} are others than the run had")
        row = self._logged.get(step)
        if row is not None and row.get("loss") is not None:
            self._note(f"loss of step {step}", float(state.window.loss_sum) / state.window.num_targets, row["loss"])

    def _note(self, what: str, now: float, then: float) -> None:
        if now == then or (now != now and then != then):
            self.replayed.checked.append(f"{what}: {now!r}")
        else:
            self.replayed.differs.append(f"{what}: {now!r}, and {then!r} in the run")

    def _rank(self, step: int) -> None:
        ready = self.ready
        samples: list[Samples] = ready.loop.steps.samples(step)
        held_out = None if ready.held_out is None else ready.held_out()
        found = iter(influences(ready.loop, step, samples, held_out))
        for tokens, indices in samples:
            for index in indices:
                place, begins = told(tokens, int(index), ready.prepared.tokenizer)
                self.replayed.rows.append(RankedRow(place, begins, next(found)))


def told(tokens: Tokens, index: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Where a sample stands, and how it begins."""
    if isinstance(tokens, TokenSet) and not len(tokens.sources):  # a stream keeps tokens alone
        ids, is_target = tokens.sample(index)
        parts = (tokenizer.decode(ids[mask], skip_special_tokens=True) for mask in (~is_target, is_target))
        return tokens.place(index), " → ".join(map(_short, parts))
    sample = tokens.source(index)
    asked = opening(sample)
    if asked is None:
        return tokens.place(index), _short(str(vars(sample).get("text") or vars(sample).get("messages") or ""))
    return tokens.place(index), f"{_short(asked.question)} → {_short(asked.answer)}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def check_data(folder: Path, record: RunRecord, prepared: Prepared) -> None:
    """Raises StorageError where the data is not what the run had."""
    then = record.manifest.get("data_hash")
    if then is not None and then != prepared.train_set.content_hash():
        raise StorageError(f"run={folder}: the data has changed since the run: put it back to replay a step.")


def _check_steps(folder: Path, flights: Flights, first: int, last: int) -> None:
    """Raises ConfigError or StorageError where the run has no such steps."""
    if not flights:
        raise StorageError(f"run={folder}: has no flight.record: no step was done, or an earlier version ran it.")
    missing = [step for step in (first, last) if step not in flights]
    if missing:
        raise ConfigError(f"step={missing[0]}: the run has steps {min(flights)} to {max(flights)}")


def ranked(replayed: Replayed) -> tuple[list[RankedRow], list[RankedRow]]:
    """The rows by effect on the held-out loss, the most harmful first (none where nothing is held out), and by
    gradient norm."""
    rows = replayed.rows
    with_effect = [row for row in rows if row.influence.effect is not None]
    by_effect = sorted(with_effect, key=lambda row: -row.influence.effect)
    return by_effect, sorted(rows, key=lambda row: -np.nan_to_num(row.influence.norm, nan=np.inf))
