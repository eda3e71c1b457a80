"""What files say: recipes and what they start from, sweeps and the user's own options, held against the keys.

They may come from someone else. They hold settings and name nothing that runs: no callable, no environment variable,
nothing of Hydra's but the values of a sweep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from antlr4 import ParserRuleContext
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import GrammarParseError
from omegaconf.grammar_parser import OmegaConfGrammarParser, parse

from trainer.config.config_file import ConfigFile
from trainer.config.keys import Keys
from trainer.config.schema import SECTIONS
from trainer.config.shelf import (
    GROUPS,
    default_choices,
    options,
    own_option,
    recipes,
    schema_of,
    sweep_file,
    unknown_option,
)
from trainer.config.types import shown
from trainer.errors import ConfigError, closest

RESOLVERS = ("now",)
"""What an interpolation in a file may call; others read the environment or make what looks like it."""
COMMAND_LINE = {
    "model.trust_remote_code": "a recipe cannot ask for foreign code to be run; only the command line can",
}


@dataclass
class Written:
    """The files that a command line picks, and the options that follow from them."""

    choices: dict[str, str]
    """the option of each section and of train"""
    recipes: list[tuple[ConfigFile, dict[str, Any]]] = field(default_factory=list)
    """the recipe with its tree, after those that it starts from"""
    own: list[tuple[str, ConfigFile, dict[str, Any]]] = field(default_factory=list)
    """the user's own options and sweep: group, file and tree"""
    problems: list[str] = field(default_factory=list)


def written(picks: dict[str, str | None]) -> Written:
    """The files that these picks of the command line lead to; what cannot be used is in `problems`."""
    found = Written(default_choices())
    if picks.get("recipe") is not None:
        found.recipes = _chain(recipes()[picks["recipe"]], found.problems)
    choices: dict[str, str | None] = {**found.choices, "sweep": None}
    for part, tree in found.recipes:
        found.problems += _take_defaults(part, tree, choices)
    if (sweep := picks.get("sweep", choices["sweep"])) is not None:
        with suppress(ConfigError):  # said below, with the others
            file = sweep_file(sweep)
            found.problems += _take_defaults(file, file.tree(), choices)
    choices |= {group: choice for group, choice in picks.items() if group in choices}
    for group, choice in choices.items():
        try:
            own = own_option(group, choice) if choice is not None else None
            if group != "sweep":
                schema_of(group, choice)
                found.choices[group] = choice
            if own is not None:
                found.own.append((group, own, own.tree()))
        except ConfigError as error:
            found.problems.append(str(error))
    for group, _, tree in found.own:
        if picks.get(group) is not None:
            _give_way(found.recipes, group, tree)
    return found


def _give_way(recipes: list[tuple[ConfigFile, dict[str, Any]]], group: str, own: dict[str, Any]) -> None:
    """A user's own option that the command line picks wins over what the recipes say of its keys.

    Hydra merges a recipe after the options, also where it names none of them: `optim=mine` with a recipe's learning
    rate would train with neither the file's nor anything that the user wrote.
    """
    for _, tree in recipes:
        if isinstance(tree.get(group), dict):
            tree[group] = {key: value for key, value in tree[group].items() if key not in own}


def problems_of(found: Written, keys: Keys) -> Iterator[str]:
    """All that is wrong with what the files say."""
    for part, tree in found.recipes:
        yield from _file_problems(part, tree, keys, _leaves(tree, keys))
    for group, option, tree in found.own:
        if group == "sweep":
            yield from _file_problems(option, tree, keys, _leaves(tree, keys))
            continue
        values = ((name, value) for name, value in tree.items() if name != "defaults")
        yield from _file_problems(option, tree, keys, values, f"{group}.")


def _file_problems(
    part: ConfigFile, tree: dict[str, Any], keys: Keys, values: Iterable[tuple[str, Any]], section: str = ""
) -> Iterator[str]:
    for key, value in values:
        full = f"{section}{key}"
        if full == "recipe":
            problem = f"recipe={shown(value)}: is the file's name, {part.name}; remove this line"
        elif full in COMMAND_LINE:
            problem = None if section and not value else f"{full}={shown(value)}: {COMMAND_LINE[full]}"
        else:
            problem = keys.problem(full, adding=False) or keys.value_problem(full, value)
        if problem is not None:
            yield f"{part.file}:{part.line(key)}: {problem}"
    for key, problem in (*_foreign(tree), *_hydra_problems(tree.get("hydra", {}), keys)):
        yield f"{part.file}:{part.line(key)}: {key}: {problem}"


def _foreign(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys at any depth whose values would call something or read the environment, and what is wrong with them."""
    if isinstance(tree, str):
        called = next((name for name in _resolvers(tree) if name not in RESOLVERS), None)
        if called is not None:
            where = f"'{prefix}=\"{tree}\"'" if called.startswith("oc.env") else "its value"
            yield prefix, f"{tree}: a file cannot call {called}; say {where} on the command line"
        return
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in entries:
        key = f"{prefix}.{name}" if prefix else str(name)
        if name == "_target_":
            yield key, f"{shown(value)}: a file names nothing that runs"
        yield from _foreign(value, key)


def _resolvers(text: str) -> Iterator[str]:
    """Names of what the interpolations in a text call."""
    if "${" not in text:
        return
    try:
        nodes: list[ParserRuleContext] = [parse(text)]
    except GrammarParseError:
        return  # OmegaConf says so where it composes
    for node in nodes:
        if isinstance(node, OmegaConfGrammarParser.InterpolationResolverContext):
            yield node.resolverName().getText()
        nodes += [child for child in node.getChildren() if isinstance(child, ParserRuleContext)]


def _hydra_problems(tree: Any, keys: Keys) -> Iterator[tuple[str, str]]:
    """What a file says to Hydra beyond the values of a sweep."""
    if not isinstance(tree, dict):
        yield "hydra", "must be a mapping"
        return
    sweeper = tree.get("sweeper", {})
    inner = sweeper if isinstance(sweeper, dict) else {"": sweeper}
    said = [f"hydra.{name}" for name in tree if name not in ("mode", "sweeper")]
    said += [f"hydra.sweeper.{name}" for name in inner if name != "params"]
    for key in said:
        yield key, "only the command line says this to Hydra; a file may hold hydra.mode and hydra.sweeper.params"
    params = inner.get("params") or {}
    if not isinstance(params, dict):
        yield "hydra.sweeper.params", "must be a mapping of keys to values"
        return
    for name, value in params.items():
        problem = _param_problem(str(name), value, keys)
        if problem is not None:
            yield "hydra.sweeper.params", problem


def _param_problem(name: str, value: Any, keys: Keys) -> str | None:
    """Why a key cannot be swept over by a file, or None. Its values are checked with those of each trial."""
    if name in COMMAND_LINE:
        return f"{name}: {COMMAND_LINE[name]}"
    if isinstance(value, (dict, list)):
        return f"{name}: must be its values with commas between them, as on the command line"
    try:
        (override,) = OverridesParser.create().parse_overrides([f"{name}={value}"])
    except HydraException as error:
        return f"{name}={value}: cannot be read: {str(error).splitlines()[0]}"
    if override.key_or_group != name or override.package is not None:
        return f"{name}: is no plain key"
    return None if name in GROUPS else keys.problem(name, adding=False)


def _chain(recipe: ConfigFile, problems: list[str]) -> list[tuple[ConfigFile, dict[str, Any]]]:
    """The recipe with its tree, after those that its defaults list starts from."""
    shelf, chain, open_names = recipes(), [], []

    def follow(part: ConfigFile) -> None:
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


def _take_defaults(recipe: ConfigFile, tree: dict[str, Any], choices: dict[str, str | None]) -> list[str]:
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
            problems.append(f"{place}: {word}: only the command line picks parts of Hydra")
        elif group not in GROUPS or group == "recipe":
            problems.append(
                f"{place}: {group}: unknown group{closest(group, SECTIONS)}. Allowed: {', '.join(SECTIONS)}"
            )
        elif overriding != "override" or not path.startswith("/"):
            problems.append(f"{place}: {word}: {choice}: write `override /{group}: {choice}`")
        elif choice not in options(group):
            problems.append(f"{place}: {unknown_option(group, choice)}")
        else:
            choices[group] = choice
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
