"""why: what went wrong in a run, in plain words, and the rows behind it."""

from __future__ import annotations

from trainer.commands.arguments import run_argument
from trainer.libraries import loading

HELP = """trainer why run=DIR

Says what stands out in a run: steps that were skipped, spikes, divergence, a plateau, rows learnt by heart, memory that
creeps, and the error that ended it; with the rows of the steps behind it by file and line. No weight is read; to rank
the rows of one step by what they do: trainer replay run=DIR step=N.
"""


def run(words: list[str]) -> int:
    folder, saved, _ = run_argument(words, allowed=())
    with loading():
        from trainer.run.suspects import suspicions
        from trainer.tracking.console import Screen, quiet_libraries

    screen = Screen()
    quiet_libraries(screen)
    found, note = suspicions(saved, folder)
    if not found:
        screen.say("nothing stands out: no spike, no divergence, no plateau, no step skipped, no growing memory.")
    for suspicion in found:
        finding = suspicion.finding
        screen.say(f"{finding.kind}: {finding.text}", style="bold")
        if suspicion.rows:
            title = f"{len(suspicion.rows)} of the {suspicion.of} rows of step {', '.join(map(str, finding.steps[:8]))}"
            screen.columns(title, ("row", "begins"), suspicion.rows)
            screen.say(f"ranked by what they do: trainer replay run={folder} step={finding.steps[0]}")
    if note is not None:
        screen.say(note, style="yellow")
    return 0
