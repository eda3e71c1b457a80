"""resume: continues a stopped run from its own saved configuration."""

from __future__ import annotations

import time
from dataclasses import replace

from trainer.commands.arguments import run_argument
from trainer.libraries import loading
from trainer.training.train_settings import Resume

HELP = """trainer resume run=DIR

Continues a stopped run from its last good checkpoint with the configuration saved in the folder.
"""


def run(words: list[str]) -> int:
    folder, saved, _ = run_argument(words, allowed=())
    began = time.perf_counter()
    with loading():
        from trainer.run.train import run_training

    import_seconds = time.perf_counter() - began
    train = replace(saved.config.train, resume=Resume.auto)  # whatever was said about a second start: this is one
    run_training(replace(saved, config=replace(saved.config, train=train)), folder, import_seconds)
    return 0
