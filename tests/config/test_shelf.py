"""Options, and recipes from two shelves."""

import pytest

from trainer.config.compose import compose
from trainer.config.config_file import ConfigFile
from trainer.config.schema import SECTIONS
from trainer.config.shelf import CONF, default_choices, option_values, options, recipes, schema_of
from trainer.errors import ConfigError
from trainer.training.optimizers.adam import AdamW8bit

PACKAGED = sorted(file.stem for file in (CONF.parent / "recipes").glob("*.yaml"))


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder of the user's own recipes below the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    return tmp_path / "recipes"


def recipe(shelf, text, name="mine") -> ConfigFile:
    (shelf / f"{name}.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return recipes()[name]


def test_the_packaged_recipes_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sorted(recipes()) == PACKAGED
    assert {"quickstart", "pretrain_tiny", "qlora_smollm2_135m", "qlora_llama3_8b"} <= set(PACKAGED)


def test_the_users_recipes_stand_beside_them_and_win(shelf):
    recipe(shelf, "seed: 7")
    recipe(shelf, "# My own.\nseed: 8", name="quickstart")
    assert options("recipe") == sorted([*PACKAGED, "mine"])
    assert recipes()["quickstart"].file == shelf / "quickstart.yaml"
    assert recipes()["quickstart"].comment == ["My own."]
    assert recipes()["pretrain_tiny"].file.parent != shelf


def test_the_head_comment_ends_where_the_recipe_begins(shelf):
    mine = recipe(shelf, "# @package _global_\n# What.\n#\n#   trainer recipe=mine\nseed: 1\n# not this\n")
    assert mine.comment == ["What.", "", "trainer recipe=mine"]
    assert recipe(shelf, "seed: 1").comment == []
    assert recipe(shelf, b"# caf\xe9\nseed: 1").comment == ["caf\ufffd"], "the list must not fail over one recipe"


def test_numbers_are_numbers_also_without_a_dot(shelf):
    assert recipe(shelf, "optim: {learning_rate: 1e-4}").tree() == {"optim": {"learning_rate": 1e-4}}
    assert recipe(shelf, "# nothing\n").tree() == {}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("seed: 1\noptim: [1", ":2", "not YAML: expected ',' or ']'"),
        ("seed: 1\ntrain: {}\nseed: 2", ":3", "not YAML: found duplicate key seed"),
        ("optim:\n  eps: 1\n  eps: 2", ":3", "found duplicate key eps"),
        ("a: !!python/object:os.system x", ":1", "not YAML: could not determine a constructor"),
        ("- 1\n- 2", "", "must be a mapping"),
        ("5", "", "not YAML"),
        (b"seed: \xff", "", "not UTF-8"),
    ],
)
def test_what_is_no_recipe_is_refused_with_its_place(shelf, text, line, words):
    mine = recipe(shelf, text)
    with pytest.raises(ConfigError) as refused:
        mine.tree()
    assert str(refused.value).startswith(f"{mine.file}{line}: ")
    assert words in str(refused.value)


def test_a_folder_with_a_recipes_name_cannot_be_read(shelf):
    (shelf / "mine.yaml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        recipes()["mine"].tree()


def test_the_line_of_a_key(shelf):
    mine = recipe(shelf, "# head\nseed: 1\noptim:\n  eps: 1\n\n  betas: [1, 2]\ntrain: {epochs: 3}\n")
    keys = ("seed", "optim", "optim.eps", "optim.betas", "train.epochs", "optim.nothing")
    assert [mine.line(key) for key in keys] == [2, 3, 4, 6, 7, 3]


def test_options_are_the_files_of_the_group():
    for group in (*SECTIONS, "train", "sweep"):
        assert options(group) == sorted(file.stem for file in (CONF / group).iterdir())


def test_the_default_of_each_section_is_an_option_of_it():
    choices = default_choices()
    assert set(choices) == {*SECTIONS, "train"}
    assert all(choice in options(group) for group, choice in choices.items())
    assert choices["quant"] == "nf4" and choices["optim"] == "paged_adamw_8bit"


def test_an_options_schema_and_values():
    assert schema_of("optim", "adamw_8bit") is AdamW8bit
    assert option_values("loss", "chunked") == {"chunk_tokens": 256}


def test_a_recipe_that_cannot_be_read_spoils_no_other(shelf):
    (shelf / "dangling.yaml").symlink_to(shelf / "nowhere")
    (shelf / "folder.yaml").mkdir()
    recipe(shelf, "a: &a [*a]", name="cyclic")
    assert recipes()["dangling"].comment == ["Cannot be read: No such file or directory."]
    assert recipes()["folder"].comment == ["Cannot be read: Is a directory."]
    with pytest.raises(ConfigError, match=r"cyclic.yaml: holds itself"):
        recipes()["cyclic"].tree()
    assert compose(["recipe=quickstart"]).config.recipe == "quickstart"
    with pytest.raises(ConfigError, match=r"cyclic.yaml: holds itself"):
        compose(["recipe=cyclic"])
