"""Benchmark tasks through lm-evaluation-harness, an extra: the trained model and its base, one after the other."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.export.reload import Trained


def check_harness(tasks: str) -> None:
    """Raises ConfigError where the library is absent."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"tasks={tasks}: needs lm-evaluation-harness: pip install 'trainer[tasks]'")


def run_tasks(trained: Trained, names: list[str], folder: Path | None, limit: int | None) -> dict[str, Any]:
    """Each task's figures by model. `folder` holds task files of one's own; `limit`: the first so many of each.

    Raises ConfigError for a task that there is not.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if folder is None else str(folder))
    missing = [name for name in names if name not in manager.all_tasks]
    if missing:
        raise ConfigError(f"tasks={','.join(missing)}: no such task. `lm_eval --tasks list` shows those there are.")
    model = HFLM(pretrained=trained.model.eval(), tokenizer=trained.encoder.tokenizer)
    found: dict[str, Any] = {name: {} for name in names}
    for who in ("trained", "base") if trained.adapted is not None else ("trained",):
        with trained.without_adapter() if who == "base" else nullcontext():
            results = simple_evaluate(model=model, tasks=names, task_manager=manager, limit=limit, verbosity="ERROR")
        for name in names:
            figures = results["results"][name]
            found[name][who] = {key: value for key, value in figures.items() if isinstance(value, float)}
    return found
