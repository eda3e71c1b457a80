"""How speed and memory grow with tokens a row, depth, vocabulary and samples a row: ours and flattened rows, a picture.

    python -m tests.bench growth [--write]

Whole runs of the speed bench's random model (NF4, fp32, full checkpointing), all threads, one step that counts. The
picture is tests/bench/growth.svg: tokens a second of wall time, and the peak above the model.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench._memory_step import machine, write_section
from tests.bench.speed import GIB, random_model, run, settings_of

PICTURE = Path(__file__).with_name("growth.svg")
NAMES = {"ours": ("this trainer", "#4e79a7"), "trainer_flat": ("Trainer + PEFT, flattened", "#e15759")}
PANEL_WIDTH, PANEL_HEIGHT, MARGIN = 230, 150, 50


@dataclass(frozen=True)
class Point:
    """One configuration."""

    tokens: int = 1024
    samples: int = 4
    fields: tuple[tuple[str, int], ...] = field(default=())
    """of the model that differ"""


AXES: dict[str, dict[int, Point]] = {
    "tokens a row, samples of 256": {n: Point(n, n // 256) for n in (256, 1024, 4096, 8192)},
    "depth": {n: Point(fields=(("num_hidden_layers", n),) if n != 4 else ()) for n in (4, 8)},
    "vocabulary": {n: Point(fields=(("vocab_size", n),) if n != 8192 else ()) for n in (8192, 65536)},
    "samples in a row of 4,096": {n: Point(4096, n) for n in (1, 4, 16)},
}
Measured = dict[str, tuple[float, float]]
"""Contestant -> (tokens a second, peak in GiB)"""


def measure(point: Point, scratch: Path) -> Measured:
    """Both contestants on one row a step of samples that are equally long."""
    model = random_model(scratch / "model", **dict(point.fields))
    text = "a " * (2 * point.tokens // point.samples)  # cut to the length
    rows = [{"text": f"{n} {text}"} for n in range(point.samples)]
    length = point.tokens // point.samples
    more = ["data.format=text", f"data.max_length={length}", "data.over_length=truncate"]
    settings = settings_of(model, scratch, "full", rows, point.tokens, 2, more)
    found = {}
    for name in NAMES:
        one = run(name, settings, scratch, os.cpu_count() or 1, None)
        tokens = sum(len(sample["input_ids"]) for sample in settings["samples"])
        found[name] = tokens / one["wall"], one["peak"] / GIB
        print(point, name, found[name], file=sys.stderr, flush=True)
    return found


def picture(results: dict[str, dict[int, Measured]]) -> str:
    """Two rows of panels, speed and peak; one column an axis. Horizontally the axis' values, evenly spaced."""
    width, height = len(results) * (PANEL_WIDTH + MARGIN) + MARGIN, 2 * (PANEL_HEIGHT + MARGIN) + 40
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
             'font-size="11">', '<rect width="100%" height="100%" fill="white"/>']  # fmt: skip
    for row, what in enumerate(("tokens / s", "peak, GiB")):
        for column, (axis, points) in enumerate(results.items()):
            x, y = MARGIN + column * (PANEL_WIDTH + MARGIN), 30 + row * (PANEL_HEIGHT + MARGIN)
            parts += _panel(x, y, f"{what}: {axis}", points, row)
    for number, (name, colour) in enumerate(NAMES.values()):
        parts.append(f'<text x="{MARGIN + number * 200}" y="{height - 8}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(left: int, top: int, title: str, points: dict[int, Measured], which: int) -> list[str]:
    """One axis and one quantity (0: speed, 1: peak), from zero to the highest."""
    highest = max(values[which] for point in points.values() for values in point.values())
    frame = f'width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" stroke="#bbb"'
    parts = [f'<text x="{left}" y="{top - 6}">{title}</text>', f'<rect x="{left}" y="{top}" {frame}/>']
    places = {value: left + 20 + (PANEL_WIDTH - 40) * n / (len(points) - 1) for n, value in enumerate(points)}
    for value, x in places.items():
        parts.append(f'<text x="{x:.0f}" y="{top + PANEL_HEIGHT + 13}" text-anchor="middle">{value:,}</text>')
    for number, (name, (_, colour)) in enumerate(NAMES.items()):
        corners = []
        for value, x in places.items():
            height = points[value][name][which]
            y = top + PANEL_HEIGHT - height / highest * (PANEL_HEIGHT - 22)
            corners.append(f"{x:.0f},{y:.0f}")
            words = f"{height:,.0f}" if which == 0 else f"{height:.2f}"
            parts.append(
                f'<text x="{x:.0f}" y="{y - 4 + 16 * number:.0f}" text-anchor="middle" fill="{colour}">{words}</text>'
            )
        parts.append(f'<polyline points="{" ".join(corners)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return parts


def main() -> None:
    """Measures every point once, prints the figures, and with --write keeps the picture and its table."""
    known: dict[Point, Measured] = {}
    for points in AXES.values():
        for point in points.values():
            if point not in known:
                with tempfile.TemporaryDirectory() as folder:
                    known[point] = measure(point, Path(folder))
    results = {axis: {value: known[point] for value, point in points.items()} for axis, points in AXES.items()}
    lines = [f"`python -m tests.bench growth --write`, {machine()}. ![growth](growth.svg)", "",
             "| axis | value | ours, tokens/s | flattened rows | ratio | ours, peak GiB | flattened rows |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for axis, points in results.items():
        for value, found in points.items():
            (speed, peak), (other_speed, other_peak) = found["ours"], found["trainer_flat"]
            lines.append(f"| {axis} | {value:,} | {speed:.0f} | {other_speed:.0f} | {speed / other_speed:.2f} | "
                         f"{peak:.3f} | {other_peak:.3f} |")  # fmt: skip
    print("\n".join(lines))
    print(json.dumps(results))
    if "--write" in sys.argv:
        PICTURE.write_text(picture(results), encoding="utf-8")
        write_section("growth", lines)
