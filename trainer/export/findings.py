"""What went wrong in a run, from its metrics alone: each finding in plain words, with the steps behind it.

The rules are robust ones: medians and their spread, never means, so that what is looked for does not move the scale it
is measured on. They ask for several rows before they say anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np

Rows = dict[str, list[dict[str, Any]]]
"""Of metrics.jsonl, by event, in the order of their steps."""

BEFORE = 20
"""Rows (or steps) that one is compared with."""
ENOUGH = 8
"""Rows from which a course is judged."""
SPREADS, TIMES = 8.0, 1.5
"""A loss is a spike above so many spreads over the median before it, and so many times it and each of the last four."""
NORM_TIMES = 4.0
"""The same of a gradient norm."""
GIB_GROWTH, SHARE_GROWTH = 0.01, 0.05
"""Memory that grew by more than both, quarter after quarter, creeps."""


@dataclass(frozen=True)
class Finding:
    """Something to look at."""

    kind: str
    text: str
    steps: tuple[int, ...] = ()
    """whose rows may be behind it; none where no row is"""


def findings(rows: Rows, summary: dict[str, Any], norms: dict[int, float]) -> list[Finding]:
    """All of them, the gravest first. `norms`: the gradient norm of every step, where it was kept."""
    train = rows.get("train", [])
    found = [*_ended(summary), *_not_finite(rows), *_out_of_memory(rows), *_diverged(train)]
    found += [*_spikes(train, norms), *_plateau(train), *_overfitted(rows.get("eval", []))]
    return [*found, *_creep(train)]


def _ended(summary: dict[str, Any]) -> Iterator[Finding]:
    status = summary.get("status")
    if status in ("failed", "interrupted"):
        yield Finding(
            str(status), f"the run {status} after step {summary.get('steps', 0)}: {summary.get('error', '?')}"
        )


def _not_finite(rows: Rows) -> Iterator[Finding]:
    skipped = [row["step"] for row in rows.get("skipped", [])]
    lost = [row["step"] for row in rows.get("train", []) if row.get("loss") is None]
    if skipped:
        yield Finding(
            "non-finite",
            f"the gradient norm was not finite in {_steps(skipped)}, so these were skipped whole: no weight moved. "
            "Too high a learning rate, half precision that overflows, or a row that the model cannot bear",
            tuple(skipped),
        )
    elif lost:
        yield Finding("non-finite", f"the loss was not finite in {_steps(lost)}", tuple(lost))


def _out_of_memory(rows: Rows) -> Iterator[Finding]:
    for row in rows.get("retreat", []):
        text = f"memory ran out during {row.get('during')}, and the run went on with less: {row.get('error')}"
        yield Finding("out of memory", text, (int(row["step"]) + 1,))


def _diverged(train: list[dict[str, Any]]) -> Iterator[Finding]:
    steps, losses = _column(train, "loss")
    if len(losses) < ENOUGH:
        return
    course = _smoothed(losses)
    lowest, end = int(np.argmin(course)), float(np.median(losses[-max(3, len(losses) // 8) :]))
    if end > TIMES * course[lowest] and end - course[lowest] > 0.1 and lowest < len(course) - 3:
        begins = next((i for i in range(lowest, len(losses)) if losses[i] > TIMES * course[lowest]), lowest)
        yield Finding(
            "divergence",
            f"the loss fell to {course[lowest]:.4g} at step {steps[lowest]}, rose from step {steps[begins]} and ended "
            f"at {end:.4g}: the learning rate is too high for it, or the data changes there",
            (steps[begins],),
        )


def _spikes(train: list[dict[str, Any]], norms: dict[int, float]) -> Iterator[Finding]:
    steps, losses = _column(train, "loss")
    for i in range(4, len(losses)):
        before = losses[max(0, i - BEFORE) : i]
        usual, spread = _usual(before)
        if losses[i] > usual + SPREADS * spread and losses[i] > TIMES * max(usual, *before[-4:]):
            first = steps[i - 1] + 1
            inside = {step: norms[step] for step in range(first, steps[i] + 1) if step in norms}
            worst = max(inside, key=inside.get) if inside else steps[i]
            where = f"step {steps[i]}" if first == steps[i] else f"steps {first} to {steps[i]}"
            yield Finding(
                "spike", f"the loss of {where} is {losses[i]:.4g} where {usual:.4g} was usual before it", (worst,)
            )
    known = sorted(step for step, norm in norms.items() if isfinite(norm))
    values = np.array([norms[step] for step in known])
    for i in range(4, len(values)):
        usual, _ = _usual(values[max(0, i - BEFORE) : i])
        if values[i] > NORM_TIMES * usual and values[i] > 1.5 * values[i - 4 : i].max():
            text = f"the gradient norm of step {known[i]} is {values[i]:.4g} where {usual:.4g} was usual before it"
            yield Finding("spike", text, (known[i],))


def _plateau(train: list[dict[str, Any]]) -> Iterator[Finding]:
    steps, losses = _column(train, "loss")
    if len(losses) < 2 * ENOUGH:
        return
    tenths = [float(np.median(part)) for part in np.array_split(np.array(losses), 8)]
    half = tenths[4:]
    if max(half) - min(half) < 0.02 * half[0] and half[-1] > 0.2 * tenths[0]:
        yield Finding(
            "plateau",
            f"the loss has stood at {half[-1]:.4g} since about step {steps[len(steps) // 2]}, half of the run: a "
            "learning rate that is too low (or decayed too early), or nothing left to learn with these weights",
        )


def _overfitted(evaluations: list[dict[str, Any]]) -> Iterator[Finding]:
    steps, losses = _column(evaluations, "eval_loss")
    if len(losses) < 3:
        return
    best = int(np.argmin(losses))
    if best < len(losses) - 2 and losses[-1] > 1.02 * losses[best]:
        yield Finding(
            "overfitting",
            f"the held-out loss was lowest at step {steps[best]} ({losses[best]:.4g}) and ended at {losses[-1]:.4g}: "
            "what came after it learnt the rows by heart. checkpoints/best names the lowest",
        )


def _creep(train: list[dict[str, Any]]) -> Iterator[Finding]:
    for name, what in (("memory_allocated_gib", "allocated memory"), ("rss_peak_gib", "the process's memory")):
        steps, values = _column(train, name)
        if len(values) < 2 * ENOUGH:
            continue
        quarters = [float(np.median(part)) for part in np.array_split(np.array(values), 4)]
        grown = quarters[-1] - quarters[0]
        steady = all(later > earlier + grown / 10 for earlier, later in pairwise(quarters))
        if steady and grown > max(GIB_GROWTH, SHARE_GROWTH * quarters[0]):
            rate = grown / max(1, 0.75 * (steps[-1] - steps[0])) * 1000
            yield Finding(
                "memory creep",
                f"{what} grew from {quarters[0]:.3g} to {quarters[-1]:.3g} GiB, quarter after quarter, "
                f"{rate:.2g} GiB in 1,000 steps: something is kept from step to step",
            )


def _column(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    found = [(int(row["step"]), float(row[name])) for row in rows if isinstance(row.get(name), (int, float))]
    return [step for step, _ in found], [value for _, value in found]


def _usual(values) -> tuple[float, float]:
    """Median, and spread as the standard deviation that a normal distribution of this median deviation has."""
    median = float(np.median(values))
    return median, 1.4826 * float(np.median(np.abs(np.asarray(values) - median)))


def _smoothed(values: list[float]) -> list[float]:
    """Running medians of five."""
    return [float(np.median(values[max(0, i - 2) : i + 3])) for i in range(len(values))]


def _steps(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:5])) + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")
    return f"step{'s' if len(steps) > 1 else ''} {shown}"
