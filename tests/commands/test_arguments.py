"""Arguments of the commands that work on a run folder."""

import pytest

from trainer.commands.arguments import key_values, run_argument
from trainer.config.compose import compose
from trainer.config.saved import save_run
from trainer.errors import ConfigError, StorageError


@pytest.fixture
def folder(tmp_path):
    """A run folder with its configuration."""
    save_run(compose(["recipe=quickstart", "seed=3"]), tmp_path)
    return tmp_path


def test_a_value_may_hold_anything():
    assert key_values(["prompt=a=b, c: [d]", "run="], ("run", "prompt")) == {"prompt": "a=b, c: [d]", "run": ""}


def test_debug_belongs_to_every_command():
    assert key_values(["debug=true"], ()) == {"debug": "true"}


def test_all_unknown_arguments_at_once_with_the_closest():
    with pytest.raises(ConfigError) as refused:
        key_values(["promt=x", "run", "run=a", "seed=1"], ("run", "prompt"))
    lines = str(refused.value).splitlines()
    assert lines[0] == "3 problems:"
    assert "promt=x: unknown argument (did you mean prompt?). Allowed: run, prompt" in lines[1]
    assert "run: unknown argument" in lines[2] and "seed=1: unknown argument" in lines[3]


def test_the_run_that_is_named(folder):
    path, run, _ = run_argument([f"run={folder}"], ())
    assert path == folder and run.config.seed == 3 and run.overrides == ["recipe=quickstart", "seed=3"]


@pytest.mark.parametrize("words", [[], ["run="], ["prompt=x"]])
def test_no_run_is_named(words):
    with pytest.raises(ConfigError, match="run=DIR is missing"):
        run_argument(words, ("prompt",))


def test_what_is_named_is_no_run(tmp_path):
    for name, words in (("nowhere", "there is no such folder"), ("file", "no such folder"), ("", "holds no run")):
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError, match=words):
            run_argument([f"run={tmp_path / name}"], ())


def test_a_sweep_is_no_run_but_has_some(tmp_path):
    for trial in ("0", "1"):
        (tmp_path / trial).mkdir()
        save_run(compose([]), tmp_path / trial)
    with pytest.raises(StorageError, match=f"holds no run .* Name a trial: run={tmp_path}/0"):
        run_argument([f"run={tmp_path}"], ())


def test_what_a_folder_says_about_foreign_code_does_not_count(tmp_path):
    save_run(compose(["model.trust_remote_code=true", f"model.revision='{'a' * 40}'"]), tmp_path)
    assert run_argument([f"run={tmp_path}"], ())[1].config.model.trust_remote_code is False
    trusting = run_argument([f"run={tmp_path}", "model.trust_remote_code=true"], ())[1]
    assert trusting.config.model.trust_remote_code is True
