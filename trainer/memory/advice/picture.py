"""The plan as a bar chart: an SVG file, written by hand, so that it needs no plotting library."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.memory.advice.report import PlanReport

COLOURS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac")
WIDTH, LEFT, ROW = 760, 210, 26


def bar_chart(plan: PlanReport, title: str) -> str:
    """Lines of the peak as horizontal bars, and the stack of all of them against the budget, if there is one."""
    lines = plan.prediction.lines_gib
    budget = plan.budget_gib
    largest = max([*lines.values(), 1e-9])
    total = sum(lines.values())
    scale = (WIDTH - LEFT - 90) / largest
    parts = [_text(10, 22, title, size=15)]
    y = 40
    for (name, value), colour in zip(lines.items(), COLOURS * 3, strict=False):
        parts.append(_text(LEFT - 8, y + 15, name, anchor="end"))
        parts.append(_bar(LEFT, y + 3, max(value * scale, 1), 16, colour))
        parts.append(_text(LEFT + value * scale + 6, y + 15, f"{value:.3f} GiB"))
        y += ROW
    y += 12
    end = max(total, budget or 0)
    stack = (WIDTH - LEFT - 90) / end
    parts.append(_text(LEFT - 8, y + 20, "all at the peak", anchor="end"))
    x = float(LEFT)
    for (_, value), colour in zip(lines.items(), COLOURS * 3, strict=False):
        parts.append(_bar(x, y, value * stack, 28, colour))
        x += value * stack
    parts.append(_text(x + 6, y + 20, f"{total:.2f} GiB"))
    if budget is not None:
        at = LEFT + budget * stack
        parts.append(f'<line x1="{at:.1f}" y1="{y - 6}" x2="{at:.1f}" y2="{y + 34}" stroke="black" stroke-width="2"/>')
        parts.append(_text(at, y + 48, f"budget {budget:g} GiB", anchor="middle"))
    height = y + 64
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _text(x: float, y: float, words: str, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'
