"""The JSON Schema takes every recipe that the program takes, and none of the mistakes that it refuses.

The oracles: the jsonschema library, and the program's own check of the same words.
"""

import json
from io import StringIO

import pytest
from jsonschema import Draft202012Validator
from omegaconf import OmegaConf

from tests.program import here
from trainer.config.check import parse, problems_in
from trainer.config.json_schema import recipe_schema
from trainer.config.schema import SECTIONS
from trainer.config.shelf import option_values, options, recipes, schema_of
from trainer.config.types import fields_of
from trainer.ranges import COMPARE, ranges_of


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = recipe_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def tree(text: str):
    return OmegaConf.to_container(OmegaConf.load(StringIO(text)))


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_shipped_recipe_is_valid(validator, name):
    assert [error.message for error in validator.iter_errors(recipes()[name].tree())] == []


@pytest.mark.parametrize("group", [*SECTIONS, "train"])
def test_every_option_with_its_own_values_is_valid(validator, group):
    for name in options(group):
        recipe = {
            "defaults": [{f"override /{group}": name}] if group != "train" else [],
            group: option_values(group, name),
        }
        assert [error.message for error in validator.iter_errors(recipe)] == [], name


MISTAKES = {
    "optim:\n  learning_rte: 1.0e-4\n": "optim.learning_rte=1e-4",
    "optim:\n  learning_rate: fast\n": "optim.learning_rate=fast",
    "trian:\n  epochs: 2\n": "trian.epochs=2",
    "train:\n  epochs: 1.5\n": "train.epochs=1.5",
    "train:\n  deterministic: 3\n": "train.deterministic=3",
    "device: gpu\n": "device=gpu",
    "data:\n  format: mesages\n": "data.format=mesages",
    "seed: {a: 1}\n": "seed={a:1}",
    "train:\n  epochs: 0\n": None,
    "optim:\n  learning_rate: -1.0e-4\n": None,
    "data:\n  eval_fraction: 1.0\n": None,
    "defaults:\n  - override /optim: adamw2\n": "optim=adamw2",
    "defaults:\n  - override /optimizer: adamw\n": "optimizer=adamw",
    "defaults:\n  - no_such_recipe\n": "recipe=no_such_recipe",
    "defaults:\n  - override /adapter: ia3\nadapter:\n  r: 8\n": None,
    "recipe: mine\n": None,
}


@pytest.mark.parametrize("text", MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_not(validator, text):
    assert list(validator.iter_errors(tree(text))), text
    if MISTAKES[text] is not None:
        assert problems_in(parse([MISTAKES[text]])), "the program refuses the same"


def test_what_is_right_is(validator):
    """Numbers as YAML 1.1 reads them, interpolations, recipes to start from, options with fields of their own."""
    for text in (
        "optim:\n  learning_rate: 1e-4\n",
        "seed: ${oc.env:SEED}\n",
        "defaults:\n  - quickstart\n  - _self_\nadapter:\n  r: 8\n",
        "defaults:\n  - override /optim: muon\noptim:\n  newton_schulz_steps: 4\n",
        "data:\n  path: 2024\n",
        "train:\n  max_steps: null\n",
    ):
        assert [error.message for error in validator.iter_errors(tree(text))] == [], text


def test_bounds_are_the_ranges(validator):
    """Each bound in the schema is where the program's own range ends."""
    checked = 0
    for group in (*SECTIONS, "train"):
        for name in options(group):
            for field, allowed in ranges_of(schema_of(group, name)).items():
                for word, bound in allowed.bounds.items():
                    checked += 1
                    assert allowed.holds(bound) == COMPARE[word](bound, bound), f"{group}.{name}.{field}"
    assert checked > 50


def test_the_command_writes_it_and_says_what_fields_mean(tmp_path, capsys):
    assert here("schema", f"to={tmp_path / 's.json'}") == 0
    schema = json.loads((tmp_path / "s.json").read_text())
    assert schema == json.loads(json.dumps(recipe_schema()))
    adamw = schema["$defs"]["optim.adamw"]["properties"]
    assert set(adamw) == set(fields_of(schema_of("optim", "adamw")))
    assert "above 0" in adamw["learning_rate"]["description"]
    assert schema["$defs"]["data.file"]["properties"]["max_length"]["description"].startswith("tokens in one sample")
    capsys.readouterr()
    assert here("schema") == 0
    assert json.loads(capsys.readouterr().out) == schema
    assert here("schema", "too=x") == 2
