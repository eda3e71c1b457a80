"""Hydra's sweeper of `search=optuna`: Hydra takes plugins from the package `hydra_plugins` only. Found at each start of
Hydra, so it imports nothing but what Hydra has imported by then."""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class TrainerSearch(Sweeper):
    """Gives the launcher the trials that the trainer's search asks for, a few at a time, until there are enough."""

    def __init__(self, params: DictConfig | None):
        self.params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        from trainer.commands.drawn_trials import drawn_trials

        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")  # as Hydra's own sweeper does
        words = [*(f"{key}={values}" for key, values in self.params.items()), *arguments]
        for number, batch in drawn_trials(self.config, words):
            self.launcher.launch(batch, initial_job_idx=number)


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="trainer_search",
    node={"_target_": f"{__name__}.TrainerSearch", "params": None},
    provider="trainer",
)
