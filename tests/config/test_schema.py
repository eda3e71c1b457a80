"""conf/ and the dataclasses say the same: every option has its YAML, every value its field, every field its words."""

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from dataclasses import MISSING, fields

import pytest
import yaml

from tests.support import REPO
from trainer.config.schema import SECTIONS, Config
from trainer.config.shelf import CONF, options, schema_of
from trainer.config.types import fields_of
from trainer.registry import OPTIONS
from trainer.training.train_settings import Train

EVERY_OPTION = [(group, name) for group in (*SECTIONS, "train") for name in options(group)]
EVERY_CLASS = sorted({Config, Train, *(c for group in OPTIONS.values() for c in group.values())}, key=lambda c: str(c))

NAMES = {  # what the contract fixes of the groups that stand
    "data": {"file", "quickstart"},
    "quant": {"nf4", "fp4", "int8", "none"},
    "adapter": {"lora", "none"},
    "checkpointing": {"full", "none"},
    "precision": {"auto", "bf16", "fp32"},
    "optim": {"adamw", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"},
    "schedule": {"constant", "linear", "cosine", "wsd"},
    "loss": {"chunked", "full"},
    "packing": {"best_fit", "none"},
    "engine": {"single"},
    "track": {"local", "wandb"},
}


def content(group: str, name: str) -> dict:
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text())


@pytest.mark.parametrize("group", NAMES)
def test_the_contracts_options_are_there(group):
    assert set(options(group)) >= NAMES[group]


@pytest.mark.parametrize(("group", "name"), EVERY_OPTION)
def test_an_options_values_are_its_dataclasss_fields(group, name):
    """None missing, none extra."""
    tree = content(group, name)
    (schema,) = tree.pop("defaults")
    assert schema.startswith(f"/schema/{group}/") and schema.endswith("@_here_")
    cls = schema_of(group, name)
    assert sorted(tree) == sorted(fields_of(cls))
    if group in SECTIONS:
        assert issubclass(cls, SECTIONS[group])


def test_every_registered_dataclass_has_a_yaml_in_its_group():
    named = {(group, schema_of(group, name)) for group, name in EVERY_OPTION if group in SECTIONS}
    registered = {(group, cls) for group, classes in OPTIONS.items() for cls in classes.values()}
    assert named == registered


def test_an_option_and_its_dataclass_have_one_name_where_the_group_is_not_all_one_class():
    for group, classes in OPTIONS.items():
        if len(classes) > 1:
            assert set(classes) == set(options(group)), group


@pytest.mark.parametrize(("group", "name"), [*EVERY_OPTION, *(("sweep", name) for name in options("sweep"))])
def test_every_yaml_begins_with_what_the_option_is(group, name):
    """A comment before anything else, in words."""
    lines = (CONF / group / f"{name}.yaml").read_text().splitlines()
    head = next(line for line in lines if "@package" not in line)
    assert head.startswith("# ") and len(head.split()) > 2


@pytest.mark.parametrize("cls", EVERY_CLASS, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_every_field_says_what_it_means_and_has_no_second_value(cls):
    """Meaning stands once, below the field; values stand once, in conf/."""
    assert cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}("), "dataclasses make up a docstring"
    explained = set().union(
        *(explained_fields(base) for base in cls.__mro__[:-1] if base.__module__.startswith("trai"))
    )
    sections = set(SECTIONS) | {"train"} if cls is Config else set()
    for field in fields(cls):
        assert field.name in explained | sections, f"{cls.__name__}.{field.name} has no docstring"
        assert field.default is MISSING and field.default_factory is MISSING, f"{cls.__name__}.{field.name}"


def explained_fields(cls: type) -> set[str]:
    """Annotated names with a string on the next line."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    pairs = zip(node.body, node.body[1:], strict=False)
    return {
        field.target.id
        for field, words in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(words, ast.Expr) and isinstance(words.value, ast.Constant)
    }


def test_the_root_holds_the_defaults_and_its_own_values_only():
    tree = yaml.safe_load((CONF / "config.yaml").read_text())
    own = set(fields_of(Config)) - set(SECTIONS) - {"train"}
    assert set(tree) == {"defaults", "hydra", *own}


def test_the_group_of_a_value_is_told_by_its_folder():
    folders = {entry.name for entry in CONF.iterdir() if entry.is_dir()}
    assert folders == {*SECTIONS, "train", "sweep"}


def test_option_modules_import_neither_torch_nor_transformers():
    """Each alone: what one module imports must not hide behind another."""
    modules = sorted({cls.__module__ for cls in EVERY_CLASS} | {"trainer.config.compose", "trainer.config.rules"})
    code = "import sys, importlib\nimportlib.import_module(sys.argv[1])\nprint(*sys.modules)"
    heavy = re.compile(r"\b(torch|transformers|peft|bitsandbytes|accelerate|wandb)\b(?!\.)")
    for module in modules:
        done = subprocess.run(
            [sys.executable, "-c", code, module], capture_output=True, text=True, cwd=REPO, timeout=60
        )
        assert done.returncode == 0, done.stderr
        loaded = [name for name in done.stdout.split() if heavy.fullmatch(name)]
        assert not loaded, f"{module} imports {loaded}"
