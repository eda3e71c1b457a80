"""recipes/sweeps/: sweeps of W&B's service, with the words that its agent really makes of them."""

import re

import pytest
import yaml
from wandb.sdk.launch.sweeps import utils

from tests.support import REPO
from trainer.commands.train import _split
from trainer.config.compose import plan
from trainer.tracking.axes import Axes

FILES = sorted((REPO / "recipes/sweeps").glob("*.yaml"))
VALUES = {"optim.learning_rate": 0.00031, "adapter.r": 32}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("style", ["args", "args_no_hyphens"])
def test_an_agents_words_are_a_run(file, style):
    """`--key=value` as `${args}` writes it, and `key=value`."""
    sweep = yaml.safe_load(file.read_text())
    assert set(VALUES) == set(sweep["parameters"])
    made = utils.create_sweep_command_args({"args": {key: {"value": value} for key, value in VALUES.items()}})
    words = made[style]
    command = [part for part in sweep["command"] if not re.fullmatch(r"\$\{\w+\}", part)]
    assert command[:2] == ["-m", "trainer"]
    flags, overrides = _split([*command[2:], *words])
    run = plan(overrides).run
    assert flags == [] and run.choices["track"] == "wandb"
    assert run.config.optim.learning_rate == 0.00031 and run.config.adapter.r == 32


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_its_metric_is_sent(file):
    name = yaml.safe_load(file.read_text())["metric"]["name"]
    row = {"event": "eval", "step": 1, "eval_loss": 2.0, "perplexity": 7.4, "num_targets": 3}
    assert Axes().by_step(row)[name] == 2.0
