"""resume: continues a stopped run from its own saved configuration."""

from __future__ import annotations

from trainer.commands.arguments import run_argument

HELP = """trainer resume run=DIR

Continues a stopped run from its last good checkpoint with the configuration saved in the folder.
"""


def run(words: list[str]) -> int:
    folder, saved = run_argument(words, allowed=())
    from trainer.training.train import run_training

    run_training(saved, folder)
    return 0
