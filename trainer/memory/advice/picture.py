"""The plan as a bar chart: an SVG file, written by hand, so that it needs no plotting library.

What the picture is drawn on is light or dark as the reader's screen is.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.memory.advice.report import PlanReport

COLOURS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac")
WIDTH, LEFT, ROW = 760, 210, 26
STYLE = """<style>
.ground { fill: white } text { fill: #222 } line { stroke: #222; stroke-width: 2 } .passing { fill: #d9d9d9 }
.dashed { stroke-dasharray: 5 3 }
@media (prefers-color-scheme: dark) {
  .ground { fill: #1b1b1b } text { fill: #ddd } line { stroke: #ddd } .passing { fill: #4a4a4a }
}
</style>"""


def bar_chart(plan: PlanReport, title: str) -> str:
    """Lines of the peak as horizontal bars, and the stack of all of them against the budget, if there is one."""
    lines = plan.prediction.lines_gib
    budget = plan.budget_gib
    largest = max([*lines.values(), 1e-9])
    total = sum(lines.values())
    scale = (WIDTH - LEFT - 90) / largest
    parts = [text(10, 22, title, size=15)]
    y = 40
    for (name, value), colour in zip(lines.items(), COLOURS * 3, strict=False):
        parts.append(text(LEFT - 8, y + 15, name, anchor="end"))
        parts.append(bar(LEFT, y + 3, max(value * scale, 1), 16, colour))
        parts.append(text(LEFT + value * scale + 6, y + 15, f"{value:.3f} GiB"))
        y += ROW
    y += 12
    end = max(total, budget or 0)
    stack = (WIDTH - LEFT - 90) / end
    parts.append(text(LEFT - 8, y + 20, "all at the peak", anchor="end"))
    x = float(LEFT)
    for (_, value), colour in zip(lines.items(), COLOURS * 3, strict=False):
        parts.append(bar(x, y, value * stack, 28, colour))
        x += value * stack
    parts.append(text(x + 6, y + 20, f"{total:.2f} GiB"))
    if budget is not None:
        parts += mark(LEFT + budget * stack, y - 6, y + 34, y + 48, f"budget {budget:g} GiB")
    return svg(y + 64, parts)


def svg(height: float, parts: list[str]) -> str:
    """The whole file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">'
    ground = '<rect class="ground" width="100%" height="100%"/>'
    return "\n".join([head, STYLE, ground, *parts, "</svg>\n"])


def bar(x: float, y: float, width: float, height: float, paint: str) -> str:
    """`paint`: a colour, or a class of the style."""
    how = "fill" if paint.startswith("#") else "class"
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" {how}="{paint}"/>'


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'


def mark(x: float, top: float, bottom: float, y: float, words: str, style: str = "") -> list[str]:
    """An upright line, and at height `y` what it stands for."""
    kind = f' class="{style}"' if style else ""
    line = f'<line{kind} x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}"/>'
    return [line, text(x, y, words, anchor="middle")]


def legend(y: float, entries: list[tuple[str, str]]) -> list[str]:
    """Names beside their paint, in one row."""
    parts, x = [], 10.0
    for name, paint in entries:
        parts += [bar(x, y, 12, 12, paint), text(x + 17, y + 10, name)]
        x += 32 + 6.2 * len(name)
    return parts
