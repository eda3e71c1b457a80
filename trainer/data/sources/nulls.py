"""Nulls of tables: a column of objects holds the fields of all rows, so what a row does not have is a null in it.

A null is padding, but for one kind: an argument of a function call which the function's schema requires is a value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A table's row as it was before the table."""
    schemas: dict[str, dict] | None = None

    def cleaned(value: Any) -> Any:
        nonlocal schemas
        if isinstance(value, list):
            return [cleaned(item) for item in value]
        if not isinstance(value, dict):
            return value
        clean = {key: cleaned(item) for key, item in value.items() if item is not None}
        if isinstance(value.get("arguments"), dict) and isinstance(value.get("name"), str):
            if schemas is None:
                schemas = dict(_schemas(row))
            clean["arguments"] = _filled(value["arguments"], schemas.get(value["name"], {}))
        return clean

    return cleaned(row)


def _filled(value: Any, schema: Any) -> Any:
    """An argument without padding: a null stays where the JSON schema requires the property."""
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(value, list):
        return [_filled(item, schema.get("items")) for item in value]
    if not isinstance(value, dict):
        return value
    required, properties = schema.get("required") or (), schema.get("properties") or {}
    kept = {key: item for key, item in value.items() if item is not None or key in required}
    return {key: _filled(item, properties.get(key)) for key, item in kept.items()}


def _schemas(value: Any) -> Iterator[tuple[str, dict]]:
    """Names and parameters of the functions that a row offers, whichever column they stand in, also as JSON text."""
    if isinstance(value, str) and '"parameters"' in value and value.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return
    if isinstance(value, dict):
        if isinstance(value.get("name"), str) and isinstance(value.get("parameters"), dict):
            yield value["name"], value["parameters"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _schemas(item)
