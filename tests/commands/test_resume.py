"""`trainer resume`: its arguments, and that it goes on whatever the run said about a second start."""

import json

import pytest

from tests.processes import in_child, kill_after_step
from tests.program import here
from tests.support import metrics, train_here
from trainer.config.compose import compose
from trainer.config.saved import save_run


def killed(overrides: list[str], folder) -> None:
    """A run that ended by kill -9 after its second step."""

    def work():
        kill_after_step(2)
        train_here(overrides, folder)

    assert in_child(work) == -9


@pytest.mark.parametrize("said", ["auto", "never", "force"])
def test_a_stopped_run_goes_on_from_its_own_configuration(said, base_overrides, tmp_path, capsys):
    run = tmp_path / "run"
    words = [w for w in base_overrides if not w.startswith("train.save_every")]
    killed([*words, "train.save_every=1", "train.max_steps=4", f"train.resume={said}"], run)
    capsys.readouterr()
    assert here("resume", f"run={run}") == 0
    out, err = capsys.readouterr()
    assert "resumed at step 2" in out and "Traceback" not in err
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
    assert here("resume", f"run={run}") == 0
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "run=DIR is missing"),
        (["run="], 2, "run=DIR is missing"),
        (["rnu=x"], 2, "rnu=x: unknown argument (did you mean run?)"),
        (["run={tmp}", "seed=1", "train.epochs=9"], 2, "2 problems"),
        (["run={tmp}/nowhere"], 5, "there is no such folder"),
        (["run={tmp}"], 5, "holds no run (no config.yaml)"),
    ],
)
def test_wrong_arguments(words, code, said, tmp_path, capsys):
    assert here("resume", *(word.format(tmp=tmp_path) for word in words)) == code
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.startswith("trainer: ") and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_configuration_is_told_in_one_line(tmp_path, capsys):
    save_run(compose([]), tmp_path)
    (tmp_path / "config.yaml").write_text("choices: {")
    assert here("resume", f"run={tmp_path}") == 5
    err = capsys.readouterr().err
    assert "config.yaml: is damaged" in err and len(err.splitlines()) == 1


def test_a_gpu_run_on_a_machine_without_one(tmp_path, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    save_run(compose(["device=cuda"]), tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert here("resume", f"run={tmp_path}") == 2
    assert "device=cuda: this machine has no GPU" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in tmp_path.iterdir() if file.name != ".lock"} == before
