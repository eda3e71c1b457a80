"""metrics.jsonl: whole rows whatever ends the process, and numbers that JSON knows."""

from __future__ import annotations

import json
import math

from trainer.tracking.metrics import Metrics, read_metrics


def test_rows_come_back_and_what_is_not_finite_is_null(tmp_path):
    file = tmp_path / "metrics.jsonl"
    metrics = Metrics(file)
    row = metrics.write("train", step=1, loss=math.nan, grad_norm=math.inf, mfu=None, epoch=0.5)
    assert row["event"] == "train" and row["loss"] is None and row["grad_norm"] is None
    assert read_metrics(file) == [row], "a row is on disk as soon as it is written"
    for line in file.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))


def test_a_half_line_of_a_killed_run_swallows_nothing(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"event": "train", "step": 1}\n{"event": "tra')
    metrics = Metrics(file)
    metrics.write("train", step=2)
    metrics.close()
    assert [row["step"] for row in read_metrics(file)] == [1, 2]


def test_rows_that_are_taken_back_are_gone_and_what_follows_is_appended(tmp_path):
    file = tmp_path / "metrics.jsonl"
    metrics = Metrics(file)
    rows = [metrics.write("train", step=step, loss=0.1 + step) for step in (1, 2, 3)]
    with file.open("a") as handle:
        handle.write('5\n{"half')
    metrics.keep_only(lambda row: row["step"] <= 2)
    rows[2] = metrics.write("train", step=3, loss=7.0)
    metrics.close()
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows
