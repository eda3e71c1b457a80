"""train: one run, or with -m or sweep=NAME a sweep with a process and a folder for each trial."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hydra import main as hydra_main
from omegaconf import DictConfig

from trainer.commands.report_error import report
from trainer.commands.sweep import run_sweep
from trainer.config.compose import Planned, plan, quoted, register_names, started_from
from trainer.config.rules import missing_paths
from trainer.config.schema import Config
from trainer.config.shelf import CONF, GROUPS
from trainer.config.types import fields_of
from trainer.device.find import check_device
from trainer.errors import ConfigError, DataError, StorageError, TrainerError, closest, listing
from trainer.libraries import loading
from trainer.tracking.run_folder import check_usable
from trainer.training.engine import Engine

SWEEP_FLAGS = ("-m", "--multirun")
SHOW_FLAGS = ("--cfg", "-c", "--info", "-i", "--resolve", "--package", "-p")
"""Print what is composed."""
HYDRA_FLAGS = ("--hydra-help", "--shell-completion", "-sc")
"""Are about Hydra, not about a run."""
RUN_FLAGS = ("--run", "-r")
VALUE_FLAGS = ("--cfg", "-c", "--package", "-p", "--info", "-i")
"""Take the next word."""
INFO_VALUES = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
ELSEWHERE = dict.fromkeys(
    ("--config-name", "-cn", "--config-path", "-cp"),
    "a configuration of your own is a recipe: put it into ./recipes/NAME.yaml and say recipe=NAME. Options of your own "
    "lie in --config-dir DIR, as DIR/<group>/<name>.yaml",
)
"""Flags of Hydra whose work another word does here."""
MODE_FLAGS = (*SWEEP_FLAGS, *RUN_FLAGS, "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")
"""Of these Hydra takes one."""
CFG_VALUES = ("job", "hydra", "all")
CFG_JOB = (("--cfg", "job"), ("-c", "job"), ("--cfg=job", ""), ("-c=job", ""))
"""With what follows it."""
FLAGS = (*SWEEP_FLAGS, *SHOW_FLAGS, *HYDRA_FLAGS, *RUN_FLAGS)

HELP = """trainer train [key=value ...] [-m]    (the word train may be left out)

Fine-tunes. Picks options (optim=adamw), changes values (optim.learning_rate=1e-4), starts from a recipe (recipe=NAME).
--cfg job prints the composed configuration. -m sweeps over comma-separated values, sweep=NAME runs a prepared sweep:
each trial has its own process and subfolder; the same command with the same output_dir= runs what is missing.
"""


def run(words: list[str]) -> int:
    """Checks everything that can be checked without torch, then trains, or lets Hydra run the sweep."""
    flags, overrides = _split(words)
    if any(flag in HYDRA_FLAGS for flag in flags):
        register_names()
        _enter_hydra(lambda composed: None, [*flags, *overrides])
        return 0
    overrides, note = started_from(overrides)
    if any(flag.partition("=")[0] in SHOW_FLAGS for flag in flags):
        planned = plan(overrides)
        if any(flag in CFG_JOB for flag in zip(flags, [*flags[1:], ""], strict=True)):
            _print_comment(note, "picked: " + " ".join(f"{g}={o}" for g, o in sorted(planned.run.choices.items())))
        _enter_hydra(lambda composed: None, [*flags, *planned.words])
        return 0
    planned = plan(overrides, multirun=any(flag in SWEEP_FLAGS for flag in flags))
    try:
        missing = missing_paths(planned.run.config)
        if len(missing) > 1:  # one is told by the stage that looks for it
            raise DataError(listing(missing))
        check_processes(planned.run.config.engine)
        check_device(planned.run.config.device)
        if note is not None:
            print(note, flush=True)
        return _run_one(planned) if planned.trials is None else run_sweep(planned, _enter_hydra)
    except TrainerError as error:
        return report(error, planned.run.config.debug)


def _print_comment(*lines: str | None) -> None:
    """Lines above YAML, as comments."""
    for line in filter(None, lines):
        print(textwrap.fill(line, 120, initial_indent="# ", subsequent_indent="#   "), flush=True)


def check_processes(engine: Engine) -> None:
    """Raises ConfigError where a launcher started several processes for an engine of one; said by the first of them."""
    number = os.environ.get("WORLD_SIZE", "1")
    if number == "1" or not engine.one_process:
        return
    if os.environ.get("RANK", "0") != "0":
        raise SystemExit(ConfigError.exit_code)
    raise ConfigError(
        f"WORLD_SIZE={number}: a launcher started {number} processes, and engine=single is one process on one device. "
        "Start it without torchrun or accelerate launch"
    )


def _run_one(planned: Planned) -> int:
    """Trains in this process; within Hydra's own machinery only where the words ask for something of it."""
    check_usable(planned.folder)
    with _making(planned.folder):
        if planned.asks_hydra:
            _train_in_hydra(planned)
        else:
            _train(planned)
    return 0


def _train(planned: Planned) -> None:
    began = time.perf_counter()
    with loading():
        from trainer.run.train import run_training

    run_training(planned.run, planned.folder.absolute(), time.perf_counter() - began)


def _train_in_hydra(planned: Planned) -> None:
    raised: list[Exception] = []

    def job(composed: DictConfig) -> None:
        try:
            _train(planned)
        except Exception as error:  # Hydra would print it in its own way
            raised.append(error)

    _enter_hydra(job, [f"hydra.run.dir={quoted(planned.folder)}", *planned.words])
    if raised:
        raise raised[0]


def _enter_hydra(job: Callable[[DictConfig], float | None], words: list[str]) -> None:
    sys.argv = [sys.argv[0], *words]
    hydra_main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()


@contextmanager
def _making(folder: Path) -> Iterator[None]:
    """Makes the folder; where the run fails before it begins, no folder made for it is left, nor its parents."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"output_dir={folder}: cannot be made: {error.strerror}.") from None
        yield
    except BaseException:
        with suppress(OSError):  # only empty ones go
            for path in made:
                with suppress(FileNotFoundError):
                    path.rmdir()
        raise


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags with their values, and the overrides. Raises ConfigError for flags that are not known."""
    flags, overrides, unknown = [], [], []
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("-"):
            overrides.append(word)
            continue
        name, equals, _ = word.partition("=")
        key = word.lstrip("-")
        setting = key.partition("=")[0].partition(".")[0] in {*fields_of(Config), *GROUPS}
        if name not in FLAGS and setting and equals and word.startswith("--"):
            overrides.append(key)  # as `wandb agent` writes them
            continue
        if name not in FLAGS and setting:
            unknown.append(f"{word}: settings have no dashes. Drop them: {key if equals else f'{key}=VALUE'}")
        elif name in ELSEWHERE:
            unknown.append(f"{name}: {ELSEWHERE[name]}")
        elif name not in FLAGS:
            unknown.append(f"unknown flag {name}{closest(name, FLAGS)}. Allowed: {', '.join(FLAGS)}")
        flags.append(word)
        if name in VALUE_FLAGS and not equals:
            flags.append(next(remaining, ""))
    if unknown:
        raise ConfigError(listing(unknown))
    modes = [name for flag in flags if (name := flag.partition("=")[0]) in MODE_FLAGS]
    if len(modes) > 1:
        raise ConfigError(f"{' '.join(modes)}: only one of these at a time")
    if "--resolve" in flags and not modes:
        raise ConfigError("--resolve: goes with --cfg job")
    for flag, value in zip(flags, [*flags[1:], ""], strict=False):
        if flag in ("--info", "-i") and value not in INFO_VALUES:
            raise ConfigError(f"{flag} {value}: about what? Allowed: {', '.join(INFO_VALUES)}")
        if flag in ("--cfg", "-c") and value not in CFG_VALUES:
            raise ConfigError(f"{flag} {value}: what to print? Allowed: {', '.join(CFG_VALUES)}")
    return flags, overrides
