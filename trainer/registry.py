"""The seam: an option is a dataclass registered in its group, and a YAML beside its siblings.

`@option("optim", "adamw")` on a dataclass that extends its section, with `conf/optim/adamw.yaml` naming it as its
schema, makes `optim=adamw` exist. The dataclass has typed fields without defaults (the values stand in the YAML,
once) and the method that does the work. Modules with options import torch only inside those methods. Several YAMLs
may share one dataclass where only values differ (the group `model`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, TypeVar

Option = TypeVar("Option", bound=type)

OPTIONS: dict[str, dict[str, type]] = {}


class Section:
    """Base of every section's options: an option answers for itself."""

    def problems(self, config: Any) -> list[str]:
        """What clashes with the rest of the configuration, each with its reason and the way out.

        `config` is all of it. What is asked of other options is what they can do (`adapter.trains_base`), not which
        they are.
        """
        return []


def option(group: str, name: str) -> Callable[[Option], Option]:
    """Class decorator: registers a dataclass as the schema `/schema/<group>/<name>`."""

    def register(cls: Option) -> Option:
        options = OPTIONS.setdefault(group, {})
        assert name not in options, f"{group}={name} is registered twice"
        options[name] = cls
        return cls

    return register


def name_of(group: str, section: Any) -> str:
    """The name under which a section's class is registered, for messages; of one that is not, its class's."""
    names = [name for name, cls in OPTIONS.get(group, {}).items() if cls is type(section)]
    return names[0] if names else type(section).__name__


def changed_option(current: Any, defaults: Any, other: Any) -> Any:
    """`other` (an option with the values of its YAML) with what was set differently from `defaults`, the YAML of
    `current`, where it has such a setting: what composing the same words with the other name gives."""
    names = {field.name for field in fields(other)} & {field.name for field in fields(current)}
    return replace(
        other,
        **{
            name: getattr(current, name)
            for name in names
            if defaults is None or getattr(current, name) != getattr(defaults, name)
        },
    )


def to_plain(value: Any) -> Any:
    """Dataclasses and enums as the dicts and names that YAML and JSON hold."""
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value
