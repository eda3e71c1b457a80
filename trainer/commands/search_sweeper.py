"""Hydra's sweeper of `search=optuna`."""

from __future__ import annotations

import sys
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from trainer.commands.drawn_trials import drawn_trials

NAME = "trainer_search"
"""In the group hydra/sweeper."""


class TrainerSearch(Sweeper):
    """Gives the launcher the trials that the trainer's search asks for, a few at a time, until there are enough."""

    __module__ = "hydra_plugins.trainer"  # Hydra makes plugins of this package only

    def __init__(self, params: DictConfig | None):
        self.params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")  # as Hydra's own sweeper does
        words = [*(f"{key}={values}" for key, values in self.params.items()), *arguments]
        for number, batch in drawn_trials(self.config, words):
            self.launcher.launch(batch, initial_job_idx=number)


def register() -> None:
    """Makes it known to Hydra, which locates plugins by their names in that package."""
    sys.modules[TrainerSearch.__module__] = sys.modules[__name__]
    Plugins.instance().register(TrainerSearch)
    target = f"{TrainerSearch.__module__}.{TrainerSearch.__name__}"
    ConfigStore.instance().store(group="hydra/sweeper", name=NAME, node={"_target_": target, "params": None})
