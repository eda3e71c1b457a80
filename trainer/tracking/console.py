"""The screen: one table at the start, one line a log step, one table at the end; train.log keeps the same words."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
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
        self._print(_Line(visible(text), style or ""))

    def table(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """Two columns: what, and its value."""
        self._print(Text(visible(title), style="bold"))
        self._print(_Facts([(visible(name), visible(value)) for name, value in rows]))

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
        if self.terminal.is_terminal:
            self.terminal.print(item)
        else:
            print(_plain(self.terminal, item), file=self.terminal.file)
        if self._log is not None and self._handle is not None:
            self._handle.write(_plain(self._log, item) + "\n")
            self._handle.flush()


def _wrapped(text: str, width: int) -> list[str]:
    """The text in lines, broken between words only."""
    parts = [textwrap.wrap(p, width, break_long_words=False, break_on_hyphens=False) for p in text.split("\n")]
    return [line for part in parts for line in part or [""]]


def _plain(console: Console, item: object) -> str:
    """What a console without colours shows, without the blanks that tables fill their cells with."""
    with console.capture() as captured:
        console.print(item)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


@dataclass
class _Line:
    """One line of text: as it is in a file; in a terminal broken between words, and a path or an address never."""

    text: str
    style: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = _wrapped(self.text, options.max_width) if console.is_terminal else [self.text]
        yield from (Text(line, style=self.style) for line in lines)


@dataclass
class _Facts:
    """Names, and beside them values that are broken between words only: a path can be copied whole."""

    rows: list[tuple[str, str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = max((cell_len(name) for name, _ in self.rows), default=0)
        room = max(24, options.max_width - names - 4)
        for name, value in self.rows:
            for number, line in enumerate(_wrapped(value, room)):
                said = name if number == 0 else ""
                yield Text.assemble((f" {said}{' ' * (names - cell_len(said))}", "cyan"), f"  {line}")


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
