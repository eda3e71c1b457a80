"""Optuna's part in a sweep: which values the next trial has, and whether one that runs is hopeless.

The study is made anew each time from what the sweep's folder says: nothing else keeps the sweep's state, a trial's
process may be on any machine that sees the folder, and a repeated command goes on where the last one ended.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.space import Interval, Space
from trainer.tracking.metrics import read_metrics
from trainer.tracking.search import Optuna
from trainer.tracking.sweep_folder import COMPLETED, PRUNED, SweepFolder, Trial

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


def draw(search: Optuna, space: Space, seed: int, number: int, told: list[Trial], beside: list[list[str]]) -> list[str]:
    """The words of trial `number`, after the trials `told` and while those with the words `beside` run.

    The same for the same history: each trial has a generator of its own.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(
        seed=seed + number, n_startup_trials=search.random_trials, constant_liar=search.parallel > 1
    )
    distributions = {key: _distribution(dimension) for key, dimension in space.items()}
    study = optuna.create_study(direction="minimize", sampler=sampler)
    running = [Trial(-1, "", words, "running", 0, None, None) for words in beside]
    for trial in (*(t for t in told if t.trial != number), *running):
        study.add_trial(_frozen(trial, space, distributions))
    values = study.ask(distributions).params
    return [f"{key}={value}" for key, value in values.items()]


class Pruning:
    """Watches one trial's evaluations; true once it is to end."""

    def __init__(self, search: Optuna, folder: SweepFolder, run_dir: Path):
        self._search, self._folder, self._run_dir, self._seen = search, folder, run_dir, 0

    def __call__(self) -> bool:
        losses = _evaluations(self._run_dir)
        if len(losses) <= self._seen:
            return False
        self._seen = len(losses)
        return hopeless(self._search.prune_after, losses, self._told())

    def _told(self) -> list[dict[int, float]]:
        done = [t for t in self._folder.trials().values() if t.status == COMPLETED and t.metric is not None]
        return [_evaluations(Path(trial.folder)) for trial in done]


def hopeless(prune_after: int, losses: dict[int, float], others: list[dict[int, float]]) -> bool:
    """Whether the median rule of Optuna ends a trial with these held-out losses by step beside completed `others`."""
    from optuna import create_study
    from optuna.pruners import MedianPruner
    from optuna.trial import TrialState, create_trial

    study: Study = create_study(direction="minimize")
    for steps in filter(None, others):
        study.add_trial(create_trial(value=steps[max(steps)], intermediate_values=steps))
    trial = create_trial(state=TrialState.RUNNING, intermediate_values=losses)
    return MedianPruner(n_startup_trials=prune_after, n_warmup_steps=0).prune(study, trial)


def _evaluations(run_dir: Path) -> dict[int, float]:
    """Held-out losses of a run by step, but for that before the first."""
    with suppress(OSError):
        rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if row.get("event") == "eval"]
        return {row["step"]: row["eval_loss"] for row in rows if row["step"] > 0 and row["eval_loss"] is not None}
    return {}


def _frozen(trial: Trial, space: Space, distributions: dict[str, BaseDistribution]) -> FrozenTrial:
    """What Optuna is to know of a trial."""
    from optuna.trial import TrialState, create_trial

    said = dict(word.split("=", 1) for word in trial.overrides)
    params = {key: _value(said[key], space[key]) for key in space if key in said}
    state, value, steps = TrialState.FAIL, None, {}
    if trial.trial < 0:
        state = TrialState.RUNNING
    elif trial.status == COMPLETED and trial.metric is not None:
        state, value = TrialState.COMPLETE, trial.metric
    elif trial.status == PRUNED:
        state, steps = TrialState.PRUNED, _evaluations(Path(trial.folder))
    return create_trial(
        state=state,
        value=value,
        params=params,
        distributions={key: distributions[key] for key in params},
        intermediate_values=steps,
    )


def _distribution(dimension: Interval | list[str]) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(dimension, Interval):
        return CategoricalDistribution(dimension)
    if dimension.whole:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def _value(word: str, dimension: Interval | list[str]) -> Any:
    if not isinstance(dimension, Interval):
        return word
    return int(word) if dimension.whole else float(word)
