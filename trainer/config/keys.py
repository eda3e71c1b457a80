"""The keys that exist with the options that are picked, and what their values must be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from trainer.config.schema import Config
from trainer.config.shelf import GROUPS, option_values, options, schema_of
from trainer.config.types import fields_of, value_problem
from trainer.errors import closest


class Keys:
    """The keys that exist with these options, and what their values must be."""

    def __init__(self, choices: dict[str, str]):
        self.schemas = {group: schema_of(group, choice) for group, choice in choices.items()}
        self.values = {group: dict(option_values(group, choice)) for group, choice in choices.items()}

    def problem(self, key: str, adding: bool) -> str | None:
        """Why there is no such key, or None. `adding` allows new entries of a mapping (model.architecture)."""
        section, _, rest = key.partition(".")
        root = fields_of(Config)
        if section not in root:
            return f"{key}: unknown key{closest(key, [*self._all(), *GROUPS])}"
        if section not in self.schemas:
            return f"{key}: unknown key; {section} has no parts" if rest else None
        if not rest:
            return f"{section}: is a group, not a setting. Allowed: {section}=" + ", ".join(options(section))
        fields = fields_of(self.schemas[section])
        name, _, inner = rest.partition(".")
        if name not in fields:
            here = [f"{section}.{field}" for field in fields]
            hint = (
                self._hint(name, self._all(), 1.0) or self._hint(name, here, 0.6) or self._hint(name, self._all(), 0.8)
            )
            return f"{key}: unknown key{hint}. {section} has: {', '.join(fields) or 'no keys'}"
        if not inner:
            return None
        inside = self.values[section].get(name)
        if not isinstance(inside, dict):
            return f"{key}: unknown key; {section}.{name} has no parts"
        entry, _, deeper = inner.partition(".")
        if deeper and entry in inside and not isinstance(inside[entry], dict):
            return f"{key}: unknown key; {section}.{name}.{entry} has no parts"
        return None if adding else self._entry_problem(f"{section}.{name}", entry, inside)

    def _entry_problem(self, mapping: str, entry: str, inside: dict[str, Any]) -> str | None:
        """Why a mapping has no such entry, or None. One that is empty in conf/ is for the user to fill."""
        if entry in inside or not inside:
            return None
        return (
            f"{mapping}.{entry}: unknown key{closest(entry, inside)}. {mapping} has: {', '.join(inside)}. "
            f"One more is added on the command line with +{mapping}.{entry}="
        )

    def value_problem(self, key: str, value: Any, adding: bool = False) -> str | None:
        """Why a value cannot stand in this key, which exists, or None."""
        section, _, name = key.partition(".")
        if section not in self.schemas:
            return value_problem(key, value, fields_of(Config)[section].type)
        field, _, entry = name.partition(".")
        inside = self.values[section].get(field)
        if entry:
            return self._entry_value_problem(key, value, inside.get(entry) if isinstance(inside, dict) else None)
        if isinstance(value, dict) and isinstance(inside, dict):
            for part, its_value in value.items():
                problem = None if adding else self._entry_problem(key, str(part), inside)
                problem = problem or self._entry_value_problem(f"{key}.{part}", its_value, inside.get(str(part)))
                if problem is not None:
                    return problem
        return value_problem(key, value, fields_of(self.schemas[section])[field].type)

    def _entry_value_problem(self, key: str, value: Any, ours: Any) -> str | None:
        """Why a value cannot stand for the one of a mapping in conf/; what is not of a plain type there is typed by
        what uses it."""
        if not isinstance(ours, (bool, int, float)) or value is None or isinstance(value, (list, dict)):
            return None
        return value_problem(key, value, type(ours))

    def _all(self) -> list[str]:
        """Every key of the configuration with these options."""
        keys = [name for name in fields_of(Config) if name not in self.schemas]
        return keys + [f"{section}.{name}" for section, cls in self.schemas.items() for name in fields_of(cls)]

    def _hint(self, name: str, keys: Iterable[str], cutoff: float) -> str:
        """A hint at the full key whose last part is closest to `name`."""
        by_name = {key.rpartition(".")[2]: key for key in keys}
        match = difflib.get_close_matches(name, by_name, n=1, cutoff=cutoff)
        return f" (did you mean {by_name[match[0]]}?)" if match else ""
