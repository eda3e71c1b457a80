"""The program: commands, exit codes, errors in one block, and all of it without torch within two seconds of CPU."""

import os
import signal
import subprocess
import sys

import pytest
import yaml

from tests.program import here, measured
from tests.support import REPO
from trainer import __main__ as program
from trainer import __version__
from trainer.__main__ import COMMANDS, waiting_threads
from trainer.config.compose import compose
from trainer.config.schema import SECTIONS
from trainer.config.shelf import options, recipes
from trainer.errors import ConfigError, DataError, ModelError, NonFiniteError, OutOfMemoryError, StorageError
from trainer.registry import to_plain

CPU_SECONDS = 2.0
TRIES = 3
"""Beside busy processes the same work costs up to twice the CPU time: the least of some tries counts."""


def light(folder, *words: str):
    """Runs the program; it must import nothing expensive and cost little."""
    done = measured(folder, *words)
    for _ in range(TRIES - 1):
        if done.cpu_seconds <= CPU_SECONDS:
            break
        done = measured(folder, *words)
    assert done.heavy == []
    assert done.cpu_seconds <= CPU_SECONDS
    assert "Traceback" not in done.err
    assert list(folder.iterdir()) == [p for p in folder.iterdir() if p.name == "recipes"], "nothing half-written"
    return done


SHOWS = [
    (["--help"], ["usage:", "qlora_llama3_8b", "paged_adamw_8bit", "examples"]),
    (["-h"], ["usage:"]),
    (["--version"], [__version__]),
    (["recipes"], ["quickstart", "pretrain_tiny"]),
    *([[command, "--help"], [f"trainer {command}"]] for command in COMMANDS),
    (["--cfg", "job"], ["learning_rate", "# no recipe and no data are named", "recipe: quickstart", "precision=auto"]),
    (["data.path=x.jsonl", "--cfg=job"], ["recipe: custom", "# picked: adapter=lora"]),
    (["recipe=qlora_llama3_8b", "--cfg", "job"], ["recipe: qlora_llama3_8b", "device: cuda"]),
]


@pytest.mark.parametrize(("words", "parts"), SHOWS, ids=lambda value: " ".join(value))
def test_what_only_shows_something_is_light(tmp_path, words, parts):
    done = light(tmp_path, *words)
    assert (done.code, done.err) == (0, "")
    assert [part for part in parts if part not in done.out] == []


MISTAKES = [
    (["optim.leraning_rate=1"], ["optim.leraning_rate", "did you mean optim.learning_rate?"]),
    (
        ["+optim.foo=1", "++train.bar=2", "seed=x", "quant=nf5"],
        ["4 problems", "optim.foo", "train.bar", "seed=x", "nf4?"],
    ),
    (["recipe=quikstart"], ["did you mean quickstart?"]),
    (["optim.betas=[1"], ["optim.betas=[1: cannot be read"]),
    (["~optim.eps"], ["cannot be taken away"]),
    (["train.micro_batch_tokens=16"], ["train.micro_batch_tokens=16 is below data.max_length"]),
    (["recipe=qlora_llama3_8b", "quant=none", "adapter=none", "optim.eps=0"], ["optim.eps=0"]),
    (["-m", "optim.learning_rate=1e-4,abc"], ["optim.learning_rate=abc: must be a number"]),
    (["trian", "recipe=quickstart"], ["trian: no such command (did you mean train?)", *COMMANDS]),
    (["-optim.learning_rate=1e-4"], ["settings have no dashes. Drop them: optim.learning_rate=1e-4"]),
    (["--optim.learning_rate=fast"], ["optim.learning_rate=fast: must be a number"]),
    (["mine.yaml"], ["a file is no command. Put it into ./recipes/ and say recipe=mine", "trainer import mine.yaml"]),
    (["recipe=mine.yaml"], ["picked by its name: recipe=mine, for the file ./recipes/mine.yaml"]),
    (["-m", "seed=1,2", "hydra/launcher=joblib"], ["comes with: pip install hydra-joblib-launcher", "submitit_slurm"]),
    (["-m", "seed=1,2", "hydra/launcher=submitit_lokal"], ["not installed (did you mean submitit_local?)"]),
    (["-m", "seed=1,2", "hydra/sweeper=optuna"], ["is search=optuna here"]),
    (["search=optuna"], ["is of sweeps only"]),
    (["--recipe", "quickstart"], ["Drop them: recipe=VALUE"]),
    (["data.path=a,b.json"], ["several values", """'data.path="a,b.json"'"""]),
    (["--multirn", "seed=1"], ["unknown flag --multirn (did you mean --multirun?)"]),
    (["hydra.nothing=1"], ["hydra.nothing"]),
    (["recipe=mine"], ["recipes/mine.yaml:2: optim.lerning_rate: unknown key (did you mean optim.learning_rate?)"]),
    (["resume"], ["run=DIR is missing"]),
    (["resume", "rnu=x"], ["rnu=x: unknown argument (did you mean run?)"]),
    (["generate", "run=nowhere"], ["run=nowhere"]),
    (["recipes", "all"], ["takes no arguments"]),
]


@pytest.mark.parametrize(("words", "parts"), MISTAKES, ids=lambda value: " ".join(value))
def test_a_mistake_is_one_block_on_stderr_and_light(tmp_path, words, parts):
    if "recipe=mine" in words:
        (tmp_path / "recipes").mkdir()
        (tmp_path / "recipes/mine.yaml").write_text("optim:\n  lerning_rate: 1\n")
    done = light(tmp_path, *words)
    assert done.code == (5 if "run=nowhere" in words else 2)
    assert done.out == ""
    assert done.err.startswith("trainer: ")
    assert [part for part in parts if part not in done.err] == []


def test_cfg_job_prints_what_compose_gives(tmp_path):
    words = ["recipe=quickstart", "optim=adamw", "seed=5", "data.columns={prompt: q}"]
    printed = yaml.safe_load(light(tmp_path, *words, "--cfg", "job").out)
    composed = to_plain(compose(words).config)
    assert printed.pop("output_dir").startswith("outputs/${recipe}/")
    composed.pop("output_dir")
    assert keys(printed) == keys(composed)
    resolved = yaml.safe_load(light(tmp_path, *words, "--cfg", "job", "--resolve").out)
    assert resolved.pop("output_dir").startswith("outputs/quickstart/")
    assert numbers(resolved) == numbers(composed)


def keys(tree, prefix=""):
    if not isinstance(tree, dict):
        return {prefix}
    return {prefix}.union(*(keys(value, f"{prefix}.{key}") for key, value in tree.items()))


def numbers(tree):
    """The same with YAML 1.1's `1e-08`, which is text to it, as the number it is."""
    if isinstance(tree, dict):
        return {key: numbers(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [numbers(value) for value in tree]
    try:
        return float(tree) if isinstance(tree, str) else tree
    except ValueError:
        return tree


def test_help_names_every_command_group_option_and_recipe(capsys):
    assert here("--help") == 0
    page = capsys.readouterr().out
    for words in (COMMANDS, SECTIONS, recipes(), *(options(group) for group in SECTIONS)):
        assert [word for word in words if word not in page] == []


def test_every_command_has_its_module_help_and_run():
    for name in COMMANDS:
        module = program._module(name)
        assert module.HELP.startswith(f"trainer {name}") and callable(module.run)


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (ConfigError("x"), 2, "configuration"),
        (DataError("x"), 3, "data"),
        (ModelError("x"), 4, "model"),
        (StorageError("x"), 5, "checkpoint or disk"),
        (NonFiniteError("x"), 6, "training became non-finite"),
        (OutOfMemoryError("x"), 7, "out of memory"),
    ],
)
def test_each_kind_of_mistake_has_its_code_and_no_traceback(monkeypatch, capsys, error, code, kind):
    def fails(words):
        raise error

    monkeypatch.setattr(program, "dispatch", fails)
    assert here("recipes") == code
    assert capsys.readouterr() == ("", f"trainer: {kind}: x\n")
    assert here("recipes", "debug=true") == code
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141), (ZeroDivisionError(), 1)]
)
def test_what_is_no_mistake_of_the_user(monkeypatch, capsys, error, code):
    def fails(words):
        raise error

    monkeypatch.setattr(program, "dispatch", fails)
    assert here("recipes") == code
    err = capsys.readouterr().err
    assert ("Traceback" in err and "this is a bug" in err) == (code == 1)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"])
def test_a_signal_before_anything_begins_is_its_code(monkeypatch, capsys, signum, code):
    monkeypatch.setattr(program, "dispatch", lambda words: os.kill(os.getpid(), signum))
    try:
        assert here("recipes") == code
    except SystemExit as stop:
        assert stop.code == code
    assert capsys.readouterr().err.startswith("trainer: ")


def test_the_reader_may_leave_early(tmp_path):
    """`trainer recipes | head -1` ends without a word."""
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m trainer --help | head -1"],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith("trainer: fine-tunes") and "Traceback" not in done.stderr


@pytest.mark.parametrize(("module", "code"), [("rich", 2), ("trainer.lost", None)])
def test_a_python_without_the_libraries_is_told_where_they_are(module, code, monkeypatch, capsys):
    """Only a library of others: a module of ours that is missing is a bug."""
    monkeypatch.setattr(sys, "argv", ["trainer", "doctor"])

    def missing(words):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(program, "dispatch", missing)
    assert program.main() == (1 if code is None else code)
    err = capsys.readouterr().err
    assert ("./launch.sh takes the same words" in err) is (code == 2) and ("Traceback" in err) is (code is None)


@pytest.mark.parametrize(
    ("card", "given", "set_to"),
    [
        (True, {}, "expandable_segments:True"),
        (False, {}, None),
        (True, {"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
        (True, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, None),
    ],
)
def test_growing_segments_where_there_is_a_card_and_never_over_the_users(card, given, set_to, monkeypatch):
    """Also without launch.sh."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(program, "kernel_module_loaded", lambda: card)
    monkeypatch.setattr(program.sys, "argv", ["trainer", "--version"])
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    assert program.main() == 0
    assert os.environ.get("PYTORCH_ALLOC_CONF") == set_to


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": "5000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_threads_spin_briefly_where_the_user_does_not_say_how_they_wait(before, after):
    waiting_threads(before)
    assert before == after
