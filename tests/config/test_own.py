"""Options of the user's own: YAMLs beside the recipes, and classes in a module that the command line names."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.program import here
from tests.support import REPO
from trainer.commands import sweep
from trainer.config import own
from trainer.config.compose import compose
from trainer.config.own import OWN, bring_along, load_options
from trainer.config.saved import CONFIG, load_run, save_run
from trainer.config.shelf import options, schema_of, usable
from trainer.errors import ConfigError
from trainer.registry import OPTIONS

MODULE = """
from dataclasses import dataclass
from trainer.registry import option
from trainer.training.optimizers import Optim

@option("optim", "nag")
@dataclass
class NesterovSGD(Optim):
    momentum: float

    def build(self, parameters):
        import torch
        return torch.optim.SGD(self.groups(parameters), lr=self.learning_rate, momentum=self.momentum, nesterov=True)
"""
VALUES = "defaults: [/schema/optim/nag@_here_]\nlearning_rate: 1e-3\nweight_decay: 0.0\nmomentum: 0.9\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder; what a test brings along is gone after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    options_before = {group: dict(classes) for group, classes in OPTIONS.items()}
    modules_before = set(sys.modules)
    yield tmp_path
    OPTIONS.clear()
    OPTIONS.update(options_before)
    for name in set(sys.modules) - modules_before:
        if name.startswith(("own_options_", "my_package")):
            del sys.modules[name]
    for brought in (OWN.folders, OWN.modules, OWN.module_of):
        brought.clear()


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.fixture
def nag(folder):
    """One class and one YAML of the user's own."""
    write(folder / "conf/optim/my_nag.yaml", VALUES)
    return write(folder / "my_options.py", MODULE)


def refusal(call, *words) -> str:
    with pytest.raises(ConfigError) as refused:
        call(*words)
    return str(refused.value)


def test_a_class_and_its_values_are_an_option(nag, capsys):
    assert bring_along(["optim=my_nag", "--options", "my_options.py", "seed=1"]) == ["optim=my_nag", "seed=1"]
    config = compose(["optim=my_nag", "optim.momentum=0.5"]).config
    assert type(config.optim).__name__ == "NesterovSGD"
    assert vars(config.optim) == {"learning_rate": 1e-3, "weight_decay": 0.0, "momentum": 0.5}
    assert "optim.momentun: unknown key (did you mean optim.momentum?)" in refusal(
        compose, ["optim=my_nag", "optim.momentun=1"]
    )
    assert "(did you mean my_nag?)" in refusal(compose, ["optim=my_nga"])
    assert here("--help", "--options", str(nag)) == 0
    assert "my_nag, paged" in capsys.readouterr().out


def test_values_for_a_class_that_comes_with_the_trainer_need_no_module(folder):
    write(
        folder / "far/optim/gentle.yaml",
        "defaults: [/schema/optim/adamw@_here_]\nlearning_rate: 1e-6\n"
        "weight_decay: 0.0\nbetas: [0.9, 0.95]\neps: 1e-8\n",
    )
    write(folder / "far/recipe/soft.yaml", "defaults:\n  - override /optim: gentle\nseed: 5\n")
    assert "optim=gentle: no such option" in refusal(compose, ["optim=gentle"])
    for flag in (["--config-dir", "far"], ["-cd", "far"], ["--config-dir=far"]):
        assert bring_along([*flag, "recipe=soft"]) == ["recipe=soft"]
        config = compose(["recipe=soft"]).config
        assert (config.optim.learning_rate, config.optim.betas, config.seed) == (1e-6, [0.9, 0.95], 5)
    assert OWN.words() == ["--config-dir", str(folder / "far")]


def test_a_module_by_its_name_lies_in_a_package_of_the_current_folder(folder):
    write(folder / "my_package/__init__.py", "")
    write(folder / "my_package/nag.py", MODULE)
    write(folder / "my_package/options.py", "from my_package import nag\n")
    write(folder / "conf/optim/my_nag.yaml", VALUES)
    bring_along(["--options", "my_package.options"])
    assert schema_of("optim", "my_nag") is sys.modules["my_package.nag"].NesterovSGD
    assert OWN.words() == ["--options", "my_package.options"]


def test_another_programs_conf_is_no_matter(folder):
    write(folder / "conf/model/resnet.yaml", "depth: 50\n")
    write(folder / "conf/train/default.yaml", "lr: 1\n")
    assert options("model") == sorted(file.stem for file in (REPO / "conf/model").iterdir())
    compose([])
    said = refusal(compose, ["model=resnet"])
    assert f"{folder}/conf/model/resnet.yaml:1: model=resnet: names no schema" in said
    assert "`defaults: [/schema/model/NAME@_here_]`. Allowed: causal_lm" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1\n# /schema/optim/\n", ":1: names no schema"),
        (
            "\ndefaults: [/schema/optim/adamv@_here_]\n",
            ":2: /schema/optim/adamv@_here_: no such schema (did you mean adamw",
        ),
        ("defaults: [/schema/optim/adamw@_here_, x]\n", ":1: names no schema"),
        ("defaults: [/schema/optim/adamw@_here_]\neps: x\n", ":2: optim.eps=x: must be a number"),
        ("defaults: [/schema/optim/adamw@_here_]\neps: 1\nbeta: 1\n", ":3: optim.beta: unknown key"),
        ("defaults: [/schema/optim/adamw@_here_]\neps: [1\n", ":3: not YAML"),
        ("defaults: [/schema/optim/adamw@_here_]\neps: ${oc.env:HOME}\n", ":2: eps: ${oc.env:HOME}: a file cannot"),
    ],
)
def test_a_wrong_yaml_is_told_at_its_line(folder, text, said):
    file = write(folder / "conf/optim/mine.yaml", text)
    assert f"{file}{said}" in refusal(compose, ["optim=mine"])
    compose(["optim=adamw"])


def test_what_cannot_be_made_is_no_way_out_for_others(nag, folder):
    """The plan tries every option of some groups; a user's own may want a module or a value."""
    write(folder / "conf/optim/half.yaml", "defaults: [/schema/optim/adamw@_here_]\neps: 1e-8\n")
    write(folder / "conf/optim/torn.yaml", "defaults: [/schema/optim/adamw@_here_]\neps: [1\n")
    packaged = sorted(file.stem for file in (REPO / "conf/optim").iterdir())
    assert usable("optim") == packaged
    load_options("my_options.py")
    assert usable("optim") == sorted([*packaged, "my_nag"])


def test_a_name_that_comes_with_the_trainer_is_taken(folder):
    file = write(folder / "conf/quant/nf4.yaml", "defaults: [/schema/quant/nf4@_here_]\ndouble_quant: false\n")
    assert f"{file}: quant=nf4 comes with the trainer" in refusal(compose, [])
    compose(["quant=none"])


def test_a_class_without_values_says_what_to_write(nag):
    bring_along(["--options", "my_options.py"])
    assert "optim=nag: is a class without values. Write conf/optim/nag.yaml" in refusal(compose, ["optim=nag"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os\nimport nothing_like_it\n", ":2: ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("def f(:\n", ":1: SyntaxError: invalid syntax"),
        ("x = 1\nraise SystemExit(3)\n", ":2: SystemExit: 3"),
        ("x = 1\n", "registers no option"),
        (MODULE.replace('"optim", "nag"', '"optims", "nag"'), ':6: @option("optims", "nag"): no such group (did you'),
        (MODULE.replace('"nag"', '"adamw"'), ":6: AssertionError: optim=adamw is registered twice"),
        (MODULE.replace("(Optim)", ""), "must extend trainer.training.optimizers.optim.Optim"),
        (MODULE.replace("def build", "def make"), "lacks the method build"),
        (MODULE.replace("@dataclass\n", ""), "@dataclass stands below @option"),
        (MODULE.replace("momentum: float", "momentum: object"), "a type that no YAML can hold"),
    ],
)
def test_a_module_that_cannot_be_used_is_told_at_its_line_and_leaves_nothing(folder, text, said):
    file = write(folder / "mine.py", text)
    error = refusal(load_options, "mine.py")
    assert str(file) in error and said in error and "\n" not in error
    assert "nag" not in OPTIONS["optim"] and OWN.modules == []
    write(file, MODULE)
    load_options("mine.py")


def test_flags_without_their_value_and_files_that_are_not_there(folder):
    assert "--options: wants a Python file" in refusal(bring_along, ["--options"])
    assert "--config-dir: wants a folder" in refusal(bring_along, ["--config-dir", "--cfg"])
    assert "-cd nowhere: there is no such folder" in refusal(bring_along, ["-cd", "nowhere"])
    assert "there is no such file" in refusal(bring_along, ["--options", "nowhere.py"])
    assert "No module named 'nowhere'" in refusal(bring_along, ["--options", "nowhere"])


def test_a_recipe_cannot_bring_code_along(nag, folder):
    write(folder / "recipes/sly.yaml", "options: my_options.py\n")
    assert "sly.yaml:1: options: unknown key" in refusal(compose, ["recipe=sly"])


def test_a_saved_run_names_its_module_and_needs_no_yaml(nag, folder, monkeypatch):
    bring_along(["--options", "my_options.py"])
    run = compose(["optim=my_nag", "optim.momentum=0.5"])
    save_run(run, folder)
    saved = yaml.safe_load((folder / CONFIG).read_text())["own_options"]
    assert saved == {"optim": {"schema": "nag", "module": str(nag)}}
    (folder / "conf/optim/my_nag.yaml").unlink()
    assert load_run(folder) == run
    monkeypatch.delitem(OPTIONS["optim"], "nag")
    said = refusal(load_run, folder)
    assert "optim=my_nag is an option of" in said and said.endswith(f"Add --options {nag}")
    assert here("resume", f"run={folder}") == here("generate", f"run={folder}", "prompt=x") == 2


def test_runs_without_own_options_are_saved_as_before(folder):
    save_run(compose([]), folder)
    assert "own_options" not in yaml.safe_load((folder / CONFIG).read_text())


def test_the_trials_of_a_sweep_bring_the_same_along(nag, folder, monkeypatch):
    started = []
    monkeypatch.setattr(sweep, "_train", lambda words: started.append(words) or 2)
    flags = ["--options", "my_options.py", "--config-dir", "conf"]
    assert here(*flags, "-m", "optim=my_nag", "optim.momentum=0.5,0.9", "recipe=quickstart", "output_dir=out") == 2
    assert [words[:4] for words in started] == [["--config-dir", f"{folder}/conf", "--options", str(nag)]] * 2
    assert [own.bring_along(words) for words in started] == [
        [
            "optim=my_nag",
            f"optim.momentum={m}",
            "recipe=quickstart",
            "memory.over_budget=refuse",
            f"output_dir='out/{n}'",
        ]
        for n, m in enumerate((0.5, 0.9))
    ]


@pytest.mark.slow
def test_a_run_with_an_optimizer_of_the_users_own_and_its_resume(nag, folder):
    """In processes of their own, as a user does it: plan, train, no resume without the word, resume with it."""

    def trainer(*words):
        command = [sys.executable, "-m", "trainer", *words]
        env = {"PYTHONPATH": str(REPO), "PATH": "/usr/bin:/bin", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    words = ["--options", "my_options.py", "recipe=quickstart", "optim=my_nag", "train.max_steps=2"]
    assert trainer("plan", *words)[0] == 0
    assert trainer("data", *words)[0] == 0
    code, said = trainer(*words, "output_dir=R")
    assert code == 0, said
    code, said = trainer("resume", "run=R")
    assert code == 2 and f"Add --options {nag}" in said and "Traceback" not in said
    code, said = trainer("resume", "run=R", "--options", str(nag))
    assert code == 0 and "nothing to do" in said


def test_a_file_that_the_command_line_names_wins_over_the_recipe(folder):
    """Hydra merges a recipe after the options; the quickstart's learning rate would stand in for the file's."""
    (folder / "conf/optim").mkdir(parents=True, exist_ok=True)
    (folder / "conf/optim/slow.yaml").write_text(
        "defaults: [/schema/optim/adamw@_here_]\nlearning_rate: 7.0e-6\nweight_decay: 0.5\n"
        "betas: [0.9, 0.95]\neps: 1.0e-8\n"
    )
    theirs = compose(["recipe=quickstart"]).config
    config = compose(["recipe=quickstart", "optim=slow"]).config
    assert theirs.optim.learning_rate == 3e-3 and config.optim.learning_rate == 7e-6
    assert config.optim.weight_decay == 0.5 and config.train == theirs.train, "the recipe's other values stay"
    assert compose(["recipe=quickstart", "optim=slow", "optim.learning_rate=1"]).config.optim.learning_rate == 1
    assert compose(["recipe=quickstart", "optim=adamw"]).config.optim.learning_rate == 3e-3
