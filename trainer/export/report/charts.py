"""Charts as SVG whose colours are the page's: light or dark as the reader's screen is, and as wide as it allows."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

SIZE = 4.6, 2.5
"""inches; the page scales it to its column"""
POINTS = 240
"""of a line, at most: more than a column has pixels for"""
PAINT = {f"#0101{n:02x}": f"var(--{name})" for n, name in enumerate("ink grid one two three four".split(), start=1)}
INK, GRID, *SERIES = PAINT
LOGARITHMIC = 30
"""times that the largest value is the smallest from which an axis is logarithmic"""
STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.formatter.limits": (-3, 5),
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "lines.linewidth": 1.5,
}


@dataclass(frozen=True)
class Line:
    name: str
    x: list[float]
    y: list[float]
    dots: bool = False
    pale: bool = False


@dataclass(frozen=True)
class Chart:
    """What is drawn over steps, and levels to compare it with."""

    title: str
    lines: list[Line] = field(default_factory=list)
    levels: list[tuple[str, float]] = field(default_factory=list)
    """names and heights of dashed lines"""
    zero: bool = False
    """whether the axis begins at zero, and is never logarithmic"""


@dataclass(frozen=True)
class Histogram:
    """Samples by a quantity, and its limit."""

    title: str
    x: str
    edges: list[float]
    counts: list[float]
    limit: float | None


def line_chart(chart: Chart, key: str) -> Markup | None:
    """SVG; `key` keeps its names apart from those of the page's other charts. None where there is nothing to draw."""
    lines = [line for line in chart.lines if line.x]
    if not lines:
        return None
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": key}):
        figure, axes = _axes("step")
        for line, colour in zip(lines, SERIES * 3, strict=False):
            x, y = thinned(line.x, line.y)
            marker = "o" if line.dots or len(x) == 1 else None
            axes.plot(x, y, color=colour, marker=marker, markersize=3.5, alpha=0.4 if line.pale else 1, label=line.name)
        for (name, height), style in zip(chart.levels, ("--", ":"), strict=False):
            axes.axhline(height, color=INK, linewidth=1, linestyle=style, label=name)
        values = [value for line in lines for value in line.y] + [height for _, height in chart.levels]
        if chart.zero:
            axes.set_ylim(bottom=0, top=max(*values, 1e-9) * 1.12)
        elif min(values) > 0 and max(values) > LOGARITHMIC * min(values):
            axes.set_yscale("log")
            axes.minorticks_off()  # they cost more than all the rest
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if len(lines) + len(chart.levels) > 1:
            axes.legend(loc="best", fontsize=8)
        return _svg(figure, chart.title, key)


def histogram(bars: Histogram, key: str) -> Markup | None:
    """SVG; None where there is nothing to draw."""
    if not bars.counts or len(bars.edges) != len(bars.counts) + 1:
        return None
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": key}):
        figure, axes = _axes(bars.x)
        axes.stairs(bars.counts, bars.edges, fill=True, color=SERIES[0], alpha=0.8)
        if bars.limit is not None:
            axes.axvline(bars.limit, color=INK, linewidth=1, linestyle="--", label=f"limit {bars.limit:,.0f}")
            axes.legend(loc="best", fontsize=8)
        axes.set_ylim(bottom=0)
        return _svg(figure, bars.title, key)


def thinned(x: list[float], y: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """The same line in at most POINTS points: of each stretch the lowest and the highest, so that spikes stay."""
    xs, ys = np.asarray(x), np.asarray(y)
    if len(ys) <= POINTS:
        return xs, ys
    stretches = np.array_split(np.arange(len(ys)), POINTS // 2)
    kept = sorted({int(s[pick(ys[s])]) for s in stretches for pick in (np.argmin, np.argmax)})
    return xs[kept], ys[kept]


def _axes(x: str):
    figure = Figure(figsize=SIZE)
    axes = figure.add_axes((0.12, 0.17, 0.87, 0.75))
    axes.set_xlabel(x)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure, title: str, key: str) -> Markup:
    """The picture as an element of a page, its ids its own."""
    buffer = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(?<=\bid=")|(?<=url\(#)|(?<=href="#)', f"{key}-", text)
    text = re.sub(r"(?<=<svg)[^>]*?(?= viewBox)", f' role="img" aria-label="{Markup.escape(title)}"', text, count=1)
    text = re.sub("|".join(PAINT), lambda match: PAINT[match[0]], text)
    return Markup(re.sub(r"\s*<metadata>.*?</metadata>|\n+", " ", text, flags=re.DOTALL))
