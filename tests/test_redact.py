"""Secrets: what is told as one, what is refused without being repeated, and that none is left anywhere."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import constants

from tests.program import here
from tests.support import train_here
from trainer.config.compose import compose
from trainer.config.saved import Run, save_run
from trainer.errors import ConfigError, visible
from trainer.redact import HIDDEN, holds_secret, redacted, secrets_in
from trainer.run.screen_tables import _other_hosts
from trainer.tracking.console import Screen
from trainer.tracking.run_folder import RunFolder

BODY = "aZ3" * 12
HEX = "0123456789abcdef0123456789abcdef01234567"
TOKENS = {
    "hub": f"hf_{BODY}",
    "forge": f"ghp_{BODY}",
    "service": f"sk-{BODY}",
    "wandb": f"wandb_v1_{BODY}",
}


@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("around", ["{}", "x={} y", "'{}'", "a\n{}\nb", "https://user:{}@host/x"])
def test_a_token_is_hidden_wherever_it_stands(token, around):
    shown = redacted(around.format(token))
    assert BODY not in shown and HIDDEN in shown


@pytest.mark.parametrize(
    "text", [f"wandb key: {HEX}", f"api_key={HEX}", f"WANDB {HEX}", f'"token": "{HEX}"', f"https://me:{HEX}@host/x"]
)
def test_a_bare_key_is_told_by_the_word_before_it(text):
    assert HEX not in redacted(text)


@pytest.mark.parametrize(
    "text",
    [
        HEX,
        f"commit {HEX}",
        "hf_checkpoints",
        "hf-internal/tiny",
        "sk-learn",
        "task-1",
        "https://host/@me",
        "a@b.example",
    ],
)
def test_what_is_no_secret_stays(text):
    """A commit is 40 hexadecimal digits too."""
    assert redacted(text) == text and not holds_secret(text)


def test_values_of_the_environments_secrets_are_hidden_whatever_their_shape(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "plain-words-only")
    monkeypatch.setenv("MY_PASSWORD", "plain-words")  # too short to be told from a word
    monkeypatch.setenv("GOOGLE_CREDENTIALS", "/home/me/file-of-keys.json")
    text = "plain-words-only plain-words /home/me/file-of-keys.json"
    assert redacted(text) == f"{HIDDEN} plain-words /home/me/file-of-keys.json"


def test_the_keys_of_nested_values_that_hold_one():
    found = secrets_in({"a": {"b": ["x", TOKENS["hub"]], "api_key": HEX, "commit": HEX}, "c": None})
    assert list(found) == ["a.b.1", "a.api_key"]


WORDS = {
    "a revision": ["model.revision={}"],
    "notes": ["track=wandb", "track.notes={}"],
    "an address": ["model.path=https://user:{}@host/x"],
    "a bare word": ["{}"],
    "a key": ["{}=1"],
    "a syntax error": ["model.path=[{}"],
    "a misspelt key": ["model.revison={}"],
    "an option": ["optim={}"],
    "a sweep": ["-m", "model.revision={},main"],
    "hydra": ["hydra.job.name={}"],
    "another command": ["plan", "model.revision={}"],
    "a list": ["track=wandb", "track.tags=[{}]"],
    "the folder": ["output_dir={}"],
    "printing": ["--cfg", "job", "model.revision={}"],
    "a flag": ["--{}"],
    "debug": ["debug=true", "model.revision={}"],
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert here(*(word.format(TOKENS["hub"]) for word in words)) == 2
    said = capfd.readouterr()
    assert BODY not in said.out + said.err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line", ["model: {{revision: {}}}", "track: {{notes: {}}}", "{}: 1", "model: {{revision: [{}}}", "# {}\nmodel: 1"]
)
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(line, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    head = "defaults:\n  - override /track: wandb\n"
    (tmp_path / "recipes/mine.yaml").write_text(head + line.format(TOKENS["hub"]) + "\n")
    assert here("recipe=mine") == 2
    said = capfd.readouterr()
    assert BODY not in said.out + said.err and not (tmp_path / "outputs").exists()


def test_a_variable_of_the_environment_that_a_setting_calls_for(monkeypatch):
    """The command line may; its value must not be saved."""
    monkeypatch.setenv("HF_TOKEN", "no-shape-of-a-token")
    with pytest.raises(ConfigError, match=r"model\.revision: looks like a secret") as error:
        compose(["data.path=x", "model.path=y", "model.revision=${oc.env:HF_TOKEN}"])
    assert "no-shape" not in str(error.value)


def test_every_writer_of_a_run_has_the_filter(tmp_path, capsys):
    token = TOKENS["hub"]
    screen = Screen()
    screen.keep_log(tmp_path / "train.log")
    screen.say(f"said {token}")
    screen.table(f"title {token}", [(token, f"cell {token}")])
    screen.close()
    RunFolder(tmp_path).write("summary.json", {"error": f"failed at https://me:{token}@host/"})
    run = compose(["data.path=x", "model.path=y"])
    save_run(Run(run.config, run.choices, [f"model.revision={token}"]), tmp_path)
    files = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert set(files) == {"train.log", "summary.json", "config.yaml", "overrides.yaml"}
    assert BODY not in "".join(files.values()) + capsys.readouterr().out
    assert json.loads(files["summary.json"])["error"] == f"failed at https://{HIDDEN}@host/"
    assert visible(f"Traceback ... {token}") == f"Traceback ... {HIDDEN}"


def test_a_bugs_traceback_has_the_filter(monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError(f"cannot open https://me:{TOKENS['hub']}@host")

    monkeypatch.setattr("trainer.commands.recipes.run", broken)
    assert here("recipes") == 1
    said = capsys.readouterr().err
    assert "Traceback" in said and BODY not in said


def test_no_file_of_a_run_holds_a_secret_of_its_environment(base_overrides, tmp_path, monkeypatch, capfd):
    """Tracked by W&B, offline, with a key and a token in the environment, and a password in its addresses."""
    secrets = {"WANDB_API_KEY": HEX, "HF_TOKEN": TOKENS["hub"], "PASSWORD": "opensesame99"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_BASE_URL", f"https://me:{secrets['PASSWORD']}@tracking.example")
    monkeypatch.setattr(constants, "ENDPOINT", f"https://me:{secrets['PASSWORD']}@mirror.example/hub?key={BODY}")
    train_here([*base_overrides, "train.max_steps=2", "track=wandb", "track.mode=offline"], tmp_path / "run")
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    found = [file for file in files for value in secrets.values() if value.encode() in file.read_bytes()]
    assert len(files) > 15 and found == []
    said = capfd.readouterr()
    assert not any(value in said.out + said.err for value in (*secrets.values(), BODY))
    table = " ".join(said.out.split())
    assert "not default the hub at https://mirror.example/hub, tracking at https://tracking.example" in table


def test_the_start_table_is_silent_about_usual_addresses(monkeypatch):
    for name in ("WANDB_BASE_URL", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert _other_hosts(compose(["data.path=x", "model.path=y", "track=wandb"]).config.track) == []
