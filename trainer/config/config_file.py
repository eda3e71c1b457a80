"""One YAML of the configuration: a recipe, or an option or a sweep of the user's own. It is data and never code."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from trainer.errors import ConfigError

MAX_BYTES = 64 * 1024
"""What reads in half a second; the longest recipe that comes with the trainer has 3 KiB."""
MAX_VALUES = 10_000
"""Values that aliases may stand for: ten lines of nested ones stand for a billion."""


@dataclass(frozen=True)
class ConfigFile:
    """A YAML file and the name by which it is picked."""

    name: str
    file: Path

    @property
    def comment(self) -> list[str]:
        """Lines of the head comment."""
        lines = []
        try:
            head = self._head()
        except OSError as error:
            return [f"Cannot be read: {error.strerror}."]
        for line in head.splitlines():
            if not line.startswith("#"):
                break
            if not line.startswith("# @package"):
                lines.append(line.removeprefix("#").strip())
        return lines

    def says(self, words: str) -> bool:
        """Whether it holds these words, for a first look."""
        try:
            return words in self._head()
        except OSError:
            return False

    def tree(self) -> dict[str, Any]:
        """Its content; raises ConfigError where it is no YAML mapping, says a key twice, or stands for too much."""
        text = self._text()
        try:
            # Not yaml.safe_load: that takes the last of two equal keys, and 1e-4 as text.
            if _count(yaml.compose(text), {}) > MAX_VALUES:
                raise ConfigError(f"{self.file}: its aliases stand for more than {MAX_VALUES:,} values.")
            tree = OmegaConf.to_container(OmegaConf.load(StringIO(text)))
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
            raise ConfigError(f"{self.file}{line}: not YAML: {error.problem}.") from None
        except (yaml.YAMLError, OSError) as error:
            raise ConfigError(f"{self.file}: not YAML: {error}.") from None
        except RecursionError:
            raise ConfigError(f"{self.file}: holds itself (an alias within its own anchor).") from None
        if not isinstance(tree, dict):
            raise ConfigError(f"{self.file}: must be a mapping of keys to values.")
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

    def _head(self) -> str:
        with self.file.open(encoding="utf-8", errors="replace") as opened:
            return opened.read(MAX_BYTES)

    def _text(self) -> str:
        try:
            if self.file.stat().st_size > MAX_BYTES:
                raise ConfigError(f"{self.file}: is longer than {MAX_BYTES // 1024} KiB.")
            return self.file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{self.file}: not UTF-8.") from None
        except OSError as error:
            raise ConfigError(f"{self.file}: cannot be read: {error.strerror}.") from None


def _count(node: yaml.Node | None, counted: dict[int, int]) -> int:
    """Values that a node stands for, each alias counted as what it repeats. RecursionError where it holds itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in counted:
        counted[id(node)] = 0  # open: a collection that is counted holds at least itself
        children = (child for item in node.value for child in (item if isinstance(item, tuple) else (item,)))
        counted[id(node)] = 1 + sum(_count(child, counted) for child in children)
    elif not counted[id(node)]:
        raise RecursionError
    return counted[id(node)]
