"""The configuration as a JSON Schema (2020-12), made from the dataclasses: editors complete and check recipes with it.

A recipe's sections have the fields of the option that it picks; where it starts from another recipe and picks none,
those of any option of the group. What no single file shows (rules between settings) is checked by the program alone.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from enum import Enum
from typing import Any, Union, get_args, get_origin

from trainer.config.schema import SECTIONS, Config
from trainer.config.shelf import default_choices, options, recipes, schema_of
from trainer.config.types import fields_of
from trainer.ranges import ranges_of

Schema = dict[str, Any]
INTERPOLATION: Schema = {"type": "string", "pattern": r"\$\{"}
"""Stands for a value of any type."""
TYPES = {bool: "boolean", int: "integer", float: "number", type(None): "null"}
TEXT: Schema = {"type": ["string", "number", "boolean"]}
"""What a field of text takes: YAML reads some words as numbers."""


def recipe_schema() -> Schema:
    """What a recipe may say, with the options that there are here, the user's own too."""
    groups = {group: options(group) for group in (*SECTIONS, "train")}
    definitions = {f"{g}.{name}": _section(schema_of(g, name)) for g, names in groups.items() for name in names}
    root = {name: _value(Config, name) for name in fields_of(Config) if name not in groups and name != "recipe"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "a recipe of trainer",
        "type": "object",
        "properties": {
            "defaults": _defaults(groups),
            **root,
            **{group: {"anyOf": [_ref(group, name) for name in names]} for group, names in groups.items()},
            "hydra": {"type": "object", "description": "of a sweep: mode and sweeper.params"},
        },
        "additionalProperties": False,
        "allOf": [rule for group, names in groups.items() for rule in _picked(group, names)],
        "$defs": definitions,
    }


def _defaults(groups: dict[str, list[str]]) -> Schema:
    """What a recipe starts from, and the options that it picks."""
    picks = {f"override /{group}": {"enum": names} for group, names in groups.items()}
    pick = {"type": "object", "properties": picks, "additionalProperties": False, "minProperties": 1}
    return {
        "description": "recipes to start from, and options: `override /optim: adamw`",
        "type": "array",
        "items": {"anyOf": [{"enum": ["_self_", *recipes()]}, {**pick, "maxProperties": 1}]},
    }


def _picked(group: str, names: list[str]) -> list[Schema]:
    """A section has the fields of the option picked; of the default one where the file picks and starts from none."""
    key = f"override /{group}"

    def holds(entry: Schema) -> Schema:
        return {"properties": {"defaults": {"contains": entry}}, "required": ["defaults"]}

    def then(name: str) -> Schema:
        return {"properties": {group: _ref(group, name)}}

    rules = [
        {"if": holds({"type": "object", "properties": {key: {"const": name}}, "required": [key]}), "then": then(name)}
        for name in names
    ]
    elsewhere = {"anyOf": [{"type": "object", "required": [key]}, {"type": "string", "not": {"const": "_self_"}}]}
    return [*rules, {"if": {"not": holds(elsewhere)}, "then": then(default_choices()[group])}]


def _ref(group: str, name: str) -> Schema:
    return {"$ref": f"#/$defs/{group}.{name}"}


def _section(cls: type) -> Schema:
    return {
        "type": "object",
        "description": inspect.getdoc(cls) or "",
        "properties": {name: _value(cls, name) for name in fields_of(cls)},
        "additionalProperties": False,
    }


def _value(cls: type, name: str) -> Schema:
    """A field with its type, range and meaning."""
    kinds = _kinds(fields_of(cls)[name].type)
    allowed, words = ranges_of(cls).get(name), _meanings(cls).get(name, "")
    if allowed is not None:
        words = "; ".join(filter(None, [words, allowed.words]))
        most = {} if allowed.most is None else {"maximum": allowed.most}
        kinds = [{**k, **allowed.bounds, **most} if k.get("type") in ("integer", "number") else k for k in kinds]
    value: Schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if kinds != [{}] and TEXT not in kinds:
        value = {"anyOf": [*kinds, INTERPOLATION]}
    return {**value, "description": words} if words else value


def _kinds(kind: Any) -> list[Schema]:
    """The schemas of a type, one for each part of a union."""
    if get_origin(kind) in (Union, types.UnionType):
        return [schema for part in get_args(kind) for schema in _kinds(part)]
    if kind is Any:
        return [{}]
    if kind is str:
        return [TEXT]
    if get_origin(kind) is list:
        items = _kinds(get_args(kind)[0])
        return [{"type": "array", "items": items[0] if len(items) == 1 else {"anyOf": items}}]
    if get_origin(kind) is dict:
        return [{"type": "object"}]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [{"enum": [_yaml_word(name) for name in kind.__members__]}]
    return [{"type": TYPES[kind]}]


def _yaml_word(name: str) -> str:
    assert name not in ("yes", "no", "on", "off", "true", "false"), "YAML would read it as a boolean"
    return name


def _meanings(cls: type) -> dict[str, str]:
    """The text below each field, of the class and of what it extends."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        except (OSError, TypeError, SyntaxError):  # a class made without a file
            continue
        for item, after in zip(body, body[1:], strict=False):
            named = isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            if named and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[item.target.id] = " ".join(str(after.value.value).split())
    return found
