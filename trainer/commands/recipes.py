"""recipes: the shelf, packaged and the user's own."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap

from trainer.config.config_file import ConfigFile
from trainer.config.shelf import recipes
from trainer.errors import ConfigError, visible

HELP = """trainer recipes

Lists the recipes that come with the trainer and those in ./recipes, one line each: its base, its method, the memory it
takes and what it does, in the words of its head comment.
"""
COLUMNS = ("recipe", "base", "method", "memory", "what it does")


def run(words: list[str]) -> int:
    if words:
        raise ConfigError(f"recipes takes no arguments, not {' '.join(words)}")
    rows = [COLUMNS, *(_row(recipe) for recipe in recipes().values())]
    columns = shutil.get_terminal_size((0, 0)).columns if sys.stdout.isatty() or "COLUMNS" in os.environ else 0
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS) - 1)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    if 0 < columns < max(map(len, lines)):
        lines = [line for row in rows[1:] for line in (*_narrow(row, columns), "")]
    print("\n".join(lines))
    return 0


def _narrow(row: tuple[str, ...], columns: int) -> list[str]:
    """A recipe as a paragraph."""
    name, *facts, what = row
    said = ", ".join(f"{title} {fact}" for title, fact in zip(COLUMNS[1:], facts, strict=False) if fact != "-")
    lines = [line for text in (what, said) for line in textwrap.wrap(text, columns - 2, break_long_words=False)]
    return [name, *(f"  {line}" for line in lines)]


def _row(recipe: ConfigFile) -> tuple[str, ...]:
    comment = recipe.comment
    what = comment[0] if comment else "(no head comment)"
    try:
        recipe.tree()
    except ConfigError as error:
        what = f"cannot be used: {str(error).splitlines()[0]}"
    cells = recipe.name, *(_said(comment, topic) for topic in ("Base", "Method", "Memory")), what
    return tuple(visible(cell) for cell in cells)


def _said(comment: list[str], topic: str) -> str:
    """What a head comment says of a topic, in short: `Memory: 8.2 GiB (planned peak ...)` is `8.2 GiB`."""
    for line in comment:
        if line.startswith(f"{topic}: "):
            return re.split(r" \(|[,;:.](?: |$)", line.removeprefix(f"{topic}: "))[0]
    return "-"
