"""Nothing a user writes can vanish: every key in an override or a recipe is held against the dataclass fields (Hydra
itself lets `+group.key=1` pass and drops it), every value against its type, and all mistakes are reported at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException

from trainer.config.schema import SECTIONS, Config
from trainer.config.shelf import GROUPS, Recipe, default_choices, option_values, options, recipes, schema_of
from trainer.config.types import fields_of, shown, value_problem
from trainer.errors import ConfigError, closest, listing

NONE_PICKED = ("recipe", "sweep")
"""Groups in which nothing need be picked; null says so."""


def parse(words: list[str]) -> list[Override]:
    """Hydra's own grammar. Raises ConfigError for all words that are not of it."""
    parser, parsed, problems = OverridesParser.create(), [], []
    for word in words:
        try:
            if word.lstrip("+~").startswith("="):
                raise HydraException("no key before =")
            parsed += parser.parse_overrides([word])
        except (OverrideParseException, HydraException) as error:
            reason = str(error).splitlines()[0]
            key = word.partition("=")[0]
            problems.append(
                f"{word}: cannot be read: {reason}. Write key=value; a value with characters other than a-z, 0-9 and "
                f"._-/ wants quotes of its own: '{key}=\"...\"'"
            )
    if problems:
        raise ConfigError(listing(problems))
    return parsed


def without_null_picks(overrides: list[Override]) -> list[Override]:
    """The same without recipe=null and sweep=null, which Hydra does not understand: null is what they are anyway."""
    last = {o.key_or_group: o for o in overrides}
    dropped = {group for group in NONE_PICKED if group in last and _is_null(last[group])}
    return [o for o in overrides if o.key_or_group not in dropped]


def for_hydra(overrides: list[Override]) -> list[str]:
    """The words as Hydra takes them once they are checked: for a new entry of a mapping it wants ++."""
    words = []
    for override in overrides:
        plain = not (override.is_add() or override.is_force_add() or override.is_delete() or _is_hydra(override))
        entry = override.key_or_group.count(".") > 1 or isinstance(override.value(), dict)
        words.append(f"++{override.input_line}" if plain and entry else override.input_line)
    return words


def check(overrides: list[Override]) -> None:
    """Raises ConfigError for unknown options, keys and values of the wrong type, in overrides and in the recipe."""
    problems = problems_in(overrides)
    if problems:
        raise ConfigError(listing(problems))


def problems_in(overrides: list[Override]) -> list[str]:
    """All that is wrong with these overrides and the recipe they pick, before anything is composed."""
    problems: list[str] = []
    picked = [o for o in overrides if o.key_or_group in GROUPS]
    settings = [o for o in overrides if o.key_or_group not in GROUPS and not _is_hydra(o)]
    problems += [problem for o in picked if (problem := _pick_problem(o)) is not None]
    picks = {o.key_or_group: o.value() for o in picked if _pick_problem(o) is None}

    choices = default_choices()
    recipe = recipes()[picks["recipe"]] if picks.get("recipe") is not None else None
    chain = _chain(recipe, problems) if recipe is not None else []
    for part, tree in chain:
        problems += _take_defaults(part, tree, choices)
    choices |= {group: choice for group, choice in picks.items() if group in choices}

    keys = Keys(choices)
    for part, tree in chain:
        problems += _recipe_problems(part, tree, keys)
    for override in settings:
        problems += _setting_problems(override, keys)
    return list(dict.fromkeys(problems))


def _pick_problem(override: Override) -> str | None:
    """What is wrong with group=option, or None."""
    group = override.key_or_group
    if override.is_delete():
        return f"~{group}: a group cannot be taken away. Allowed: {', '.join(options(group))}"
    if override.is_add() or override.is_force_add() or override.package is not None:
        return f"{override.input_line}: an option is picked with {group}=option. Allowed: {', '.join(options(group))}"
    if override.is_sweep_override():
        return _needs_multirun(override)
    name = override.value()
    if name in options(group) or (name is None and group in NONE_PICKED):
        return None
    return _unknown_option(group, name)


def _setting_problems(override: Override, keys: Keys) -> list[str]:
    key = override.key_or_group
    if override.is_delete():
        known = keys.problem(key, adding=False) or f"~{key}: a setting cannot be taken away, every one has a value"
        return [known]
    adding = override.is_add() or override.is_force_add()
    if override.package is not None:
        return [f"{override.input_line}: unknown key; only options have packages, and here they are fixed"]
    problem = keys.problem(key, adding)
    if problem is None and override.is_sweep_override():
        problem = _needs_multirun(override)
    elif problem is None:
        problem = keys.value_problem(key, override.value(), adding)
    return [problem] if problem is not None else []


def _needs_multirun(override: Override) -> str:
    return (
        f"{override.input_line}: several values. To sweep over them add -m; a list is written "
        f"{override.key_or_group}=[a,b]"
    )


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
        if "." in name:
            return None  # an entry of a mapping: typed by what uses it
        inside = self.values[section].get(name)
        if isinstance(value, dict) and isinstance(inside, dict) and not adding:
            for entry in value:
                problem = self._entry_problem(key, str(entry), inside)
                if problem is not None:
                    return problem
        return value_problem(key, value, fields_of(self.schemas[section])[name].type)

    def _all(self) -> list[str]:
        """Every key of the configuration with these options."""
        keys = [name for name in fields_of(Config) if name not in self.schemas]
        return keys + [f"{section}.{name}" for section, cls in self.schemas.items() for name in fields_of(cls)]

    def _hint(self, name: str, keys: Iterable[str], cutoff: float) -> str:
        """A hint at the full key whose last part is closest to `name`."""
        by_name = {key.rpartition(".")[2]: key for key in keys}
        match = difflib.get_close_matches(name, by_name, n=1, cutoff=cutoff)
        return f" (did you mean {by_name[match[0]]}?)" if match else ""


def _chain(recipe: Recipe, problems: list[str]) -> list[tuple[Recipe, dict[str, Any]]]:
    """The recipe with its tree, after those that its defaults list starts from."""
    shelf, chain, open_names = recipes(), [], []

    def follow(part: Recipe) -> None:
        if part.name in open_names:
            problems.append(f"{part.file}: recipes start from each other in a circle: {' > '.join(open_names)}")
            return
        open_names.append(part.name)
        tree = part.tree()
        for entry in _entries(tree):
            if isinstance(entry, str) and entry != "_self_":
                base = shelf.get(entry)
                if base is None:
                    problems.append(
                        f"{part.file}:{part.line('defaults')}: {entry}: no such recipe to start from"
                        f"{closest(entry, shelf)}. An option is picked with `override /group: option`"
                    )
                else:
                    follow(base)
        open_names.pop()
        chain.append((part, tree))

    follow(recipe)
    return chain


def _entries(tree: dict[str, Any]) -> list[Any]:
    entries = tree.get("defaults")
    return entries if isinstance(entries, list) else []


def _take_defaults(recipe: Recipe, tree: dict[str, Any], choices: dict[str, str]) -> list[str]:
    """Notes in `choices` what a recipe's defaults list picks; returns what is wrong with it."""
    problems = []
    place = f"{recipe.file}:{recipe.line('defaults')}"
    if not isinstance(tree.get("defaults", []), list):
        return [f"{place}: defaults is a list, one `override /group: option` a line"]
    for entry in _entries(tree):
        if isinstance(entry, str):
            continue
        word, choice = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else (str(entry), None)
        overriding, _, path = word.rpartition(" ")
        group = path.removeprefix("/")
        if group.startswith("hydra/"):
            continue
        if group not in GROUPS or group == "recipe":
            problems.append(
                f"{place}: {group}: unknown group{closest(group, SECTIONS)}. Allowed: {', '.join(SECTIONS)}"
            )
        elif overriding != "override" or not path.startswith("/"):
            problems.append(f"{place}: {word}: {choice}: write `override /{group}: {choice}`")
        elif choice not in options(group):
            problems.append(f"{place}: {_unknown_option(group, choice)}")
        elif group in choices:
            choices[group] = choice
    return problems


def _recipe_problems(recipe: Recipe, tree: dict[str, Any], keys: Keys) -> list[str]:
    problems = []
    for key, value in _leaves(tree, keys):
        if key == "recipe":
            problem = f"recipe={shown(value)}: is the file's name, {recipe.name}; remove this line"
        elif key == "model.trust_remote_code":
            problem = f"{key}={shown(value)}: a recipe cannot ask for foreign code to be run; only the command line can"
        else:
            problem = keys.problem(key, adding=False) or keys.value_problem(key, value)
        if problem is not None:
            problems.append(f"{recipe.file}:{recipe.line(key)}: {problem}")
    return problems


def _leaves(tree: dict[str, Any], keys: Keys, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """key, value pairs of a recipe's own tree; what stands in a field is a value, whatever its shape."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in ("hydra", "defaults"):
            continue
        if isinstance(value, dict) and (key in keys.schemas or key == "model.architecture"):
            yield from _leaves(value, keys, f"{key}.")
        else:
            yield key, value


def _unknown_option(group: str, name: Any) -> str:
    known = options(group)
    return f"{group}={shown(name)}: no such option{closest(shown(name), known)}. Allowed: {', '.join(known)}"


def _is_null(override: Override) -> bool:
    return not override.is_sweep_override() and not override.is_delete() and override.value() is None


def _is_hydra(override: Override) -> bool:
    key = override.key_or_group
    return key == "hydra" or key.startswith(("hydra.", "hydra/"))
