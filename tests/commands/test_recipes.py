"""`trainer recipes`: one line a recipe, packaged and the user's own."""

import re

import pytest

from tests.program import here
from trainer.config.shelf import recipes


def listed(capsys) -> dict[str, str]:
    assert here("recipes") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["recipe", "base", "method", "memory"]
    return {line.split()[0]: line for line in lines[1:]}


def test_each_recipe_has_one_line_with_what_it_does(capsys):
    rows = listed(capsys)
    assert list(rows) == list(recipes())
    for name, recipe in recipes().items():
        assert rows[name].endswith(recipe.comment[0]), "the first line of its head comment"


@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_packaged_recipe_says_its_command_base_method_and_memory(name, capsys):
    comment = recipes()[name].comment
    assert comment[0].endswith(".")
    assert any(line.strip().startswith(f"python -m trainer recipe={name}") for line in comment)
    for topic in ("Base: ", "Method: ", "Memory: "):
        assert any(line.startswith(topic) for line in comment), topic
    assert " - " not in listed(capsys)[name].partition(comment[0])[0]


def test_the_users_recipes_are_there_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_text(
        "# Mine: all of it.\n#\n# Base: my own 7B (a folder).\n# Method: LoRA, r=4.\n"
        "# Memory: 5.5 GiB with 1,024-token rows; no less.\n"
    )
    (tmp_path / "recipes/bare.yaml").write_text("seed: 1\n")
    (tmp_path / "recipes/broken.yaml").write_text("# Broken.\nseed: [1\n")
    (tmp_path / "recipes/quickstart.yaml").write_text("# My quickstart.\n")
    rows = listed(capsys)
    cells = re.split(r" {2,}", rows["mine"])
    assert cells[:4] == ["mine", "my own 7B", "LoRA", "5.5 GiB with 1,024-token rows"]
    assert rows["mine"].endswith("Mine: all of it.")
    assert rows["bare"].split() == ["bare", "-", "-", "-", "(no", "head", "comment)"]
    assert re.search(r"cannot be used: .*broken.yaml:3: not YAML: .*", rows["broken"])
    assert rows["quickstart"].endswith("My quickstart.")
    assert "pretrain_tiny" in rows


def test_a_recipe_that_obeys_no_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_text("# Clear and \u202eturn.\nseed: 1\n")
    assert listed(capsys)["mine"].endswith(r"Clear and \u202eturn.")


def test_arguments_are_refused(capsys):
    assert here("recipes", "all", "run=x") == 2
    assert "recipes takes no arguments, not all run=x" in capsys.readouterr().err


def test_a_narrow_terminal_gets_a_paragraph_a_recipe(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert here("recipes") == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    text = " ".join(out.split())
    for name, recipe in recipes().items():
        assert name in out.splitlines() and recipe.comment[0] in text
