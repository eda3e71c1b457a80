"""plan: the memory and the speed of a configuration, before anything is downloaded or any weight is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from trainer.config.compose import compose, started_from
from trainer.config.shelf import all_options
from trainer.errors import ConfigError, PlanError, StorageError
from trainer.libraries import loading

HELP = """trainer plan [key=value ...] [explain=true]

Predicts the memory of this very configuration: what it is made of, where the peak lies, which cards it fits, the
longest micro-batch, the speed by arithmetic, and what each change would bring. memory.budget_gib=24 answers yes or no.
output_dir=DIR writes plan.json and plan.svg there. explain=true shows the textbook's accounting beside it.
"""


def run(words: list[str]) -> int:
    flags = [word for word in words if word.startswith("-")]
    if flags:
        raise ConfigError(f"plan takes key=value words, not {' '.join(flags)}")
    explain = _explain([word for word in words if word.startswith("explain=")])
    rest = [word for word in words if not word.startswith("explain=")]
    rest, note = started_from(rest)
    config = compose(rest).config
    wanted = any(word.startswith("output_dir=") for word in rest)
    with loading():
        from trainer.certificate.settle import settle
        from trainer.memory.advice.picture import bar_chart
        from trainer.memory.advice.report import full_plan
        from trainer.memory.advice.show import show, show_explanation
        from trainer.memory.predict.planner import Planner
        from trainer.model.loading.base import planned_config
        from trainer.run.prepare import check_shape
        from trainer.tracking.console import Screen, quiet_libraries

    screen = Screen()
    quiet_libraries(screen)
    if note is not None:
        screen.say(note)
    shape = planned_config(config.model)
    config = replace(config, packing=settle(config.packing, shape))
    planner, options = Planner(config, shape), all_options()
    check_shape(config, planner.skeleton)
    try:
        plan = full_plan(planner.with_libraries(), options)
    except PlanError as error:
        screen.say(f"no prediction: {error}. A run starts without one", style="yellow")
        parameters = sum(parameter.numel() for parameter in planner.skeleton.parameters())
        screen.say(f"{config.recipe}: {parameters:,} parameters, {planner.device_type}")
        return 0
    show(screen, plan, config.recipe)
    if explain:
        show_explanation(screen, planner, options)
    if wanted:
        folder = Path(config.output_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "plan.json").write_text(json.dumps(plan.plain(), indent=1), encoding="utf-8")
            (folder / "plan.svg").write_text(bar_chart(plan, f"{config.recipe}: memory at the peak"), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"output_dir={folder}: the plan cannot be written: {error.strerror}.") from None
        screen.say(f"written: {folder / 'plan.json'}, {folder / 'plan.svg'}")
    return 0


def _explain(words: list[str]) -> bool:
    if not words:
        return False
    value = words[-1].partition("=")[2].lower()
    if value not in ("true", "false"):
        raise ConfigError(f"explain={value}: must be true or false")
    return value == "true"
