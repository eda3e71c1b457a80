"""From words on the command line to a typed, closed configuration. Hydra composes what `check` has let pass."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from trainer.config.check import check, files_of, for_hydra, parse, problems_in, without_null_picks
from trainer.config.rules import broken_rules, missing_paths
from trainer.config.saved import Run, differences
from trainer.config.schema import Config
from trainer.config.shelf import CONF, GROUPS, options
from trainer.config.space import Space, choices_of, corners, space_of
from trainer.config.types import fields_of, in_short
from trainer.config.written import Written
from trainer.errors import ConfigError, closest, listing
from trainer.registry import OPTIONS
from trainer.training.train_settings import Train

QUICKSTART = "quickstart"
PLUGINS = {
    "joblib": "hydra-joblib-launcher",
    "ray": "hydra-ray-launcher",
    "ray_aws": "hydra-ray-launcher",
    "rq": "hydra-rq-launcher",
    "ax": "hydra-ax-sweeper",
    "nevergrad": "hydra-nevergrad-sweeper",
}
"""Hydra's own launchers and sweepers that do not come with the trainer, and their packages."""


@dataclass(frozen=True)
class Planned:
    """What a command line asks for, with everything checked that can be checked without torch."""

    run: Run
    """the run; in a sweep what its trials share"""
    folder: Path
    """the run's folder, or the sweep's, which holds those of the trials"""
    words: list[str]
    """the overrides as Hydra takes them"""
    trials: list[list[str]] | None
    """in a sweep the overrides of each trial; of one that draws its values, of trials with each value once"""
    space: Space | None
    """in a sweep that draws its values, where from"""
    num_trials: int
    """1 where it is no sweep"""
    asks_hydra: bool
    """whether the words say something to Hydra itself, beyond where the run goes"""


def register(found: Written) -> None:
    """Puts the schemas, and what the picked files say, where Hydra finds them; no other file is opened."""
    store = ConfigStore.instance()
    store.store(group="schema", name="root", node=Config, package="_global_")
    store.store(group="schema/train", name="default", node=Train)
    for group, classes in OPTIONS.items():
        for name, cls in classes.items():
            store.store(group=f"schema/{group}", name=name, node=cls)
    for group, option, tree in found.own:
        store.store(group=group, name=option.name, node=tree, package="_global_" if group == "sweep" else None)
    for recipe, tree in found.recipes:
        store.store(group="recipe", name=recipe.name, node={**tree, "recipe": recipe.name}, package="_global_")


def register_names() -> None:
    """Puts the names of all that can be picked where Hydra's help and completion find them."""
    register(Written({}))
    for group in GROUPS:
        for name in set(options(group)) - {file.stem for file in (CONF / group).glob("*.yaml")}:
            ConfigStore.instance().store(group=group, name=name, node={})


def started_from(words: list[str]) -> tuple[list[str], str | None]:
    """Words that name neither a recipe nor data mean the quickstart; and the line that says so."""
    named = {word.lstrip("+").partition("=")[0] for word in words}
    if named & {"recipe", "data", "data.path", "data.sources"}:
        return words, None
    return [
        *words,
        f"recipe={QUICKSTART}",
    ], f"no recipe and no data are named: recipe={QUICKSTART}, on the embedded data"


def compose(words: list[str], trains: bool = True) -> Run:
    """The run that these overrides describe; `trains`: it is to be trained. Raises ConfigError with all mistakes."""
    overrides = without_null_picks(parse(words))
    check(overrides)
    with composing([o.input_line for o in overrides]) as composed:
        run = to_run(composed, words)
    _check_rules([run.config], trains)
    return run


def recipe_differences(run: Run) -> list[tuple[str, Any, Any]]:
    """Settings that a run has otherwise than its recipe, or than the defaults where it has none: each with both values.

    Raises ConfigError where the recipe is not here.
    """
    named = [word for word in run.overrides if word.partition("=")[0] == "recipe"]
    with composing(named) as composed:
        return differences(to_run(composed, named), run, free=("output_dir", "recipe"))


def plan(words: list[str], multirun: bool = False) -> Planned:
    """The run, or the sweep (`multirun`, or a sweep that the words pick). Raises ConfigError with all mistakes."""
    overrides = without_null_picks(parse(words))
    if not (multirun or any(o.key_or_group == "sweep" for o in overrides)):
        check(overrides)
    typed = corners(overrides)
    _check_each(typed)
    hydra_words = [o.input_line for o in overrides if o.is_hydra_override()]
    with composing([*typed[0], *hydra_words]) as composed:
        sweeping = multirun or composed.hydra.mode is RunMode.MULTIRUN
        folder = Path(composed.hydra.sweep.dir if sweeping else composed.hydra.run.dir)
        params = composed.hydra.sweeper.get("params") or {}
        run = to_run(composed, words)
    asks_hydra = any(o.is_hydra_override() and o.key_or_group != "hydra.run.dir" for o in overrides)
    if not sweeping:
        _check_rules([run.config])
        searching = [o.input_line for o in overrides if o.key_or_group.partition(".")[0] == "search"]
        if searching:
            raise ConfigError(f"{' '.join(searching)}: is of sweeps only: add -m or sweep=NAME, or leave it out")
        return Planned(run, folder, for_hydra(overrides), None, None, 1, asks_hydra)
    swept = [*parse([f"{key}={values}" for key, values in params.items()]), *overrides]
    search, space = run.config.search, None
    if search.draws:
        trials, space = corners(swept), space_of(swept)
        if not space:
            raise ConfigError("search=optuna: nothing is varied. Give values with commas or an interval to some key")
    else:
        trials = expand(swept)
    _check_each(trials)
    _check_rules(configs(trials))
    num_trials = search.trials if search.draws else len(trials)
    return Planned(run, folder, for_hydra(overrides), trials, space, num_trials, asks_hydra)


def expand(overrides: list[Override]) -> list[list[str]]:
    """The overrides of each trial: all combinations, the last key varying fastest, as Hydra's own sweeper counts."""
    by_key: dict[str, list[str]] = {}
    for override in overrides:
        if override.is_hydra_override():
            continue
        key = override.get_key_element()
        if override.is_sweep_override():
            by_key[key] = [f"{key}={value}" for value in choices_of(override)]
        else:
            by_key[key] = [override.input_line]
    return [list(trial) for trial in product(*by_key.values())]


def _check_each(trials: list[list[str]]) -> None:
    """Raises ConfigError with the mistakes of all trials that show before composing."""
    problems = [problem for trial in trials for problem in problems_in(parse(trial))]
    if problems:
        raise ConfigError(listing(list(dict.fromkeys(problems))))


def _check_rules(configs: Iterable[Config], trains: bool = True) -> None:
    """Raises ConfigError with the rules that the configurations break, and which do where not all do."""
    broken: dict[str, list[str]] = {}
    count = 0
    for count, config in enumerate(configs, start=1):
        for problem in broken_rules(config, trains):
            broken.setdefault(problem, []).append(str(count - 1))
    problems = [p if len(n) == count else f"{p} (trial {', '.join(n)})" for p, n in broken.items()]
    if problems and trains:
        problems += missing_paths(config)  # with one look at the screen all can be mended
    if problems:
        raise ConfigError(listing(problems))


def configs(trials: list[list[str]]) -> Iterator[Config]:
    """The configuration of each trial. Composing takes Hydra a third of a second: once for all that pick the same."""
    trees: dict[tuple[str, ...], DictConfig] = {}
    for trial in trials:
        overrides = parse(trial)
        picks = tuple(o.input_line for o in overrides if o.key_or_group in GROUPS)
        if picks not in trees:
            with composing(list(picks)) as composed:
                with flag_override(composed, ["struct", "readonly"], False):
                    del composed["hydra"]
                trees[picks] = composed
        tree = deepcopy(trees[picks])
        try:
            for override in overrides:
                if override.key_or_group not in GROUPS:
                    OmegaConf.update(tree, override.key_or_group, override.value(), merge=True, force_add=True)
            yield _config(tree)
        except OmegaConfBaseException as error:
            raise ConfigError(in_short(error)) from error


def to_run(composed: DictConfig, overrides: list[str]) -> Run:
    """Typed dataclasses from a composed tree with Hydra's own node."""
    picked = {group: choice for group, choice in composed.hydra.runtime.choices.items() if group in GROUPS}
    return Run(_config(composed), {group: choice for group, choice in picked.items() if choice is not None}, overrides)


@contextmanager
def composing(words: list[str]) -> Iterator[DictConfig]:
    """The composed tree, through Hydra's compose API over conf/, also while a job of hydra.main runs.

    Inside, interpolations resolve; what Hydra or OmegaConf raise there becomes a ConfigError.
    """
    saved = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            overrides = parse(words)
            register(files_of(overrides))
            yield _composed(for_hydra(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(in_short(error) + _not_installed(error)) from error
    except RecursionError:
        raise ConfigError("a value is nested too deeply to be read") from None
    finally:
        GlobalHydra.instance().hydra = saved


def _not_installed(error: BaseException) -> str:
    """What to install where a plugin of Hydra is asked for that is not there, and which are."""
    missing = re.search(r"'hydra/(launcher|sweeper)/(\w+)'", str(error))
    if missing is None:
        return ""
    kind, name = missing.groups()
    there = [name.removesuffix(".yaml") for name in ConfigStore.instance().list(f"hydra/{kind}")]
    if (kind, name) == ("sweeper", "optuna"):
        fix = "is search=optuna here"
    elif name in PLUGINS:
        fix = f"comes with: pip install {PLUGINS[name]}"
    else:
        fix = f"is not installed{closest(name, there)}"
    return f": {name} {fix}. Installed: {', '.join(there)}"


def _composed(words: list[str]) -> DictConfig:
    try:
        return hydra_compose("config", overrides=words, return_hydra_config=True)
    except (AttributeError, TypeError, ValueError) as error:  # some hydra.* values, of a kind that it does not expect
        raise ConfigError(f"hydra cannot compose this: {in_short(error)}") from error


def quoted(value: object) -> str:
    """A value as Hydra's grammar takes it, whatever characters it holds."""
    return QuotedString(str(value), Quote.single).with_quotes()


def _config(composed: DictConfig) -> Config:
    values = {}
    for name in fields_of(Config):
        node = composed[name]
        values[name] = OmegaConf.to_object(node) if OmegaConf.is_config(node) else node
    return Config(**values)
