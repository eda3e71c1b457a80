"""What became of the rows of one source: every row is used, or counted under the reason why it is not."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from trainer.data.data_settings import Data

LISTED = 10
"""Problems shown in one error, and places kept for each reason."""

BAD_ROW = "bad row"
"""Why a row is not used: it cannot become a sample. What is wrong with it is told in Counts.bad_rows."""

QUANTILES = (0, 5, 25, 50, 75, 95, 99, 100)
"""Percent, of the lengths of samples."""


@dataclass
class Counts:
    """Counted while the rows were tokenised; kept in the token cache beside the tokens."""

    path: str
    rows: int = 0
    used: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """rows not used, by reason"""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """file:line of the first rows of each reason and of each remark"""
    bad_rows: dict[str, list[Any]] = field(default_factory=dict)
    """what is wrong, whatever the number of the message: the words of the first such row, how many rows, and the
    first rows' file:line"""
    remarks: Counter[str] = field(default_factory=Counter)
    """rows that are used, by what is remarked of them"""
    plain: int = 0
    """samples of plain text, for which there is no chat template"""
    passed_over: list[str] = field(default_factory=list)
    """files of the folder that are not read, each with the reason"""
    truncated: int = 0
    split: int = 0
    """samples that came from splitting"""
    samples: int = 0
    tokens: int = 0
    targets: int = 0
    duplicates: int = 0
    """samples whose tokens and targets came before"""
    overlap: int = 0
    """samples of data.eval_path that are trained on too"""
    ended: int = 0
    """samples whose last target is an end token"""
    format: str | None = None
    lengths: dict[str, int] = field(default_factory=dict)
    """percent -> tokens of a sample, before any cut"""
    cache: str = ""
    """what the token cache did, in words"""

    def drop(self, reason: str, place: str) -> None:
        """Counts a row that is not used."""
        self.dropped[reason] += 1
        self._keep(reason, place)

    def refuse(self, place: str, problem: str) -> None:
        """Counts a bad row."""
        self.dropped[BAD_ROW] += 1
        self._refused([problem, 1, [place]])

    def remark(self, what: str, place: str) -> None:
        """Counts a row that is used, and of which someone should know something."""
        self.remarks[what] += 1
        self._keep(what, place)

    def _keep(self, reason: str, place: str) -> None:
        places = self.examples.setdefault(reason, [])
        if len(places) < LISTED:
            places.append(place)

    def _refused(self, entry: list[Any]) -> None:
        problem, rows, places = entry
        kind = re.sub(r"\[\d+\]", "[]", problem)
        if kind in self.bad_rows:
            known = self.bad_rows[kind]
            known[1] += rows
            known[2] += places[: LISTED - len(known[2])]
        elif len(self.bad_rows) < LISTED:
            self.bad_rows[kind] = entry

    def problems(self) -> list[str]:
        """What is wrong with the bad rows, each kind once, with where it stands."""
        lines = []
        for problem, rows, places in self.bad_rows.values():
            lines.append(f"{places[0]}: {problem}")
            if rows > 1:
                more = ", ".join(places[1:]) + (", ..." if rows > len(places) else "")
                lines.append(f"  the same in {rows - 1:,} more rows: {more}")
        told = sum(rows for _, rows, _ in self.bad_rows.values())
        return lines + ([f"... and {self.dropped[BAD_ROW] - told:,} more"] if told < self.dropped[BAD_ROW] else [])

    def add(self, other: Counts) -> None:
        """Takes over what was counted for a later piece."""
        for name in ("rows", "used", "truncated", "split", "samples", "tokens", "targets", "ended", "plain"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dropped.update(other.dropped)
        self.remarks.update(other.remarks)
        for entry in other.bad_rows.values():
            self._refused(entry)
        for reason, places in other.examples.items():
            kept = self.examples.setdefault(reason, [])
            kept += places[: LISTED - len(kept)]

    def measure(self, lengths: np.ndarray) -> None:
        """Notes the distribution of the lengths before any cut."""
        if len(lengths):
            values = np.percentile(lengths, QUANTILES, method="nearest")
            self.lengths = {str(q): int(value) for q, value in zip(QUANTILES, values, strict=True)}

    @property
    def dropped_share(self) -> float:
        """Of the rows."""
        return sum(self.dropped.values()) / self.rows if self.rows else 0.0

    @property
    def truncated_share(self) -> float:
        """Of the samples."""
        return self.truncated / self.samples if self.samples else 0.0

    @property
    def duplicate_share(self) -> float:
        """Of the samples."""
        return self.duplicates / self.samples if self.samples else 0.0

    def sentence(self, max_length: int) -> str:
        """Rows used and why the others were not, in one line."""
        parts = [f"{self.rows:,} rows, {self.used:,} used"]
        parts += [f"{count:,} dropped ({count / self.rows:.1%}): {why}" for why, count in self.dropped.items()]
        if self.truncated:
            parts.append(f"{self.truncated:,} truncated ({self.truncated_share:.1%})")
        if self.split:
            parts.append(f"{self.split:,} samples made by splitting")
        if self.duplicates:
            parts.append(f"{self.duplicates:,} repeated ({self.duplicate_share:.1%})")
        if self.lengths:
            parts.append(f"lengths {self.lengths['0']:,} to {self.lengths['100']:,}, median {self.lengths['50']:,}")
        return "; ".join(parts) + f" (limit {max_length:,} tokens)" + (f"; {self.cache}" if self.cache else "")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "dropped": dict(self.dropped), "remarks": dict(self.remarks)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> Counts:
        counters = {name: Counter(values[name]) for name in ("dropped", "remarks")}
        return Counts(**{**values, **counters})


ASKED_AS = {"chat": "asked through the chat template", "text": "asked as plain text"}
"""How a model is asked, in words."""


def asked_as(counts: list[Counts]) -> str:
    """How a model is to be asked that was trained on these: as most of the samples were made."""
    return "text" if 2 * sum(c.plain for c in counts) > sum(c.samples for c in counts) else "chat"


def over_thresholds(data: Data, counts: list[Counts]) -> list[str]:
    """Where more was lost than the settings allow, in a user's words."""
    problems = []
    for count in counts:
        for key, share, what in (
            ("max_dropped_share", count.dropped_share, "rows were dropped"),
            ("max_truncated_share", count.truncated_share, "samples were truncated"),
            ("max_duplicate_share", count.duplicate_share, "samples repeat an earlier one"),
        ):
            allowed = getattr(data, key)
            if share > allowed:
                problems.append(
                    f"{count.path}: {share:.1%} of the {what}, over data.{key}={allowed:g}. "
                    f"{count.sentence(data.max_length)}. See them with: trainer data"
                )
    return problems
