"""What can be picked: the options in conf/, and the recipes, packaged and the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from trainer.config.schema import SECTIONS
from trainer.errors import ConfigError
from trainer.registry import OPTIONS
from trainer.resources import shipped
from trainer.training.train_settings import Train

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
        try:
            text = self.file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return [f"Cannot be read: {error.strerror}."]
        for line in text.splitlines():
            if not line.startswith("#"):
                break
            if not line.startswith("# @package"):
                lines.append(line.removeprefix("#").strip())
        return lines

    def tree(self) -> dict[str, Any]:
        """Its content; raises ConfigError where it is no YAML mapping, or says a key twice."""
        try:
            # Not yaml.safe_load: that takes the last of two equal keys, and 1e-4 as text.
            self._text()
            tree = OmegaConf.to_container(OmegaConf.load(self.file))
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
            raise ConfigError(f"{self.file}{line}: not YAML: {error.problem}.") from None
        except (yaml.YAMLError, OSError) as error:
            raise ConfigError(f"{self.file}: not YAML: {error}.") from None
        except RecursionError:
            raise ConfigError(f"{self.file}: holds itself (an alias within its own anchor).") from None
        if not isinstance(tree, dict):
            raise ConfigError(f"{self.file}: a recipe is a mapping of keys to values.")
        return tree

    def line(self, key: str) -> int:
        """Line (from 1) on which a dotted key stands."""
        node = yaml.compose(self._text())
        line = 0
        for part in key.split("."):
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            found = next(((name, value) for name, value in pairs if name.value == part), None)
            if found is None:
                break
            line, node = found[0].start_mark.line, found[1]
        return line + 1

    def _text(self) -> str:
        try:
            return self.file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{self.file}: not UTF-8.") from None
        except OSError as error:
            raise ConfigError(f"{self.file}: cannot be read: {error.strerror}.") from None


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


def default_choices() -> dict[str, str]:
    """The option of each section in conf/config.yaml's defaults list."""
    entries = [entry for entry in _conf("config.yaml")["defaults"] if isinstance(entry, dict)]
    picks = {group: choice for entry in entries for group, choice in entry.items()}
    return {group: picks[group] for group in (*SECTIONS, "train")}


def root_values() -> dict[str, Any]:
    """The values in conf/config.yaml that belong to no section."""
    return {key: value for key, value in _conf("config.yaml").items() if key not in ("defaults", "hydra")}


def schema_of(group: str, choice: str) -> type:
    """The dataclass that types an option: its YAML names it."""
    if group == "train":
        return Train
    name = _conf(f"{group}/{choice}.yaml")["defaults"][0].removeprefix(f"/schema/{group}/").removesuffix("@_here_")
    return OPTIONS[group][name]


def option_values(group: str, choice: str) -> dict[str, Any]:
    """The values in an option's YAML."""
    return {key: value for key, value in _conf(f"{group}/{choice}.yaml").items() if key != "defaults"}


@cache
def _conf(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / name).read_text(encoding="utf-8"))
