"""What files say: a recipe, a sweep or an option from someone else is data, and runs nothing."""

import pickle
from pathlib import Path

import pytest

from tests.program import here
from trainer.config.compose import compose, plan
from trainer.config.shelf import recipes
from trainer.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    return tmp_path


def write(folder: Path, text: str, name: str = "recipes/mine.yaml") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def refusal(words) -> str:
    with pytest.raises(ConfigError) as refused:
        plan(words)
    return str(refused.value)


class Payload:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.write_text, (self.mark, "ran")


@pytest.mark.parametrize("where", ["recipe", "sweep"])
def test_a_callback_in_a_file_does_not_run(folder, where, capsys):
    """The pickle that it names leaves a mark when it is loaded."""
    mark, stored = folder / "mark", folder / "x.pt"
    stored.write_bytes(pickle.dumps(Payload(mark)))
    pickle.loads(stored.read_bytes())
    assert mark.read_text() == "ran", "the payload works"
    mark.unlink()
    hydra = f"hydra:\n  callbacks:\n    x: {{_target_: pickle.loads, data: {stored}}}\n"
    file = write(folder, hydra, "recipes/mine.yaml" if where == "recipe" else "conf/sweep/mine.yaml")
    words = ["recipe=mine"] if where == "recipe" else ["recipe=quickstart", "sweep=mine"]
    for more in ([], ["--cfg", "job"], ["--info", "config"], ["-m"]):
        assert here(*words, *more, "output_dir=out") == 2
        err = capsys.readouterr().err
        assert f"{file}:3: hydra.callbacks.x._target_: pickle.loads: a file names nothing that runs" in err
        assert f"{file}:2: hydra.callbacks: only the command line says this to Hydra" in err
    assert not mark.exists() and not (folder / "out").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hydra: {job: {env_set: {HF_ENDPOINT: 'http://x'}}}\n", ":1: hydra.job: only the command line"),
        ("hydra:\n  job_logging: {}\n", ":2: hydra.job_logging: only the command line"),
        ("hydra:\n  sweeper:\n    _target_: os.system\n", ":3: hydra.sweeper._target_: os.system"),
        ("hydra:\n  sweeper:\n    max_batch_size: 1\n", ":3: hydra.sweeper.max_batch_size: only"),
        ("hydra: x\n", ":1: hydra: must be a mapping"),
        ("hydra: {sweeper: {params: [1]}}\n", ":1: hydra.sweeper.params: must be a mapping"),
        ("hydra: {sweeper: {params: {hydra.job.env_set.X: '1,2'}}}\n", "hydra.job.env_set.X: unknown key"),
        ("hydra: {sweeper: {params: {+hydra.job.env_set.X: '1,2'}}}\n", "+hydra.job.env_set.X: is no plain key"),
        ("hydra: {sweeper: {params: {model.trust_remote_code: 'true,false'}}}\n", "only the command line can"),
        ("hydra: {sweeper: {params: {seed: '${oc.env:HOME},1'}}}\n", ":1: hydra.sweeper.params.seed: ${oc.env:HOME},1"),
        ("defaults:\n  - override /hydra/launcher: submitit_local\n", ":1: override /hydra/launcher: only the command"),
        ("defaults:\n  - /hydra/callbacks: x\n", ":1: /hydra/callbacks: only the command"),
        ("hydra.job.env_set: {A: b}\n", ":1: hydra.job.env_set: unknown key"),
        ("data:\n  path: ${oc.env:SECRET}\n", ":2: data.path: ${oc.env:SECRET}: a file cannot call oc.env"),
        ("data:\n  path: ${oc.decode:x}\n", "a file cannot call oc.decode"),
        ("data:\n  path: a/${now:${oc.env:SECRET}}\n", "a file cannot call oc.env"),
        ("data:\n  path: ${${recipe}:SECRET}\n", "a file cannot call ${recipe}"),
        ("data:\n  sources: [{path: '${oc.env:SECRET}'}]\n", ":2: data.sources.0.path: ${oc.env:SECRET}"),
        ("model:\n  architecture: {hidden_act: {_target_: os.system}}\n", "_target_: os.system"),
    ],
)
def test_what_a_recipe_cannot_say(folder, monkeypatch, text, said):
    monkeypatch.setenv("SECRET", "hunter2")
    file = write(folder, text)
    error = refusal(["recipe=mine"])
    assert f"{file}:" in error and said in error and "hunter2" not in error


def test_what_a_recipe_can_say(folder, monkeypatch):
    write(
        folder,
        "data:\n  path: ${now:%Y}/${recipe}.jsonl\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params: {seed: '1,2'}\n",
    )
    planned = plan(["recipe=mine"])
    assert planned.run.config.data.path.endswith("/mine.jsonl")
    assert [trial[0] for trial in planned.trials] == ["seed=1", "seed=2"]
    monkeypatch.setenv("WHERE", "here.jsonl")
    assert compose(["data.path=${oc.env:WHERE}"]).config.data.path == "here.jsonl"


def bomb(levels: int, width: int = 9) -> str:
    lines = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


def test_a_recipe_of_nested_aliases_is_refused_and_harms_no_other(folder, capsys):
    """12 levels of 9 stand for 9^12 values: whoever expands them never comes back."""
    file = write(folder, bomb(12), "recipes/bomb.yaml")
    write(folder, "a: &a [*a]\n", "recipes/cyclic.yaml")
    write(folder, "seed: 1\n" * 20_000, "recipes/long.yaml")
    assert compose(["recipe=quickstart"]).config.recipe == "quickstart"
    assert f"{file}: its aliases stand for more than 10,000 values" in refusal(["recipe=bomb"])
    assert here("recipes") == 0
    (bombs,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bomb")]
    assert "cannot be used" in bombs
    with pytest.raises(ConfigError, match="unknown key"):
        write(folder, bomb(3), "recipes/small.yaml")
        compose(["recipe=small"])


def test_recipes_that_are_not_picked_are_not_opened(folder, monkeypatch):
    write(folder, "seed: 1\n", "recipes/other.yaml")
    opened = []
    tree = type(recipes()["other"]).tree
    monkeypatch.setattr(type(recipes()["other"]), "tree", lambda self: opened.append(self.name) or tree(self))
    compose(["recipe=quickstart"])
    assert set(opened) == {"quickstart"}
