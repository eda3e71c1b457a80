"""Arguments of the commands that work on a run folder: run=DIR and a few more, in Hydra's key=value form."""

from __future__ import annotations

import math
from enum import Enum
from pathlib import Path
from typing import TypeVar

from trainer.config.saved import CONFIG, Run, load_run
from trainer.device.find import Device
from trainer.errors import ConfigError, StorageError, closest, listing

TRUST = "model.trust_remote_code"
"""A folder may come from someone else: whether foreign code is run says the command line, not the folder."""
DEVICE = "device"
"""Where it is run, if elsewhere than the run was."""
Choice = TypeVar("Choice", bound=Enum)


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


def run_argument(words: list[str], allowed: tuple[str, ...]) -> tuple[Path, Run, dict[str, str]]:
    """The run folder named by run=DIR, the run saved there, on the device that device= says, and all arguments."""
    arguments = key_values(words, ("run", TRUST, DEVICE, *allowed))
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
    if DEVICE in arguments:
        saved.config.device = one_of(Device, DEVICE, arguments[DEVICE])
    return folder, saved, arguments


def one_of(kind: type[Choice], key: str, text: str) -> Choice:
    """An enum's member by its name. Raises ConfigError."""
    if text not in kind.__members__:
        raise ConfigError(
            f"{key}={text}: must be one of {', '.join(kind.__members__)}{closest(text, kind.__members__)}"
        )
    return kind[text]


def real_number(arguments: dict[str, str], key: str, least: float, default: float | None = None) -> float | None:
    """A number of at least `least`. Raises ConfigError."""
    text = arguments.get(key)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= least or math.isinf(value):
        raise ConfigError(f"{key}={text}: must be a number, {least:g} or more")
    return value


def whole_number(arguments: dict[str, str], key: str, least: int, default: int) -> int:
    """A whole number of at least `least`. Raises ConfigError."""
    text = arguments.get(key, str(default))
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{key}={text}: must be a whole number above {least - 1}")
    return int(text)
