"""replay: steps of a run again, bit for bit, and their rows by what they do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trainer.commands.arguments import run_argument, whole_number
from trainer.errors import ConfigError
from trainer.libraries import loading

if TYPE_CHECKING:
    from trainer.run.replay import RankedRow, Replayed
    from trainer.tracking.console import Screen

HELP = """trainer replay run=DIR step=N [show=10]

Remakes step N of a run from the nearest checkpoint before it, or from its beginning: the same samples, and loss and
gradient norm equal to the last bit, which is checked and said. Its rows are ranked by their effect on the held-out
loss (to first order: their gradient times its gradient) and by the norm of their gradient. step=A-B: the rows of all
these steps. show=N: rows of each list. Nothing is written.
"""


def run(words: list[str]) -> int:
    folder, saved, arguments = run_argument(words, allowed=("step", "show"))
    first, last = _steps(arguments.get("step", ""))
    count = whole_number(arguments, "show", 0, 10)
    with loading():
        from trainer.run.replay import ranked, replay
        from trainer.tracking.console import Screen, quiet_libraries

    screen = Screen()
    quiet_libraries(screen)
    replayed = replay(saved, folder, first, last, screen)
    _say_equal(screen, replayed)
    by_effect, by_norm = ranked(replayed)
    if by_effect:
        _table(screen, "effect on the held-out loss (above 0 raises it), the most harmful first", by_effect[:count])
    _table(screen, "norm of the gradient, the largest first", by_norm[:count])
    return 0


def _steps(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(f"step={text}: must be a step's number from 1, or two of them as A-B")
    return first, last


def _say_equal(screen: Screen, replayed: Replayed) -> None:
    screen.say(f"step {replayed.last} remade from {replayed.started_from}")
    if not replayed.differs:
        screen.say(f"equal to the run to the last bit: {'; '.join(replayed.checked[-2:])}", style="green")
        return
    for words in replayed.differs:
        screen.say(f"not equal: {words}", style="yellow")


def _table(screen: Screen, title: str, rows: list[RankedRow]) -> None:
    cells = [
        (row.place, str(row.influence.step), _number(row.influence.effect), _number(row.influence.norm), row.begins)
        for row in rows
    ]
    screen.columns(title, ("row", "step", "effect", "gradient norm", "begins"), cells)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
