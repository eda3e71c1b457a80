"""Dataclass fields and whether a value fits them, in a user's words."""

from __future__ import annotations

import types
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from trainer.errors import closest, excerpt


@dataclass(frozen=True)
class TypedField:
    name: str
    type: Any


def fields_of(cls: type) -> dict[str, TypedField]:
    """The fields of a configuration dataclass with their types resolved."""
    hints = get_type_hints(cls)
    return {f.name: TypedField(f.name, hints[f.name]) for f in fields(cls)}


def value_problem(key: str, value: Any, kind: Any) -> str | None:
    """Why a value cannot stand in a field of this type, or None."""
    if isinstance(value, str) and "${" in value:
        return None  # an interpolation: known only once composed
    if _fits(value, kind):
        return None
    options = _enum_names(kind)
    hint = closest(str(value), options) if options else ""
    return f"{key}={shown(value)}: must be {_words(kind)}{hint}"


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if _is_union(kind):
        return any(_fits(value, part) for part in get_args(kind))
    if kind is type(None):
        return value is None
    origin = get_origin(kind)
    if origin is list:
        (item,) = get_args(kind)
        return isinstance(value, list) and all(_fits(v, item) for v in value)
    if origin is dict:
        return isinstance(value, dict)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return str(value) in kind.__members__
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return _is_number(value)
    if kind is str:
        return value is not None and not isinstance(value, (list, dict))
    return False


def _is_number(value: Any) -> bool:
    if isinstance(value, str):  # YAML 1.1 reads 2e-4 as a string, OmegaConf as a number
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _words(kind: Any) -> str:
    if _is_union(kind):
        return " or ".join(_words(part) for part in get_args(kind))
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    if kind in names:
        return names[kind]
    if get_origin(kind) is list:
        return "a list of " + {float: "numbers", int: "whole numbers", str: "texts"}[get_args(kind)[0]]
    if get_origin(kind) is dict:
        return "a mapping"
    return "one of " + ", ".join(_enum_names(kind))


def _enum_names(kind: Any) -> list[str]:
    return list(kind.__members__) if isinstance(kind, type) and issubclass(kind, Enum) else []


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def shown(value: Any) -> str:
    """A value as the user writes it, a long one in short."""
    return "null" if value is None else excerpt(str(value))


def in_short(error: BaseException) -> str:
    """The key that an error of OmegaConf is about, its first line, and that of what caused it."""
    lines = [str(part).strip().split("\n")[0].rstrip(".") for part in (error, error.__cause__) if part is not None]
    text = ": ".join(dict.fromkeys(line for line in lines if line))
    key = getattr(error, "full_key", None)
    return f"{key}: {text}" if key and key not in text else text
