"""The rows of the steps that a run's findings name, by file and line; no weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trainer.config.saved import Run
from trainer.data.chat.templates import dress
from trainer.data.tokens.gather import read_data
from trainer.export.findings import Finding, findings
from trainer.export.report.run_record import RunRecord
from trainer.export.rows import as_of
from trainer.model.loading.base import load_tokenizer
from trainer.run.replay import told
from trainer.tracking.flight_record import Flights, read_flight

LISTED = 8
"""Rows of a finding."""


@dataclass(frozen=True)
class Suspicion:
    """A finding with the rows behind it."""

    finding: Finding
    rows: list[tuple[str, str]] = field(default_factory=list)
    """place and beginning, the likeliest first"""
    of: int = 0
    """how many rows its steps had"""


def suspicions(run: Run, folder: Path) -> tuple[list[Suspicion], str | None]:
    """What stands out, and why no rows are named where that is so."""
    record, flights = RunRecord.read(folder), read_flight(folder)
    found = findings(record.rows, record.summary, flights.norms())
    if not any(step in flights for finding in found for step in finding.steps):
        return [Suspicion(finding) for finding in found], None
    if run.config.data.streaming:
        why = "rows of a stream are not named here: trainer replay run=DIR step=N reads them again"
        return [Suspicion(finding) for finding in found], why
    tokenizer = load_tokenizer(run.config.model)
    dress(tokenizer, run.config.data.chat_template, run.config.model.new_tokens)
    tokens = read_data(as_of(run.config.data, folder), run.config.seed, tokenizer).train_set
    if tokens.content_hash() != record.manifest.get("data_hash"):
        return [Suspicion(finding) for finding in found], "the data has changed since the run: no rows are named"
    bad = {step for finding in found for step in finding.steps}
    order = _likeliest(flights, bad)
    return [
        _suspicion(finding, flights, order, lambda index: told(tokens, index, tokenizer)) for finding in found
    ], None


def _likeliest(flights: Flights, bad: set[int]) -> dict[int, float]:
    """Of each sample in a bad step: in what share of its steps something was wrong."""
    seen: Counter[int] = Counter()
    wrong: Counter[int] = Counter()
    for step, flight in flights.items():
        samples = [index for part in flight.samples for index in part.tolist()]
        seen.update(samples)
        if step in bad:
            wrong.update(samples)
    return {index: count / seen[index] + count / 1000 for index, count in wrong.items()}


def _suspicion(
    finding: Finding, flights: Flights, order: dict[int, float], tell: Callable[[int], tuple[str, str]]
) -> Suspicion:
    parts = [part for step in finding.steps if step in flights for part in flights[step].samples]
    indices = sorted({index for part in parts for index in part.tolist()}, key=lambda index: -order[index])
    return Suspicion(finding, [tell(index) for index in indices[:LISTED]], len(indices))
