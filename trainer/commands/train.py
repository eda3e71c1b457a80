"""train: one run, or with -m or sweep=NAME a sweep with a process and a folder for each trial."""

from __future__ import annotations

import sys
from pathlib import Path

from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from trainer.commands.report_error import report
from trainer.config.compose import CONF, check, compose, parse, register, to_run
from trainer.errors import TrainerError
from trainer.tracking.run_folder import check_usable

FLAGS_WITH_VALUE = {"--cfg", "-c", "--package", "-p", "--info", "-i", "--config-dir", "-cd"}
"""Hydra's flags that take the next word."""

HELP = """trainer train [key=value ...] [-m]    (the word train may be left out)

Fine-tunes. Picks options (optim=adamw), changes values (optim.learning_rate=1e-4), starts from a recipe (recipe=NAME).
--cfg job prints the composed configuration. -m sweeps over comma-separated values, sweep=NAME runs a prepared sweep.
"""


def run(words: list[str]) -> int:
    """Checks everything that can be checked without torch, then lets Hydra run the job or the sweep."""
    flags, overrides = _split(words)
    sweeping = any(flag in ("-m", "--multirun") for flag in flags) or _sweep_chosen(overrides)
    if sweeping:
        check(parse(overrides))
    else:
        planned = compose(overrides)
        if not flags:
            check_usable(Path(planned.config.output_dir))
    register()
    sys.argv = [sys.argv[0], *flags, *overrides]
    hydra_main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    return 0


def job(composed: DictConfig) -> float:
    """What Hydra calls for a run, and in a process of its own for each trial of a sweep; returns the metric."""
    from trainer.training.train import run_training

    hydra = HydraConfig.get()
    choices = {group: choice for group, choice in hydra.runtime.choices.items() if "/" not in group}
    run = to_run(composed, choices, list(hydra.overrides.task))
    debug = run.config.debug
    try:
        summary = run_training(run, Path(hydra.runtime.output_dir))
    except TrainerError as error:
        code = report(error, debug)
        if hydra.mode is RunMode.MULTIRUN:
            return float("nan")  # the other trials go on; the summary of this one says what happened
        raise SystemExit(code) from None
    metric = summary["eval_loss"] if summary["eval_loss"] is not None else summary["final_loss"]
    return float("nan") if metric is None else metric


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags with their values, and the overrides."""
    flags, overrides = [], []
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("-"):
            overrides.append(word)
            continue
        flags.append(word)
        if word in FLAGS_WITH_VALUE:
            flags.append(next(remaining, ""))
    return flags, overrides


def _sweep_chosen(overrides: list[str]) -> bool:
    return any(word.startswith("sweep=") and word not in ("sweep=null", "sweep=") for word in overrides)
