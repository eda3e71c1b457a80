"""Arguments of the commands that work on a run folder: run=DIR and a few more, in Hydra's key=value form."""

from __future__ import annotations

from pathlib import Path

from trainer.config.saved import CONFIG, Run, load_run
from trainer.errors import ConfigError, StorageError, closest, listing

TRUST = "model.trust_remote_code"
"""A folder may come from someone else: whether foreign code is run says the command line, not the folder."""


def key_values(words: list[str], allowed: tuple[str, ...]) -> dict[str, str]:
    """The words as a dict. Raises ConfigError for all that are not one of the allowed keys."""
    found, problems = {}, []
    allowed = (*allowed, "debug")  # read by the program itself
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in allowed:
            problems.append(f"{word}: unknown argument{closest(key, allowed)}. Allowed: {', '.join(allowed)}")
        found[key] = value
    if problems:
        raise ConfigError(listing(problems))
    return found


def run_argument(words: list[str], allowed: tuple[str, ...]) -> tuple[Path, Run]:
    """The run folder named by run=DIR and the run saved there."""
    arguments = key_values(words, ("run", TRUST, *allowed))
    if not arguments.get("run"):
        raise ConfigError("run=DIR is missing: which run folder?")
    folder = Path(arguments["run"])
    if not folder.is_dir():
        raise StorageError(f"run={folder}: there is no such folder.")
    saved = load_run(folder)
    if saved is None:
        trials = sorted(file.parent.name for file in folder.glob(f"*/{CONFIG}"))
        hint = f" Is it a sweep? Name a trial: run={folder / trials[0]}" if trials else ""
        raise StorageError(f"run={folder}: holds no run (no {CONFIG}).{hint}")
    saved.config.model.trust_remote_code = arguments.get(TRUST) == "true"
    return folder, saved
