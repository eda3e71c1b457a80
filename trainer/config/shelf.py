"""What can be picked: options, sweeps and recipes, those that come with the trainer and the user's own."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.config_file import ConfigFile
from trainer.config.own import own_folders
from trainer.config.schema import SECTIONS
from trainer.config.types import fields_of, shown
from trainer.errors import ConfigError, closest
from trainer.registry import OPTIONS
from trainer.resources import shipped
from trainer.training.train_settings import Train

CONF = shipped("conf")
GROUPS = (*SECTIONS, "train", "sweep", "recipe")


def recipes() -> dict[str, ConfigFile]:
    """Packaged recipes and the user's own in ./recipes and the group `recipe` of own folders; the user's win."""
    own = [Path.cwd() / "recipes", *(folder / "recipe" for folder in reversed(own_folders()))]
    found: dict[str, ConfigFile] = {}
    for folder in (shipped("recipes"), *own):
        for file in sorted(folder.glob("*.yaml")):
            found[file.stem] = ConfigFile(file.stem, file)
    return found


def options(group: str) -> list[str]:
    """Names that can be picked in a group."""
    if group == "recipe":
        return sorted(recipes())
    own = {name for name, option in own_options(group).items() if _is_option(group, option)}
    return sorted(own.union(_packaged(group)))


def usable(group: str) -> list[str]:
    """Options that can be made as they stand: one of the user's own may want a module that is not here, or a value."""
    names = []
    for name in options(group):
        with suppress(ConfigError):
            if fields_of(schema_of(group, name)).keys() <= option_values(group, name).keys():
                names.append(name)
    return names


def unknown_option(group: str, choice: Any) -> str:
    """What is wrong with a pick that is none of the options."""
    known, name = options(group), shown(choice)
    said = f"{group}={name}"
    if name.endswith((".yaml", ".yml")):
        stem, place = Path(name).stem, "./recipes" if group == "recipe" else f"./conf/{group}"
        return f"{said}: is picked by its name: {group}={stem}, for the file {place}/{stem}.yaml"
    there = own_options(group).get(name) if group != "recipe" else None
    if there is not None:
        return f"{there.file}:1: {said}: names no schema: {write_schema(group)}"
    if name in OPTIONS.get(group, {}):
        return f"{said}: is a class without values. Write conf/{group}/{name}.yaml: {write_schema(group)}"
    return f"{said}: no such option{closest(name, known)}. Allowed: {', '.join(known)}"


def own_options(group: str) -> dict[str, ConfigFile]:
    """The YAMLs in the folders of the user's own options, whatever they are."""
    files = [file for folder in reversed(own_folders()) for file in sorted((folder / group).glob("*.yaml"))]
    return {file.stem: ConfigFile(file.stem, file) for file in files}


def own_option(group: str, choice: str) -> ConfigFile | None:
    """The user's own YAML of this name, if it is one of the trainer's options: ./conf may be another program's too.

    Raises ConfigError where one that comes with the trainer has the same name.
    """
    option = own_options(group).get(choice) if group != "recipe" else None
    if option is None or not _is_option(group, option):
        return None
    if choice in _packaged(group):
        raise ConfigError(f"{option.file}: {group}={choice} comes with the trainer. Give this file another name")
    return option


def sweep_file(name: str) -> ConfigFile:
    """The YAML of a sweep, packaged or the user's own."""
    return own_option("sweep", name) or ConfigFile(name, CONF / "sweep" / f"{name}.yaml")


def _packaged(group: str) -> list[str]:
    return [file.stem for file in (CONF / group).glob("*.yaml")]


def _is_option(group: str, option: ConfigFile) -> bool:
    return group == "sweep" or option.says(f"/schema/{group}/")


def default_choices() -> dict[str, str]:
    """The option of each section in conf/config.yaml's defaults list."""
    entries = [entry for entry in _conf("config.yaml")["defaults"] if isinstance(entry, dict)]
    picks = {group: choice for entry in entries for group, choice in entry.items()}
    return {group: picks[group] for group in (*SECTIONS, "train")}


def root_values() -> dict[str, Any]:
    """The values in conf/config.yaml that belong to no section."""
    return {key: value for key, value in _conf("config.yaml").items() if key not in ("defaults", "hydra")}


def schema_of(group: str, choice: str) -> type:
    """The dataclass that types an option: its YAML names it. Raises ConfigError where a user's own names none."""
    option = own_option(group, choice)
    defaults = (_conf(f"{group}/{choice}.yaml") if option is None else option.tree()).get("defaults")
    schema = defaults[0] if isinstance(defaults, list) and len(defaults) == 1 else None
    found = re.fullmatch(rf"/schema/{group}/(\w+)@_here_", schema) if isinstance(schema, str) else None
    classes = {"default": Train} if group == "train" else OPTIONS[group]
    if found is not None and found[1] in classes:
        return classes[found[1]]
    place = f"{option.file}:{option.line('defaults')}"
    if found is None:
        raise ConfigError(f"{place}: names no schema: {write_schema(group)}")
    raise ConfigError(
        f"{place}: {schema}: no such schema{closest(found[1], classes)}. Allowed: {', '.join(classes)}; one of your "
        "own comes with --options FILE.py on the command line"
    )


def write_schema(group: str) -> str:
    """What an option's YAML must begin with."""
    names = ["default"] if group == "train" else list(OPTIONS[group])
    return f"its first line must be `defaults: [/schema/{group}/NAME@_here_]`. Allowed: {', '.join(names)}"


def option_values(group: str, choice: str) -> dict[str, Any]:
    """The values in an option's YAML."""
    option = own_option(group, choice)
    tree = _conf(f"{group}/{choice}.yaml") if option is None else option.tree()
    return {key: value for key, value in tree.items() if key != "defaults"}


@cache
def _conf(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / name).read_text(encoding="utf-8"))


def all_options() -> dict[str, dict[str, Any]]:
    """Every option of every section with the values of its YAML, by group and name; an own one that cannot be made
    is left out."""
    found: dict[str, dict[str, Any]] = {}
    for group in SECTIONS:
        found[group] = {}
        for name in usable(group):
            with suppress(ConfigError, OmegaConfBaseException):
                values = OmegaConf.merge(OmegaConf.structured(schema_of(group, name)), option_values(group, name))
                found[group][name] = OmegaConf.to_object(values)
    return found
