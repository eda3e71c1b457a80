"""The screen: one table at the start, one line a log step, one table at the end; train.log keeps the same words."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from trainer.errors import visible


class Screen:
    """Prints to the terminal and to train.log. Bars appear in a terminal only."""

    WIDTH = 110
    """columns where there is no terminal to ask, and in train.log"""

    def __init__(self) -> None:
        self.terminal = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else self.WIDTH)
        self._log: Console | None = None
        self._handle: IO[str] | None = None

    def keep_log(self, file: Path) -> None:
        """From now on every word also goes to this file."""
        self._handle = file.open("a", encoding="utf-8")
        self._log = Console(file=self._handle, width=self.WIDTH, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._handle is not None:
            with suppress(OSError):  # as in Metrics.close
                self._handle.close()
            self._log = self._handle = None

    def say(self, text: str, style: str | None = None) -> None:
        """One line."""
        self._print(Text(visible(text), style=style or ""))

    def table(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """Two columns: what, and its value."""
        table = Table(title=Text(visible(title), style="bold"), title_justify="left", box=None, show_header=False)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(Text(visible(name)), Text(visible(value)))
        self._print(table)

    def columns(self, title: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
        """A table with a header."""
        table = Table(title=Text(visible(title), style="bold"), title_justify="left", box=None, header_style="cyan")
        for name in header:
            table.add_column(Text(visible(name)), overflow="fold")
        for row in rows:
            table.add_row(*(Text(visible(cell)) for cell in row))
        self._print(table)

    def runs(self, parts: Iterable[tuple[str, str]]) -> None:
        """Text of several styles, one after the other."""
        self._print(Text.assemble(*((visible(text), style) for text, style in parts)))

    @contextmanager
    def bar(self, what: str, total: int, done: int = 0) -> Iterator[Bar]:
        """A progress bar with the time left; silent where there is no terminal."""
        progress = Progress(
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.terminal,
            transient=True,
            disable=not self.terminal.is_terminal,
        )
        with progress:
            yield Bar(progress, progress.add_task(what, total=total, completed=done))

    def _print(self, item: object) -> None:
        self.terminal.print(item)
        if self._log is not None and self._handle is not None:
            self._log.print(item)
            self._handle.flush()


class Bar:
    """One progress bar."""

    def __init__(self, progress: Progress, task):
        self._progress, self._task = progress, task

    def at(self, done: int) -> None:
        self._progress.update(self._task, completed=done)


def quiet_libraries(screen: Screen) -> None:
    """Libraries' chatter goes to no one; their bars appear in a terminal only."""
    import transformers

    logging.raiseExceptions = False  # of a library's log whose disk is full: a traceback for each of its lines
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")  # the start table says so
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.utils.logging.set_verbosity_error()
    if not screen.terminal.is_terminal:
        transformers.utils.logging.disable_progress_bar()
