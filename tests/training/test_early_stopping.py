"""A run that ends when its held-out loss no longer falls, also where it was stopped in between."""

from __future__ import annotations

import pytest

from tests.support import metrics, train_here
from trainer.config.compose import compose
from trainer.errors import ConfigError
from trainer.training.early_stopping import EarlyStopping
from trainer.training.evaluate import Evaluation
from trainer.training.state import State


def test_it_stops_after_so_many_evaluations_without_a_new_lowest():
    stopping, state, stopped = EarlyStopping(2, "eval_loss/b"), State(), []
    for b in (3.0, 2.0, 2.0, 1.0, float("nan"), 1.5):
        stopping.note(Evaluation(9.0, 1, {"a": 9.0, "b": b}), state)
        stopped.append(stopping.due(state))
    assert stopped == [False, False, False, False, False, True]
    assert not EarlyStopping(None, "eval_loss").due(state) and not EarlyStopping(3, "eval_loss/b").due(state)
    with pytest.raises(ConfigError, match="eval_loss/c: this run measures eval_loss, eval_loss/a"):
        EarlyStopping(2, "eval_loss/c").note(Evaluation(9.0, 1, {"a": 9.0}), state)


def test_a_resumed_run_stops_where_the_whole_one_does(base_overrides, tmp_path):
    words = [*base_overrides, "data.eval_fraction=0.25", "train.eval_every=1", "schedule=constant"]
    words += ["optim.learning_rate=1e-30", "train.early_stopping_patience=2", "train.log_every=5"]
    for name, parts in {"whole": [10], "halves": [2, 10]}.items():
        for steps in parts:
            summary = train_here([*words, f"train.max_steps={steps}", "train.resume=force"], tmp_path / name)
        assert summary["status"] == "completed" and summary["steps"] == 3 and summary["stopped_early"]
        assert [row["step"] for row in metrics(tmp_path / name, "stopped")] == [3]
        assert metrics(tmp_path / name)[-1]["step"] == 3
        assert (tmp_path / name / "checkpoints/last").read_text().strip() == "step-00000003"


def test_what_it_needs_is_asked_for():
    with pytest.raises(ConfigError) as error:
        compose(["train.early_stopping_patience=2", "data.eval_fraction=0", "train.early_stopping_metric=loss"])
    for part in ("needs held-out data", "set train.eval_every", "early_stopping_metric=loss"):
        assert part in str(error.value)
