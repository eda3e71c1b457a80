"""A sweep: Hydra's sweeper counts the trials and its launcher starts them; each trains in a process of its own.

The process is started here and not by a launcher, so that it is the same with every one of them: a trial that dies
leaves the sweep alive, no trial's memory outlives it, and its words reach the screen.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from trainer.config.compose import Planned, quoted
from trainer.config.own import OWN
from trainer.errors import TrainerError
from trainer.tracking.console import Screen
from trainer.tracking.sweep_folder import SweepFolder, Trial, metric_of

KINDS = {cls.exit_code: cls.kind for cls in TrainerError.__subclasses__() if cls.exit_code != 1}
INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
METRICS = {"eval_loss": "held-out loss", "final_loss": "training loss"}


def run_sweep(planned: Planned, enter_hydra: Callable[[Callable[[DictConfig], float], list[str]], None]) -> int:
    """Runs the trials, shows a table of them, and returns 0 or the exit code of the first that failed."""
    folder, screen = SweepFolder(planned.folder), Screen()
    folder.open()
    screen.say(f"sweep of {len(planned.trials)} trials in {folder.path}", style="bold")
    titles = [f"trial {n}: {words}" for n, words in enumerate(_settings(planned.trials))]
    job = _job(folder.path, titles, OWN.words())
    sweep_dir = f"hydra.sweep.dir={quoted(folder.path)}"
    try:
        enter_hydra(job, ["--multirun", sweep_dir, *planned.words])
    except SystemExit as stop:
        if stop.code not in INTERRUPTED:
            raise
        _end(planned, folder, screen)
        return stop.code
    finally:
        folder.close()
    return _end(planned, folder, screen)


def _job(sweep_dir: Path, titles: list[str], brought: list[str]) -> Callable[[DictConfig], float]:
    """What Hydra calls for each trial, here or where a launcher takes it; returns the metric, or NaN.

    `brought`: the flags of the user's own options.
    """

    def job(composed: DictConfig) -> float:
        hydra = HydraConfig.get()
        number, run_dir = hydra.job.num, sweep_dir / hydra.sweep.subdir
        overrides = OmegaConf.to_container(hydra.overrides.task)
        Screen().say(f"\n{titles[number]} ({number + 1} of {len(titles)})", style="bold")
        code = _train([*brought, *_trial_words(overrides, run_dir)])
        name, metric = metric_of(run_dir) if code == 0 else (None, None)
        SweepFolder(sweep_dir).record(Trial(number, str(run_dir), overrides, _status(code), code, metric, name))
        if code in INTERRUPTED:
            raise SystemExit(code)
        return math.nan if metric is None else metric

    return job


def _trial_words(overrides: list[str], run_dir: Path) -> list[str]:
    """The trial's own command line: not a sweep, and in its own folder."""
    kept = [word for word in overrides if word.lstrip("+").partition("=")[0] not in ("sweep", "output_dir")]
    return [*kept, f"output_dir={quoted(run_dir)}"]


def _train(words: list[str]) -> int:
    """Trains in a process of its own; returns its exit code, 128 + the signal's number if one killed it.

    The process has its own group, so that Ctrl-C comes to it once, from here.
    """
    process: subprocess.Popen | None = None
    received: list[int] = []

    def forward(signum: int, frame: object) -> None:
        received.append(signum)
        if process is not None:
            process.send_signal(signum)

    previous = {signum: signal.signal(signum, forward) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        command = [sys.executable, "-m", "trainer", "train", *words]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
        if received and process.poll() is None:
            process.send_signal(received[0])
        code = process.wait()
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    if received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


def _status(code: int) -> str:
    if code == 0:
        return "completed"
    if code in INTERRUPTED:
        return "interrupted"
    if code > 128:
        return f"killed by {signal.Signals(code - 128).name}"
    return f"failed: {KINDS.get(code, 'a bug')}"


def _end(planned: Planned, folder: SweepFolder, screen: Screen) -> int:
    """The table of all trials; returns the sweep's exit code."""
    done = folder.trials()
    metrics = {n: t.metric for n, t in done.items() if t.metric is not None and n < len(planned.trials)}
    best = min(metrics, key=metrics.get) if metrics else None
    rows, bad = [], []
    for number, settings in enumerate(_settings(planned.trials)):
        trial = done.get(number)
        if trial is None or trial.exit_code != 0:
            bad.append(number)
        rows.append(
            (
                str(number),
                settings,
                trial.status if trial is not None else "not run",
                _shown(trial) + ("  best" if number == best else ""),
                str(Path(trial.folder).relative_to(folder.path)) if trial is not None else "-",
            )
        )
    names = {trial.metric_name for trial in done.values() if trial.metric_name is not None}
    metric = METRICS[names.pop()] if len(names) == 1 else "loss"
    screen.columns(f"trials in {folder.path}", ("trial", "settings", "status", metric, "folder"), rows)
    if not bad:
        return 0
    screen.say(
        f"{len(bad)} of {len(rows)} trials did not complete. The same command with output_dir={folder.path} runs only "
        "these.",
        style="yellow",
    )
    return next((done[number].exit_code for number in bad if number in done), 1)


def _shown(trial: Trial | None) -> str:
    if trial is None or trial.exit_code != 0:
        return "-"
    return "not finite" if trial.metric is None else f"{trial.metric:.4f}"


def _settings(trials: list[list[str]]) -> list[str]:
    """Of each trial the words that are not the same in all trials; all of them where there is one trial only."""
    common = set.intersection(*(set(trial) for trial in trials)) if len(trials) > 1 else set()
    return [" ".join(word for word in trial if word not in common) for trial in trials]
