"""TensorBoard's event files hold the rows of metrics.jsonl, also over a resume."""

from __future__ import annotations

import json

import pytest

from tests.support import metrics, train_here


@pytest.fixture(scope="module")
def tracked(tmp_path_factory, tiny, chats):
    run_dir = tmp_path_factory.mktemp("tracked") / "run"
    words = [*tiny.overrides(), "data=file", f"data.path={chats}", "data.max_length=128", "data.eval_fraction=0.25"]
    words += ["quant=none", "precision=fp32", "optim=adamw", "device=cpu", "train.micro_batch_tokens=128"]
    words += ["train.accumulation_steps=1", "train.eval_every=2", "track=tensorboard"]
    words += ["train.samples=[Who is red?]", "track.log_samples=true", "train.report=false"]
    train_here([*words, "train.max_steps=3"], run_dir)
    train_here([*words, "train.max_steps=5", "train.resume=force"], run_dir)
    return run_dir


def events(run_dir, axis="steps"):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run_dir / "tensorboard" / axis), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def test_rows_are_those_of_metrics_jsonl_on_both_axes(tracked):
    found, rows = events(tracked), metrics(tracked)
    for name in ("loss", "learning_rate", "grad_norm", "num_tokens"):
        values = {event.step: event.value for event in found.Scalars(f"train/{name}")}
        assert values == {row["step"]: pytest.approx(row[name], rel=1e-6) for row in rows}
    by_tokens = {event.step: event.value for event in events(tracked, "tokens").Scalars("tokens/train_loss")}
    assert by_tokens == {row["num_tokens"]: pytest.approx(row["loss"], rel=1e-6) for row in rows}
    evaluated = {event.step: event.value for event in found.Scalars("eval/eval_loss")}
    assert evaluated == {row["step"]: pytest.approx(row["eval_loss"], rel=1e-6) for row in metrics(tracked, "eval")}


def test_configuration_identity_and_summary_are_texts(tracked):
    found = events(tracked)
    texts = {tag: found.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"]}
    manifest = json.loads((tracked / "manifest.json").read_text())
    assert manifest["data_hash"] in texts["identity/text_summary"]
    assert "learning_rate:" in texts["config/text_summary"]
    assert "best_eval_loss:" in texts["summary/text_summary"]


def test_answers_are_texts_where_they_are_asked_for(tracked):
    texts = events(tracked).Tensors("samples/text_summary")
    rows = metrics(tracked, "samples")
    assert [text.step for text in texts] == [row["step"] for row in rows] == [0, 2, 3, 4, 5]
    assert "prompt: Who is red?" in texts[-1].tensor_proto.string_val[0].decode()


def test_the_command_that_shows_it_is_said(tracked):
    text = (tracked / "train.log").read_text().replace("\n", " ")
    assert "tensorboard --logdir" in text
