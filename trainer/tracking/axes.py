"""A row of metrics.jsonl as the values that a tracking service plots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SECTIONS = ("train", "eval")
"""Events that are plotted; their names are the sections."""
NOT_PLOTTED = ("event", "step", "time")
BY_TOKENS = {"train": "loss", "eval": "eval_loss"}
"""Values that are plotted over trained tokens too."""


@dataclass
class Axes:
    """Puts values on the axes of steps and of tokens."""

    num_tokens: int = 0
    """tokens trained on so far; evaluation rows do not carry them"""

    def by_step(self, row: dict[str, Any]) -> dict[str, float]:
        """Values over the row's step; none for events that are not plotted."""
        if row["event"] not in SECTIONS:
            return {}
        self.num_tokens = row.get("num_tokens", self.num_tokens)
        values = {f"{row['event']}/{k}": v for k, v in row.items() if k not in NOT_PLOTTED and v is not None}
        if "eval/eval_loss" in values:
            values["eval/loss"] = values["eval/eval_loss"]  # as transformers' Trainer calls it: one panel for both
        return values

    def by_tokens(self, row: dict[str, Any]) -> dict[str, float]:
        """Values over `num_tokens`."""
        name = BY_TOKENS.get(row["event"])
        return {} if name is None or row.get(name) is None else {f"tokens/{row['event']}_loss": row[name]}
