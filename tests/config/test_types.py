"""Whether a value fits a field, and what is said if not."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest

from trainer.config.types import fields_of, shown, value_problem


class Colour(Enum):
    red = "red"
    green = "green"


@dataclass
class Example:
    count: int
    share: "float | None"
    names: list[str]


def test_fields_have_their_types_resolved():
    assert {name: field.type for name, field in fields_of(Example).items()} == {
        "count": int,
        "share": float | None,
        "names": list[str],
    }


FITS = [
    (3, int),
    (-3, int),
    (3, float),
    (0.5, float),
    ("2e-4", float),  # a number to OmegaConf, text to YAML 1.1
    ("inf", float),  # a float; whether it makes sense is a rule's business
    (True, bool),
    ("a", str),
    (5, str),  # a name may look like a number
    ("", str),
    ("red", Colour),
    (Colour.red.value, Colour),
    (None, int | None),
    (3, int | None),
    (None, str | None),
    ([0.9, 0.999], list[float]),
    ([], list[str]),
    (["a", "b"], list[str]),
    ({"a": 1}, dict[str, Any]),
    ({"a": 1}, Any),
    (None, Any),
    ("${seed}", int),  # known once composed
]


@pytest.mark.parametrize(("value", "kind"), FITS, ids=str)
def test_fits(value, kind):
    assert value_problem("a.b", value, kind) is None


MISFITS = [
    (1.5, int, "a.b=1.5: must be a whole number"),
    ("3", int, "a.b=3: must be a whole number"),
    (True, int, "a.b=True: must be a whole number"),
    (None, int, "a.b=null: must be a whole number"),
    ("x", float, "a.b=x: must be a number"),
    (True, float, "a.b=True: must be a number"),
    (None, float, "a.b=null: must be a number"),
    ([1.0], float, "a.b=[1.0]: must be a number"),
    (1, bool, "a.b=1: must be true or false"),
    ("yes", bool, "a.b=yes: must be true or false"),
    (None, str, "a.b=null: must be text"),
    (["a"], str, "a.b=['a']: must be text"),
    ({"a": 1}, str | None, "a.b={'a': 1}: must be text or null"),
    ("x", int | None, "a.b=x: must be a whole number or null"),
    (0.9, list[float], "a.b=0.9: must be a list of numbers"),
    ([0.9, "x"], list[float], "a.b=[0.9, 'x']: must be a list of numbers"),
    ([1], dict[str, Any], "a.b=[1]: must be a mapping"),
    ("gren", Colour, "a.b=gren: must be one of red, green (did you mean green?)"),
    (None, Colour, "a.b=null: must be one of red, green"),
]


@pytest.mark.parametrize(("value", "kind", "words"), MISFITS, ids=str)
def test_misfits_say_what_must_be(value, kind, words):
    assert value_problem("a.b", value, kind) == words


def test_null_is_shown_as_the_user_writes_it():
    assert [shown(None), shown(0), shown("")] == ["null", "0", ""]
