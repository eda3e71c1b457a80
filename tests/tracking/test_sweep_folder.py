"""A sweep's folder: whose it is, and how its trials ended."""

import json
import math

import pytest

from trainer.errors import StorageError
from trainer.tracking.sweep_folder import SweepFolder, Trial, metric_of


def trial(number: int, **changes) -> Trial:
    facts = {"status": "completed", "exit_code": 0, "metric": 1.5, "metric_name": "eval_loss"}
    return Trial(number, f"s/{number}", [f"seed={number}"], **{**facts, **changes})


def test_the_last_row_of_a_trial_counts(tmp_path):
    folder = SweepFolder(tmp_path / "s")
    assert folder.trials() == {}
    folder.open()
    folder.record(trial(0, status="failed: data", exit_code=3, metric=None, metric_name=None))
    folder.record(trial(1))
    folder.record(trial(0))
    folder.close()
    assert SweepFolder(tmp_path / "s").trials() == {0: trial(0), 1: trial(1)}


def test_a_kill_while_a_row_is_written_loses_that_row_only(tmp_path):
    folder = SweepFolder(tmp_path)
    folder.record(trial(0))
    whole = (tmp_path / "sweep.jsonl").read_text()
    (tmp_path / "sweep.jsonl").write_text(whole + whole[:40])
    assert folder.trials() == {0: trial(0)}


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ({"eval_loss": 2.0, "final_loss": 1.0}, ("eval_loss", 2.0)),
        ({"eval_loss": None, "final_loss": 1.0}, ("final_loss", 1.0)),
        ({"eval_loss": math.nan, "final_loss": 1.0}, ("eval_loss", None)),
        ({"eval_loss": 0.0, "final_loss": 1.0}, ("eval_loss", 0.0)),
        ({"eval_loss": None, "final_loss": None}, (None, None)),
        (None, (None, None)),
    ],
)
def test_the_metric_is_the_held_out_loss_or_without_one_the_training_loss(summary, expected, tmp_path):
    if summary is not None:
        (tmp_path / "summary.json").write_text(json.dumps({"status": "completed", **summary}))
    assert metric_of(tmp_path) == expected


def test_a_sweeps_folder_is_taken_again_and_others_are_not(tmp_path):
    (tmp_path / "s").mkdir()
    SweepFolder(tmp_path / "s").check()
    (tmp_path / "s/0").mkdir()
    with pytest.raises(StorageError, match=r"holds other things \(0\) and no sweep"):
        SweepFolder(tmp_path / "s").check()
    (tmp_path / "s/multirun.yaml").write_text("")
    SweepFolder(tmp_path / "s").check()


def test_two_sweeps_cannot_share_a_folder(tmp_path):
    first, second = SweepFolder(tmp_path / "s"), SweepFolder(tmp_path / "s")
    first.open()
    with pytest.raises(StorageError, match="another process is running"):
        second.open()
    first.close()
    second.open()
    second.close()
