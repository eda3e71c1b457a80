"""The offline W&B folder read back: every logged step, one id over a resume, no prompt, no key in any output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import kill_after_step
from tests.support import REPO, metrics, train_here
from tests.tracking.offline import records
from trainer.errors import Interrupted
from trainer.tracking.wandb import Mode, resolve_mode
from trainer.tracking.wandb_host import has_key
from trainer.training.watch import Watch


def history(file: Path) -> tuple[str | None, list[dict]]:
    """The run's id and its logged rows."""
    run_id, rows = None, []
    for record in records(file):
        if record.HasField("run"):
            run_id = record.run.run_id
        elif record.HasField("history"):
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return run_id, rows


PROGRAM = """
import os, sys
sys.path.insert(0, {repo!r})
import tests.conftest
os.environ.update({environment!r})
from pathlib import Path
from tests.support import train_here
train_here({words!r}, Path({run!r}))
"""


def program(words: list[str], run: Path, **environment: str) -> subprocess.CompletedProcess:
    """A run in a process of its own, standard input closed."""
    code = PROGRAM.format(repo=str(REPO), words=words, run=str(run), environment=environment)
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, cwd=run.parent
    )


def test_the_offline_folder_holds_every_logged_step_under_one_id(base_overrides, tmp_path, no_key, capsys, monkeypatch):
    """C5, R7: stopped after step 3, resumed; no key."""
    run = tmp_path / "run"
    words = [*base_overrides, "track=wandb", "track.project=testing", "train.max_steps=5", "train.save_every=2"]
    words += ["data.eval_fraction=0.2"]
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Watch, "after_step", Watch.after_step)  # put back at the end
        kill_after_step(3, signal.SIGTERM)
        train_here(words, run)
    capsys.readouterr()
    train_here(words, run)
    assert capsys.readouterr().out.count("W&B offline (no API key") == 2, "at the start, and in the last table"

    files = sorted(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2, "its files lie in the run folder"
    run_id = json.loads((run / "manifest.json").read_text())["run_id"]
    read = [history(file) for file in files]
    assert [id_ for id_, _ in read] == [run_id, run_id]
    rows = {row["step"]: row for _, rows in read for row in rows if "train/loss" in row}
    expected = metrics(run)
    assert sorted(rows) == [row["step"] for row in expected] == [1, 2, 3, 4, 5]
    for row in expected:
        for key in ("loss", "tokens_per_second", "memory_allocated_gib", "memory_peak_gib", "learning_rate"):
            assert rows[row["step"]][f"train/{key}"] == row[key]
    evaluations = {row["step"]: row for _, rows in read for row in rows if "eval/eval_loss" in row}
    assert sorted(evaluations) == [0, 5]
    assert evaluations[5]["eval/eval_loss"] == evaluations[5]["eval/loss"] == metrics(run, "eval")[-1]["eval_loss"]
    assert all(row["train/global_step"] == row["step"] for row in [*rows.values(), *evaluations.values()])


def test_a_key_is_in_no_output(base_overrides, tmp_path):
    """C7."""
    key, token = "k" * 20 + "0123456789" * 2, "hf_" + "s3cr3t" * 6
    run = tmp_path / "run"
    words = [*base_overrides, "track=wandb", "track.mode=offline", "train.max_steps=1", "debug=true"]
    done = program(words, run, WANDB_API_KEY=key, HF_TOKEN=token)
    assert done.returncode == 0, done.stderr
    found = [file for file in run.rglob("*") if file.is_file()]
    assert any(file.suffix == ".wandb" for file in found)
    for secret in (key, token):
        assert secret not in done.stdout + done.stderr
        assert not [file for file in found if secret.encode() in file.read_bytes()]


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def test_auto_is_offline_without_a_key_and_online_with_one(no_key, monkeypatch):
    assert not has_key() and resolve_mode(Mode.auto) is Mode.offline
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert has_key() and resolve_mode(Mode.auto) is Mode.online
    assert resolve_mode(Mode.offline) is Mode.offline


def test_a_key_in_netrc_counts_for_its_host_only(no_key, monkeypatch):
    no_key.write_text("machine api.wandb.ai login user password secret\n")
    os.chmod(no_key, 0o600)
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_key()
    no_key.write_text("machine wandb.example.org login user password secret\n")
    assert has_key()
    no_key.write_text("this is not netrc {")
    assert not has_key()
