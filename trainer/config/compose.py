"""From words on the command line to a typed, closed configuration.

Hydra composes; this module makes sure that nothing a user writes can vanish: every key in an override or a recipe is
held against the dataclass fields (Hydra itself lets `+group.key=1` pass and drops it), every value against its type,
and all mistakes are reported at once.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.registry import OPTIONS
from trainer.config.rules import broken_rules
from trainer.config.saved import Run
from trainer.config.schema import SECTIONS, Config, Train
from trainer.config.types import fields_of, value_problem
from trainer.errors import ConfigError, closest, listing
from trainer.resources import shipped

CONF = shipped("conf")
GROUPS = (*SECTIONS, "train", "sweep", "recipe")


@dataclass(frozen=True)
class Recipe:
    """One YAML of the group `recipe`."""

    name: str
    file: Path

    @property
    def comment(self) -> list[str]:
        """Lines of the head comment."""
        lines = []
        for line in self.file.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            if not line.startswith("# @package"):
                lines.append(line.removeprefix("#").strip())
        return lines

    def tree(self) -> dict[str, Any]:
        """Its content. Raises ConfigError where it is no YAML mapping."""
        try:
            tree = yaml.safe_load(self.file.read_text(encoding="utf-8")) or {}
        except yaml.YAMLError as error:
            line = f":{error.problem_mark.line + 1}" if getattr(error, "problem_mark", None) else ""
            raise ConfigError(f"{self.file}{line}: not YAML: {getattr(error, 'problem', error)}.") from None
        if not isinstance(tree, dict):
            raise ConfigError(f"{self.file}: a recipe is a mapping of keys to values.")
        return tree


def recipes() -> dict[str, Recipe]:
    """Packaged recipes and the user's own in ./recipes; the user's win."""
    found: dict[str, Recipe] = {}
    for folder in (shipped("recipes"), Path.cwd() / "recipes"):
        for file in sorted(folder.glob("*.yaml")):
            found[file.stem] = Recipe(file.stem, file)
    return found


def options(group: str) -> list[str]:
    """Names that can be picked in a group."""
    if group == "recipe":
        return sorted(recipes())
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def register() -> None:
    """Puts schemas and recipes where Hydra finds them."""
    store = ConfigStore.instance()
    store.store(group="schema", name="root", node=Config, package="_global_")
    store.store(group="schema/train", name="default", node=Train)
    for group, classes in OPTIONS.items():
        for name, cls in classes.items():
            store.store(group=f"schema/{group}", name=name, node=cls)
    for recipe in recipes().values():
        node = {**recipe.tree(), "recipe": recipe.name}
        store.store(group="recipe", name=recipe.name, node=node, package="_global_")


def compose(words: list[str]) -> Run:
    """The run that these overrides describe. Raises ConfigError with all mistakes."""
    parsed = parse(words)
    check(parsed)
    with _hydra():
        register()
        try:
            composed = hydra_compose("config", overrides=words, return_hydra_config=True)
            choices = {g: c for g, c in composed.hydra.runtime.choices.items() if g in GROUPS}
            run = to_run(composed, dict(choices), words)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_first_sentence(error)) from error
    problems = broken_rules(run.config)
    if problems:
        raise ConfigError(listing(problems))
    return run


def to_run(composed: DictConfig, choices: dict[str, str], overrides: list[str]) -> Run:
    """Typed dataclasses from a composed tree."""
    values = {}
    for name in fields_of(Config):
        node = composed[name]
        values[name] = OmegaConf.to_object(node) if OmegaConf.is_config(node) else node
    return Run(Config(**values), {g: c for g, c in choices.items() if c is not None}, overrides)


def from_saved(choices: dict[str, str], values: dict[str, Any]) -> Config:
    """The configuration of a run folder: its options composed anew, with its own values in every key."""
    picks = [f"{group}={choice}" for group, choice in choices.items() if group in SECTIONS]
    with _hydra():
        register()
        try:
            composed = hydra_compose("config", overrides=picks)
            merged = OmegaConf.merge(composed, values)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(f"the saved configuration does not fit this version: {_first_sentence(error)}") from error
        return to_run(merged, choices, []).config


def parse(words: list[str]) -> list[Override]:
    """Hydra's own grammar. Raises ConfigError for all words that are not of it."""
    parser, parsed, problems = OverridesParser.create(), [], []
    for word in words:
        try:
            parsed += parser.parse_overrides([word])
        except OverrideParseException as error:
            reason = str(error).splitlines()[0]
            problems.append(f"{word}: not of the form key=value ({reason})")
    if problems:
        raise ConfigError(listing(problems))
    return parsed


def check(overrides: list[Override]) -> None:
    """Raises ConfigError for unknown options, keys and values of the wrong type, in overrides and in the recipe."""
    problems: list[str] = []
    choices = _default_choices()
    known_recipes = recipes()
    picked = {o.key_or_group: o for o in overrides if o.key_or_group in GROUPS}
    recipe_tree: dict[str, Any] = {}
    chosen_recipe = None
    if "recipe" in picked:
        for name in _values(picked["recipe"]):
            if name is not None and name not in known_recipes:
                problems.append(_unknown_option("recipe", name))
            elif name is not None:
                chosen_recipe = known_recipes[name]
    if chosen_recipe is not None:
        recipe_tree = chosen_recipe.tree()
        for entry in recipe_tree.pop("defaults", []):
            problems += _take_default(entry, chosen_recipe, choices)
    for group, override in picked.items():
        for name in _values(override):
            if group != "recipe" and name not in options(group) and not (group == "sweep" and name is None):
                problems.append(_unknown_option(group, name))
            elif group != "recipe":
                choices[group] = name
    schemas = {group: schema_of(group, choice) for group, choice in choices.items() if group in (*SECTIONS, "train")}
    values = {group: option_values(group, choice) for group, choice in choices.items() if group in SECTIONS}
    if chosen_recipe is not None:
        for key, value in _leaves(recipe_tree, schemas):
            problem = _problem(key, value, schemas, values, adding=False)
            if problem:
                problems.append(f"{_place(chosen_recipe.file, key)}: {problem}")
            elif key.startswith("model.architecture."):
                values["model"].setdefault("architecture", {})[key.split(".", 2)[2]] = value
    for override in overrides:
        key = override.key_or_group
        if key in GROUPS or key == "hydra" or key.startswith(("hydra.", "hydra/")):
            continue
        if override.is_delete():
            problems.append(f"~{key}: a setting cannot be taken away, every one has a value")
            continue
        for value in _values(override):
            problem = _problem(key, value, schemas, values, adding=override.is_add() or override.is_force_add())
            if problem:
                problems.append(problem)
    if problems:
        raise ConfigError(listing(list(dict.fromkeys(problems))))


def schema_of(group: str, choice: str) -> type:
    """The dataclass that types an option: its YAML names it."""
    if group == "train":
        return Train
    tree = yaml.safe_load((CONF / group / f"{choice}.yaml").read_text(encoding="utf-8"))
    name = tree["defaults"][0].removeprefix(f"/schema/{group}/").removesuffix("@_here_")
    return OPTIONS[group][name]


def option_values(group: str, choice: str) -> dict[str, Any]:
    """The values in an option's YAML."""
    tree = yaml.safe_load((CONF / group / f"{choice}.yaml").read_text(encoding="utf-8"))
    tree.pop("defaults")
    return tree


def _default_choices() -> dict[str, str]:
    tree = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))
    choices = {}
    for entry in tree["defaults"]:
        if isinstance(entry, dict):
            for group, choice in entry.items():
                if group in (*SECTIONS, "train"):
                    choices[group] = choice
    return choices


def _take_default(entry: Any, recipe: Recipe, choices: dict[str, str]) -> list[str]:
    """Notes what one entry of a recipe's defaults list picks."""
    problems = []
    for word, choice in entry.items() if isinstance(entry, dict) else []:
        group = word.removeprefix("override ").strip().removeprefix("/")
        if group.startswith("hydra"):
            continue
        if group not in GROUPS:
            problems.append(f"{recipe.file}: unknown group {group}{closest(group, GROUPS)}")
        elif choice not in options(group):
            problems.append(f"{recipe.file}: {_unknown_option(group, choice)}")
        else:
            choices[group] = choice
    return problems


def _unknown_option(group: str, name: Any) -> str:
    known = options(group)
    return f"{group}={name}: no such option{closest(str(name), known)}. Allowed: {', '.join(known)}"


def _problem(key: str, value: Any, schemas: dict[str, type], values: dict[str, Any], adding: bool) -> str | None:
    """What is wrong with key=value, or None."""
    section, _, rest = key.partition(".")
    root = fields_of(Config)
    if section not in root:
        return f"{key}: unknown key{closest(key, _all_keys(schemas))}"
    if not rest:
        if section in schemas:
            return f"{key}={value}: is a group with the options {', '.join(options(section))}"
        return value_problem(key, value, root[section].type)
    if section not in schemas:
        return f"{key}: unknown key; {section} has no parts"
    fields = fields_of(schemas[section])
    name, _, inner = rest.partition(".")
    if name not in fields:
        hint = closest(name, fields) or closest(key, _all_keys(schemas), cutoff=0.8)
        return f"{key}: unknown key{hint}. {section} has: {', '.join(fields) or 'no keys'}"
    if not inner:
        return value_problem(key, value, fields[name].type)
    inside = values.get(section, {}).get(name)
    if not isinstance(inside, dict):
        return f"{key}: unknown key; {section}.{name} has no parts"
    if inner.split(".")[0] not in inside and not adding:
        return (
            f"{key}: unknown key{closest(inner, inside)}. {section}.{name} has: {', '.join(inside)}. "
            f"To add a field, write +{key}="
        )
    return None


def _all_keys(schemas: dict[str, type]) -> list[str]:
    """Every key of the configuration with these options, and its bare name's full form."""
    keys = [name for name in fields_of(Config) if name not in schemas]
    for section, cls in schemas.items():
        keys += [f"{section}.{name}" for name in fields_of(cls)]
    return keys


def _leaves(tree: dict[str, Any], schemas: dict[str, type], prefix: str = "") -> list[tuple[str, Any]]:
    """key, value pairs of a recipe's own tree; what stands in a field is a value, whatever its shape."""
    leaves: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key == "hydra" or key == "recipe":
            continue
        open_section = key in schemas or key == "model.architecture"
        if isinstance(value, dict) and open_section:
            leaves += _leaves(value, schemas, f"{key}.")
        else:
            leaves.append((key, value))
    return leaves


def _place(file: Path, key: str) -> str:
    """file:line of a key in a YAML file."""
    node = yaml.compose(file.read_text(encoding="utf-8"))
    line = node.start_mark.line
    for part in key.split("."):
        for name, value in getattr(node, "value", []):
            if name.value == part:
                node, line = value, name.start_mark.line
                break
    return f"{file}:{line + 1}"


def _values(override: Override) -> list[Any]:
    """The value, or each value of a sweep that can be listed."""
    if not override.is_sweep_override():
        value = override.value()
        return [value]
    if override.is_interval_sweep():
        interval = override.value()
        return [interval.start, interval.end]
    if override.is_glob_sweep():
        return []
    return [yaml.safe_load(text) for text in override.sweep_string_iterator()]


def _first_sentence(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


@contextmanager
def _hydra():
    """Hydra's compose API over conf/, also while a job of hydra.main runs."""
    saved = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = saved
