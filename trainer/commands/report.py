"""report: one self-contained page of a run folder, or of a sweep's."""

from __future__ import annotations

from pathlib import Path

from trainer.commands.arguments import key_values
from trainer.config.saved import CONFIG
from trainer.errors import ConfigError, StorageError
from trainer.tracking.sweep_folder import RECORD

HELP = """trainer report run=DIR

Writes DIR/report.html, one page that needs no network: loss, learning rate, gradient norm, speed, memory beside its
plan, lengths, the data's audit, what differs from the recipe, answers, what stands out, the environment. DIR is a run
folder or a sweep's. A run writes it at its end (train.report=false: not).
"""


def run(words: list[str]) -> int:
    folder = Path(key_values(words, ("run",)).get("run") or "")
    if folder == Path():
        raise ConfigError("run=DIR is missing: which run folder?")
    if not (folder / CONFIG).is_file() and not (folder / RECORD).is_file():
        raise StorageError(f"run={folder}: holds no run (no {CONFIG}) and no sweep (no {RECORD}).")
    from trainer.export.report.page import write_report

    try:
        print(f"written: {write_report(folder)}")
    except OSError as error:
        raise StorageError(f"run={folder}: report.html cannot be written: {error.strerror}.") from None
    return 0
