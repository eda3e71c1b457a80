"""A sweep: Hydra's sweeper counts the trials and its launcher starts them; each trains in a process of its own.

The process is started here and not by a launcher, so that it is the same with every one of them: a trial that dies
leaves the sweep alive, no trial's memory outlives it, and its words reach the screen.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from trainer.commands import search_sweeper
from trainer.commands.study import Pruning
from trainer.config.compose import Planned, quoted
from trainer.config.own import OWN
from trainer.errors import OutOfMemoryError, TrainerError
from trainer.tracking.console import Screen
from trainer.tracking.search import Search
from trainer.tracking.sweep_folder import COMPLETED, PRUNED, UNFIT, SweepFolder, Trial, memory_of, metric_of

KINDS = {cls.exit_code: cls.kind for cls in TrainerError.__subclasses__() if cls.exit_code != 1}
INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
METRICS = {
    "eval_loss": "held-out loss",
    "best_eval_loss": "best held-out loss",
    "final_loss": "training loss",
    "peak_memory_gib": "peak memory GiB",
    "wall_seconds": "seconds",
}
POLL_SECONDS = 1.0
"""between looks at the evaluations of a trial that may be pruned"""
NOT_A_TRIALS = ("sweep", "output_dir", "search")
"""Keys that a trial is not told: they are the sweep's."""
SAID = {
    PRUNED: "its held-out loss is worse than the median of the completed trials at this step",
    UNFIT: "the trial is not begun, and the sweep goes on",
}
"""What to think of an ending that is no mistake of anyone."""
OVER_BUDGET = "memory.over_budget"


def run_sweep(planned: Planned, enter_hydra: Callable[[Callable[[DictConfig], float], list[str]], None]) -> int:
    """Runs the trials, shows a table of them, and returns 0 or the exit code of the first that failed."""
    folder, screen = SweepFolder(planned.folder), Screen()
    search = planned.run.config.search
    folder.open()
    total, varied = planned.num_trials, _varied(planned)
    screen.say(f"sweep of {total} trials in {folder.path}", style="bold")
    job = _job(folder.path, search, total, varied, OWN.words())
    _pickle_by_value(OWN.module_of)
    words = ["--multirun", f"hydra.sweep.dir={quoted(folder.path)}", *planned.words]
    if search.draws:
        search_sweeper.register()
        words.append(f"hydra/sweeper={search_sweeper.NAME}")
    try:
        enter_hydra(job, words)
    except SystemExit as stop:
        if stop.code not in INTERRUPTED:
            raise
        _end(planned, folder, screen, varied)
        return stop.code
    finally:
        folder.close()
    return _end(planned, folder, screen, varied)


def _pickle_by_value(classes: Iterable[type]) -> None:
    """A launcher's own process gets the options that Hydra knows as pickles, and has no module of the user's."""
    for module in {cls.__module__ for cls in classes}:
        import cloudpickle  # submitit's

        cloudpickle.register_pickle_by_value(sys.modules[module])


def _job(
    sweep_dir: Path, search: Search, total: int, varied: set[str], brought: list[str]
) -> Callable[[DictConfig], float]:
    """What Hydra calls for each trial, here or where a launcher takes it; returns the metric, or NaN.

    `brought`: the flags of the user's own options.
    """

    def job(composed: DictConfig) -> float:
        hydra = HydraConfig.get()
        number, run_dir = hydra.job.num, sweep_dir / hydra.sweep.subdir
        overrides = OmegaConf.to_container(hydra.overrides.task)
        title = f"trial {number}: {_settings(overrides, varied)}"
        Screen().say(f"\n{title} ({number + 1} of {total})", style="bold")
        folder = SweepFolder(sweep_dir)
        prunes = search.draws and search.prune_after is not None
        watching = {"unwanted": Pruning(search, folder, run_dir)} if prunes else {}
        code = _train([*brought, *_trial_words(overrides, run_dir)], **watching)
        pruned = code is None
        name, metric = metric_of(run_dir, search.metric) if pruned or code == 0 else (None, None)
        status = PRUNED if pruned else _status(code, begun=(run_dir / "summary.json").exists())
        folder.record(Trial(number, str(run_dir), overrides, status, code or 0, metric, name, memory_of(run_dir)))
        if status in SAID:
            Screen().say(f"{status}: {SAID[status]}", style="yellow")
        if code in INTERRUPTED:
            raise SystemExit(code)
        return math.nan if metric is None else metric

    return job


def _trial_words(overrides: list[str], run_dir: Path) -> list[str]:
    """The trial's own command line: not a sweep, in its own folder, and not begun where the plan says no."""
    keys = [_key(word) for word in overrides]
    kept = [w for w, key in zip(overrides, keys, strict=True) if key.partition(".")[0] not in NOT_A_TRIALS]
    refusing = [] if OVER_BUDGET in keys else [f"{OVER_BUDGET}=refuse"]
    return [*kept, *refusing, f"output_dir={quoted(run_dir)}"]


def _train(words: list[str], unwanted: Callable[[], bool] | None = None) -> int | None:
    """Trains in a process of its own; returns its exit code, 128 + the signal's number if one killed it, or None where
    it was ended because it was `unwanted`, which is asked while it runs.

    The process has its own group, so that Ctrl-C comes to it once, from here.
    """
    process: subprocess.Popen | None = None
    received: list[int] = []
    ended = False

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
        while (code := _waited(process, None if unwanted is None or ended else POLL_SECONDS)) is None:
            if not received and unwanted():
                process.terminate()  # it saves its last step
                ended = True
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    if received:
        return 128 + received[0]
    if ended and code == 128 + signal.SIGTERM:
        return None
    return code if code >= 0 else 128 - code


def _waited(process: subprocess.Popen, seconds: float | None) -> int | None:
    """The exit code, or None where the process still runs after that time."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _status(code: int, begun: bool = True) -> str:
    """An exit code in words; `begun`: the run had got past its plan."""
    if code == 0:
        return COMPLETED
    if code == OutOfMemoryError.exit_code and not begun:
        return UNFIT
    if code in INTERRUPTED:
        return "interrupted"
    if code > 128:
        return f"killed by {signal.Signals(code - 128).name}"
    return f"failed: {KINDS.get(code, 'a bug')}"


def _end(planned: Planned, folder: SweepFolder, screen: Screen, varied: set[str]) -> int:
    """The table of all trials and the files of results; returns the sweep's exit code."""
    done = {number: trial for number, trial in folder.trials().items() if number < planned.num_trials}
    finished = [t for t in done.values() if t.status == COMPLETED and t.metric is not None]
    best = min(finished, key=lambda trial: trial.metric, default=None)
    folder.write_results([done[number] for number in sorted(done)], best)
    rows = []
    for number in range(planned.num_trials):
        trial = done.get(number)
        words = planned.trials[number] if planned.space is None else trial.overrides if trial is not None else []
        rows.append(
            (
                str(number),
                _settings(words, varied),
                trial.status if trial is not None else "not run",
                _shown(trial) + ("  best" if best is not None and number == best.trial else ""),
                str(Path(trial.folder).relative_to(folder.path)) if trial is not None else "-",
            )
        )
    names = {trial.metric_name for trial in done.values() if trial.metric_name is not None}
    metric = METRICS[names.pop()] if len(names) == 1 else "loss"
    screen.columns(f"trials in {folder.path}", ("trial", "settings", "status", metric, "folder"), rows)
    if best is not None:
        screen.say(f"best: trial {best.trial}, {METRICS[best.metric_name]} {best.metric:.4f}, in {best.folder}")
    bad = [n for n in range(len(rows)) if n not in done or (done[n].exit_code != 0 and done[n].status != UNFIT)]
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


def _varied(planned: Planned) -> set[str]:
    """The keys whose words are not the same in all trials; of a single trial all."""
    if planned.space is not None:
        return set(planned.space)
    trials = [set(trial) for trial in planned.trials]
    common = set.intersection(*trials) if len(trials) > 1 else set()
    return {_key(word) for trial in trials for word in trial - common}


def _settings(words: list[str], varied: set[str]) -> str:
    return " ".join(word for word in words if _key(word) in varied)


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]
