"""The house as `trainer/README.md` draws it: arrows run down, no circle of files, an option answers for itself."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import REPO
from trainer.config import schema  # registers the options
from trainer.registry import OPTIONS

FLOORS = "__main__ commands assets run certificate export config memory training model data tracking device".split()
"""From the top floor down; what is no room is the ground."""


def modules() -> dict[str, Path]:
    names = {".".join(file.relative_to(REPO).with_suffix("").parts): file for file in (REPO / "trainer").rglob("*.py")}
    return {name.removesuffix(".__init__"): file for name, file in names.items()}


MODULES = modules()


def imports(file: Path) -> Iterator[str]:
    """Modules that a file imports, wherever in it, for types alone too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if inner in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


ARROWS = {name: {found for found in imports(file) if found in MODULES} - {name} for name, file in MODULES.items()}


def floor(module: str) -> int:
    room = (module.split(".") + [""])[1]
    return FLOORS.index(room) if room in FLOORS else len(FLOORS)


def test_every_room_has_its_floor():
    rooms = {path.name for path in (REPO / "trainer").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms == set(FLOORS) - {"__main__"}


def test_no_arrow_runs_up():
    up = [(a, b) for a, found in ARROWS.items() for b in found if floor(b) < floor(a)]
    assert up == []


def test_no_circle_of_files():
    """Files without an arrow are taken away until none is left; what stays is in a circle or above one."""
    left = {name: set(found) for name, found in ARROWS.items()}
    while free := [name for name, found in left.items() if not found & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}


def own_names() -> set[str]:
    """Classes of options and what they extend, but for the section itself."""
    classes = {cls for group in OPTIONS.values() for cls in group.values()}
    every = {base.__name__ for cls in classes for base in cls.__mro__ if base.__module__.startswith("trainer.")}
    return every - {cls.__name__ for cls in schema.SECTIONS.values()} - {"Section"}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_module_asks_which_technique_it_has(module):
    file, techniques = MODULES[module], own_names()
    defined = {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)}
    asked = [
        name.id
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass")
        for name in ast.walk(node.args[1])
        if isinstance(name, ast.Name) and name.id in techniques - defined
    ]
    assert asked == []


def test_the_page_names_every_room_and_no_file_that_is_gone():
    page = (REPO / "trainer/README.md").read_text(encoding="utf-8")
    assert [room for room in FLOORS if f"`{room}/`" not in page and f"`{room}`" not in page and room != "assets"] == []
    words = {word.strip("(`,;:.)") for line in page.splitlines() for word in line.split() if "`" in word}
    files = [w for w in words if w.endswith(".py") and "/" in w and not w.startswith("tests")]
    assert [w for w in files if not list((REPO / "trainer").rglob(w))] == []


def test_rooms_can_be_imported_from_any_door():
    for room in FLOORS[1:]:
        importlib.import_module(f"trainer.{room}")
