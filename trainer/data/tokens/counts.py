"""What became of the rows of one source: every row is used, or counted under the reason why it is not."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from trainer.data.data_settings import Data

LISTED = 10
"""Problems shown in one error, and places kept for each reason."""

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
    """file:line of the first rows of each reason; of a bad row with its problem"""
    truncated: int = 0
    split: int = 0
    """samples that came from splitting"""
    samples: int = 0
    tokens: int = 0
    targets: int = 0
    duplicates: int = 0
    """samples whose tokens and targets came before"""
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
        places = self.examples.setdefault(reason, [])
        if len(places) < LISTED:
            places.append(place)

    def add(self, other: Counts) -> None:
        """Takes over what was counted for a later piece."""
        for name in ("rows", "used", "truncated", "split", "samples", "tokens", "targets", "ended"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dropped.update(other.dropped)
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
        return {**asdict(self), "dropped": dict(self.dropped)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> Counts:
        return Counts(**{**values, "dropped": Counter(values["dropped"])})


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
