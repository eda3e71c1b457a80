"""`trainer train`: what stops before it starts, where it may write, and that one seed is one run."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.program import here
from tests.support import REPO, cli, metrics, train_here, write_jsonl
from trainer.commands import train
from trainer.commands.train import _split
from trainer.config import compose as composing
from trainer.device import find as device
from trainer.errors import ConfigError

FRESH = ("tokens_per_second", "seconds", "time", "rss_peak_gib", "mfu", "roof_share", "matmul_tflops")
"""What differs between two equal runs."""


def words(overrides, folder, *more) -> list[str]:
    return [*overrides, "train.epochs=1", f"output_dir={folder}", *more]


# Flags


def test_flags_and_overrides_are_told_apart():
    assert _split(["seed=1", "-m", "optim=adamw"]) == (["-m"], ["seed=1", "optim=adamw"])
    assert _split(["--cfg", "job", "seed=1"]) == (["--cfg", "job"], ["seed=1"])
    assert _split(["--cfg=job", "-p", "optim", "seed=1"]) == (["--cfg=job", "-p", "optim"], ["seed=1"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--multirn"], "unknown flag --multirn (did you mean --multirun?)"),
        (["--foo", "--bar=3"], "unknown flag --foo"),
        # would compose another configuration than the one that was checked
        (["--config-name", "x"], "--config-name: a configuration of your own is a recipe"),
        (["-seed=1"], "-seed=1: settings have no dashes. Drop them: seed=1"),
        (["--seed"], "--seed: settings have no dashes. Drop them: seed=VALUE"),
        (["--info", "recipe=quickstart"], "--info recipe=quickstart: about what? Allowed: all, config"),
        (["--config-path=x"], "say recipe=NAME"),
        (["-m", "--cfg", "job"], "-m --cfg: only one of these"),
        (["--cfg"], "what to print? Allowed: job, hydra, all"),
        (["--cfg", "jobs"], "--cfg jobs: what to print?"),
        (["--resolve"], "goes with --cfg job"),
    ],
)
def test_flags_that_hydra_would_stumble_over(given, words):
    with pytest.raises(ConfigError) as refused:
        _split(given)
    assert words in str(refused.value)


def test_a_plain_run_is_composed_once_and_enters_no_hydra(base_overrides, tmp_path, monkeypatch):
    """Hydra's own machinery runs where a word asks for something of it."""
    from trainer.run import train as run

    composed, entered, trained = [], [], []
    compose, enter = composing.hydra_compose, train._enter_hydra
    monkeypatch.setattr(composing, "hydra_compose", lambda *a, **k: composed.append(a) or compose(*a, **k))
    monkeypatch.setattr(train, "_enter_hydra", lambda job, words: entered.append(words) or enter(job, words))
    monkeypatch.setattr(run, "run_training", lambda run, folder, seconds: trained.append((run.config.seed, folder)))
    monkeypatch.chdir(tmp_path)
    assert here(*base_overrides, "seed=3", "hydra.run.dir=out") == 0
    assert (len(composed), entered, trained) == (1, [], [(3, tmp_path / "out")])
    assert list((tmp_path / "out").iterdir()) == []
    assert here(*base_overrides, "seed=4", "output_dir=more", "hydra.output_subdir=.hydra") == 0
    assert len(entered) == 1 and trained[1:] == [(4, tmp_path / "more")]
    assert (tmp_path / "more/.hydra/overrides.yaml").is_file()


def test_without_recipe_and_data_the_quickstart(tmp_path, monkeypatch, capsys):
    from trainer.run import train as run

    trained = []
    monkeypatch.setattr(run, "run_training", lambda run, folder, seconds: trained.append(run))
    monkeypatch.chdir(tmp_path)
    for words in (["output_dir=a"], ["output_dir=b", "recipe=quickstart"], ["output_dir=c", "recipe=null"]):
        assert here(*words) == 0
    assert [r.config.recipe for r in trained] == ["quickstart", "quickstart", "custom"]
    assert replace(trained[0].config, output_dir="b") == trained[1].config
    assert capsys.readouterr().out == "no recipe and no data are named: recipe=quickstart, on the embedded data\n"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_several_processes_want_an_engine_and_are_told_once(tmp_path, monkeypatch, capsys, rank):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    if rank == "0":
        assert here("recipe=quickstart") == 2
    else:
        with pytest.raises(SystemExit, match="2"):
            here("recipe=quickstart")
    assert capsys.readouterr().err.count("a launcher started 2 processes, and engine=single is one") == (rank == "0")
    assert list(tmp_path.iterdir()) == []


# The run folder


def test_a_run_in_its_folder_and_again(base_overrides, tmp_path, monkeypatch, capsys):
    """The default folder is named after the recipe and the time; the same command there is a no-op."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_text("train: {max_steps: 1}\n")
    assert here("recipe=mine", *base_overrides) == 0
    (run,) = (tmp_path / "outputs/mine").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 1)
    assert (run / "adapter/adapter_model.safetensors").is_file()
    assert not list(tmp_path.rglob(".hydra"))
    capsys.readouterr()
    before = (run / "metrics.jsonl").read_bytes()
    assert here("recipe=mine", *base_overrides, f"output_dir={run}") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert (run / "metrics.jsonl").read_bytes() == before


def foreign(folder: Path) -> tuple[Path, str]:
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    return folder, "holds other things (thesis.txt)"


def a_file(folder: Path) -> tuple[Path, str]:
    folder.write_text("mine")
    return folder, "is a file, not a folder"


def below_a_file(folder: Path) -> tuple[Path, str]:
    folder.write_text("mine")
    return folder / "deep" / "run", f"{folder} is a file, not a folder"


def not_to_be_made(folder: Path) -> tuple[Path, str]:
    """Not even root makes folders in /proc."""
    return Path("/proc/trainer/run"), "output_dir=/proc/trainer/run"


def a_dangling_link(folder: Path) -> tuple[Path, str]:
    folder.symlink_to(folder.parent / "nowhere")
    return folder, "is a file, not a folder"


def a_sweep(folder: Path) -> tuple[Path, str]:
    (folder / "0").mkdir(parents=True)
    (folder / "multirun.yaml").write_text("")
    return folder, "holds other things (0, multirun.yaml) and no run"


PLACES = [foreign, a_file, below_a_file, not_to_be_made, a_dangling_link, a_sweep]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_folder_that_cannot_be_the_runs_is_code_5_and_untouched(place, base_overrides, tmp_path, capsys):
    folder, said = place(tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    assert here(*words(base_overrides, folder)) == 5
    err = capsys.readouterr().err
    assert err.startswith(f"trainer: checkpoint or disk: output_dir={folder}") and said in err
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


def test_another_runs_folder_is_code_5_and_names_the_difference(base_overrides, tmp_path, capsys):
    run = tmp_path / "run"
    assert here(*words(base_overrides, run, "train.max_steps=1")) == 0
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    capsys.readouterr()
    assert here(*words(base_overrides, run, "train.max_steps=1", "adapter.r=4")) == 5
    assert "adapter.r: 16 there, 4 here" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def no_file(folder: Path) -> tuple[list[str], int, str]:
    return [f"data.path={folder / 'none.jsonl'}"], 3, "data.path="


def an_empty_file(folder: Path) -> tuple[list[str], int, str]:
    (folder / "empty.jsonl").write_text("")
    return [f"data.path={folder / 'empty.jsonl'}"], 3, "empty"


def broken_json(folder: Path) -> tuple[list[str], int, str]:
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    return [f"data.path={folder / 'broken.jsonl'}"], 3, "broken.jsonl:2"


def no_targets(folder: Path) -> tuple[list[str], int, str]:
    rows = [{"messages": [{"role": "user", "content": "hi"}]}]
    return [f"data.path={write_jsonl(folder / 'rows.jsonl', rows)}"], 3, "rows.jsonl"


def no_model(folder: Path) -> tuple[list[str], int, str]:
    return [f"model.path={folder / 'nowhere'}"], 4, "model.path="


def no_weights(folder: Path) -> tuple[list[str], int, str]:
    (folder / "shell").mkdir()
    (folder / "shell/config.json").write_text('{"model_type": "llama"}')
    return [f"model.path={folder / 'shell'}"], 4, "no weights"


def wrong_targets(folder: Path) -> tuple[list[str], int, str]:
    return ["adapter.target_modules=[q_prj]"], 4, "did you mean q_proj?"


def no_gpu(folder: Path) -> tuple[list[str], int, str]:
    return ["device=cuda"], 2, "device=cuda: this machine has no GPU"


EARLY = [no_file, an_empty_file, broken_json, no_targets, no_model, no_weights, wrong_targets, no_gpu]


@pytest.mark.parametrize("mistake", EARLY, ids=lambda mistake: mistake.__name__)
def test_what_fails_before_the_weights_leaves_no_folder_behind(mistake, base_overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    more, code, said = mistake(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert here(*base_overrides, *more) == code
    err = capsys.readouterr().err
    assert said in err and err.startswith("trainer: ") and "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before, "neither outputs/ nor anything in it"
    assert here(*base_overrides, *more, "output_dir=a/b/c") == code
    assert sorted(tmp_path.rglob("*")) == before, "nor the folders above output_dir"


def test_a_folder_that_was_there_stays(base_overrides, tmp_path, capsys):
    (tmp_path / "a/b").mkdir(parents=True)
    assert here(*words(base_overrides, tmp_path / "a/b/c", "data.path=none.jsonl")) == 3
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a/b"]


def test_a_gpu_recipe_without_a_gpu_says_what_to_run_instead(tmp_path, monkeypatch, capsys):
    """C11. Without a driver before torch is imported, with a driver and no GPU just as well."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for driver in (False, True):
        monkeypatch.setattr(device, "_driver_present", lambda driver=driver: driver)
        assert here("recipe=qlora_llama3_8b", "model.weights=random") == 2
        err = capsys.readouterr().err
        assert err.count("device=cuda: this machine has no GPU") == 1
        assert "device=cpu" in err and "recipe=quickstart" in err and "bitsandbytes" not in err
        assert list(tmp_path.iterdir()) == []


def test_a_bug_is_no_mistake_of_the_user(base_overrides, tmp_path, monkeypatch, capsys):
    """Hydra would print its own half of a traceback and exit as if nothing were known."""
    from trainer.run import train

    def fails(*_):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(train, "run_training", fails)
    assert here(*words(base_overrides, tmp_path / "run")) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: ours" in err and "this is a bug" in err and "HYDRA_FULL_ERROR" not in err
    assert not (tmp_path / "run").exists()


def test_debug_shows_where_a_mistake_was_found_also_from_a_recipe(base_overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_text("debug: true\n")
    assert here("recipe=mine", *base_overrides, "data.path=none.jsonl") == 3
    err = capsys.readouterr().err
    assert "Traceback" in err and err.rstrip().splitlines()[-1].startswith("trainer: data: data.path=none.jsonl")


def test_several_values_without_a_flag_start_nothing(base_overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert here(*base_overrides, "seed=1,2") == 2
    assert "To sweep over them add -m" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# C2: one seed, one run


def record(run: Path) -> dict:
    """Everything about a run that its seed decides."""
    manifest = json.loads((run / "manifest.json").read_text())
    return {
        "rows": [{k: v for k, v in row.items() if k not in FRESH and "memory" not in k} for row in metrics(run)],
        "fresh adapter": manifest["fresh_adapter_hash"],
        "seed": manifest["seed"],
        "adapter": (run / "adapter/adapter_model.safetensors").read_bytes(),
    }


@pytest.fixture
def seeded(base_overrides, tmp_path):
    """Runs with dropout, so that every generator counts."""

    def train(name: str, *more: str) -> dict:
        train_here([*base_overrides, "adapter.dropout=0.1", *more], tmp_path / name)
        return record(tmp_path / name)

    return train


def test_a_seed_makes_one_run_and_another_seed_another(seeded):
    """The default is seed=0, and 0 is a seed like any other."""
    default, zero, one, again = (
        seeded("default"),
        seeded("zero", "seed=0"),
        seeded("one", "seed=1"),
        seeded("b", "seed=1"),
    )
    assert default == zero and default["seed"] == 0
    assert one == again
    assert one["fresh adapter"] != zero["fresh adapter"]
    assert one["adapter"] != zero["adapter"]
    assert [row["loss"] for row in one["rows"]] != [row["loss"] for row in zero["rows"]]
    assert len(one["rows"]) == len(zero["rows"]) > 1


@pytest.mark.slow
def test_a_process_of_its_own_makes_the_same_run(seeded, base_overrides, tmp_path):
    torch.rand(100), os.urandom(1)  # whatever went on in this process before
    mine = seeded("mine", "seed=0")
    done = cli(*base_overrides, "adapter.dropout=0.1", "seed=0", f"output_dir={tmp_path / 'other'}")
    assert done.returncode == 0, done.stderr
    assert record(tmp_path / "other") == mine


@pytest.mark.slow
def test_the_readmes_line_completes_words(tmp_path):
    """The line as it stands there, in a bash; then what pressing tab calls."""
    (line,) = [w for w in (REPO / "README.md").read_text().splitlines() if "-sc install=bash" in w]
    program = tmp_path / "trainer"
    program.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} {program}.py "$@"\n')
    program.chmod(0o755)
    (tmp_path / "trainer.py").write_text(
        "import sys\nsys.argv[0] = sys.argv[0].removesuffix('.py')\n"
        "sys.path.pop(0)\nfrom trainer.__main__ import main\nsys.exit(main())\n"
    )
    tab = "COMP_LINE='trainer recipe=quicks' COMP_POINT=21 COMP_CWORD=1; hydra_bash_completion; echo ${COMPREPLY[@]}"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(REPO)}
    script = f"{line}\nexport COMP_LINE COMP_POINT\n{tab}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.stdout.split() == ["recipe=quickstart"], done.stderr
