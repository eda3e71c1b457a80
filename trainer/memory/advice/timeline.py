"""The measured memory of a run, stage by stage and by kind, beside its plan: the twin of the plan's picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.memory.advice.picture import COLOURS, LEFT, ROW, WIDTH, bar, legend, mark, svg, text
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.device.stages import Stage

KINDS = ("weights", "adapter", "kept for backward", "gradients", "optimizer state", "other")
"""In the order of their colours."""
ALLOCATED, HIGHEST = WIDTH - 90, WIDTH - 20
"""Where the columns of figures end."""


def by_kind(stages: dict[str, Stage]) -> dict[str, dict[str, int]]:
    """What the allocated bytes of each stage are: what it holds and the one before it did not is its own kind.

    Bytes that no stage accounts for (libraries' workspaces, an interpreter's objects on a CPU) are `other`.
    """
    found: dict[str, dict[str, int]] = {}
    there: dict[str, int] = {}
    grown = {"weights loaded": "weights", "adapter attached": "adapter", "first forward": "kept for backward"}
    grown |= {"first backward": "gradients", "first step": "optimizer state"}
    for name, stage in stages.items():
        between_steps = {kind: there[kind] for kind in ("weights", "adapter", "optimizer state") if kind in there}
        # Backward frees what forward kept; the gradients are there until the step is over.
        there = between_steps if name != "first step" else there
        new = max(0, stage.allocated - sum(there.values()))
        there = {**there, grown.get(name, "other"): new}
        found[name] = {kind: there[kind] for kind in KINDS if there.get(kind)}
    return found


def timeline(stages: dict[str, Stage], peak: int, planned: int | None, title: str) -> str:
    """A row a stage in the order of the run: what is allocated by kind, and how high it was on the way there. `peak`
    and `planned` are bytes of the whole run."""
    kinds = by_kind(stages)
    end = max([peak, planned or 0, *(stage.peak for stage in stages.values()), 1])
    scale = (ALLOCATED - 80 - LEFT) / end
    parts, y = [text(10, 22, title, size=15)], 40
    parts += [text(x, 34, words, anchor="end") for x, words in ((ALLOCATED, "GiB then"), (HIGHEST, "at most"))]
    for name, stage in stages.items():
        parts.append(text(LEFT - 8, y + 15, name, anchor="end"))
        parts.append(bar(LEFT, y + 3, stage.peak * scale, 16, "passing"))
        x = float(LEFT)
        for kind, size in kinds[name].items():
            parts.append(bar(x, y + 3, size * scale, 16, COLOURS[KINDS.index(kind)]))
            x += size * scale
        for x, size in ((ALLOCATED, stage.allocated), (HIGHEST, stage.peak)):
            parts.append(text(x, y + 15, f"{size / GIB:.3f}", anchor="end"))
        y += ROW
    lines = [(f"measured {peak / GIB:.3f} GiB", peak, "")]
    if planned is not None:
        lines.append((f"planned {planned / GIB:.3f} GiB", planned, "dashed"))
    for number, (words, size, style) in enumerate(lines):
        parts += mark(LEFT + size * scale, 36, y + 4, y + 20 + 16 * number, f"peak {words}", style)
    shown = [kind for kind in KINDS if any(kind in parts_of for parts_of in kinds.values())]
    y += 20 + 16 * len(lines)
    entries = [(kind, COLOURS[KINDS.index(kind)]) for kind in shown]
    parts += legend(y, [*entries, ("on the way there", "passing")])
    return svg(y + 24, parts)
