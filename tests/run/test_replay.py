"""replay: steps remade to the last bit; planted bad rows come first. why: the rows of what went wrong."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from tests.program import here
from tests.support import metrics, train_here, write_jsonl
from trainer.assets.corpus import distinct_lines, order_row
from trainer.config.saved import load_run
from trainer.errors import ConfigError, StorageError
from trainer.run.replay import ranked, replay
from trainer.tracking.console import Screen
from trainer.tracking.flight_record import FLIGHT, read_flight


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny, chats):
    """A run with dropout and held-out rows, many checkpoints, and a row of metrics every second step."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    words = [*tiny.overrides(), "data=file", f"data.path={chats}", "data.max_length=128", "data.eval_fraction=0.25"]
    words += ["quant=none", "precision=fp32", "optim=adamw", "device=cpu", "train.micro_batch_tokens=128"]
    words += [
        "train.accumulation_steps=2",
        "train.save_every=4",
        "train.keep_checkpoints=9",
        "train.eval_every=3",
        "adapter.dropout=0.2",
    ]
    train_here([*words, "train.max_steps=8", "train.log_every=2", "train.report=false"], folder)
    return folder


def contents(folder) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("step", "start", "compared"),
    [(2, "its beginning", "loss of step 2"), (6, "step-00000004", "loss of step 6"), (7, "step-00000006", None)],
)
def test_a_step_is_remade_to_the_last_bit(finished, step, start, compared):
    before = contents(finished)
    replayed = replay(load_run(finished), finished, step, step, Screen())
    assert replayed.differs == [] and start in replayed.started_from
    norm = read_flight(finished)[step].grad_norm
    expected = [f"gradient norm of step {step}: {norm!r}"]
    if compared is not None:
        (row,) = [row for row in metrics(finished) if row["step"] == step]
        assert row["grad_norm"] == norm
        expected.append(f"{compared}: {row['loss']!r}")
    assert replayed.checked == expected
    assert contents(finished) == before, "nothing is written"
    indices = [i for part in read_flight(finished)[step].samples for i in part.tolist()]
    assert [row.influence.index for row in replayed.rows] == indices


def test_what_differs_is_said(finished, tmp_path):
    """Metrics and flight record of a run that went otherwise."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    content = bytearray((folder / FLIGHT).read_bytes())
    content[8] ^= 1  # the last bit of the first step's gradient norm
    (folder / FLIGHT).write_bytes(content)
    replayed = replay(load_run(folder), folder, 1, 2, Screen())
    norm = read_flight(finished)[1].grad_norm
    assert len(replayed.differs) == 1 and replayed.differs[0].startswith(f"gradient norm of step 1: {norm!r}, and")
    assert len(replayed.checked) == 2, "step 2: its gradient norm, its loss"


def test_a_step_that_was_not_made_is_refused(finished, tmp_path, capsys):
    with pytest.raises(ConfigError, match="step=9: the run has steps 1 to 8"):
        replay(load_run(finished), finished, 9, 9, Screen())
    folder = tmp_path / "run"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns(FLIGHT))
    with pytest.raises(StorageError, match=r"has no flight\.record"):
        replay(load_run(folder), folder, 1, 1, Screen())
    assert here("replay", f"run={finished}", "step=three") == 2
    assert "step=three" in capsys.readouterr().err


def test_why_names_the_rows_of_a_spike_by_file_and_line(finished, chats, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    rows = [{"event": "train", "step": step, "loss": 1.0 if step != 6 else 50.0} for step in range(1, 9)]
    write_jsonl(folder / "metrics.jsonl", rows)
    assert here("why", f"run={folder}") == 0
    told = capsys.readouterr().out
    assert "spike: the loss of step 6 is 50 where 1 was usual before it" in told
    assert f"trainer replay run={folder} step=6" in told.replace("\n", "")
    ranked_rows = replay(load_run(finished), finished, 6, 6, Screen()).rows
    unbroken = "".join(told.split())
    for row in ranked_rows:
        assert row.place.startswith(f"{chats}:") and row.place in unbroken


def test_why_says_that_nothing_stands_out(finished, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    write_jsonl(folder / "metrics.jsonl", [{"event": "train", "step": n, "loss": 1.0} for n in range(1, 5)])
    (folder / FLIGHT).unlink()
    assert here("why", f"run={folder}") == 0
    assert "nothing stands out" in capsys.readouterr().out


def planted(folder, good: int, bad: int, held_out: int):
    """Orders, `bad` of them with the answer of another, somewhere among the others; returns words and their lines."""
    rows = [json.loads(line) for line in distinct_lines(order_row, good + bad + held_out, seed=3)]
    rng = random.Random(0)
    lines = sorted(rng.sample(range(1, good + bad + 1), bad))
    answers = {line: rows[line - 1]["messages"][-1]["content"] for line in lines}
    for line in lines:
        other = rng.choice([a for a in answers.values() if a != answers[line]])
        rows[line - 1]["messages"][-1]["content"] = other
    train = write_jsonl(folder / "train.jsonl", rows[: good + bad])
    clean = write_jsonl(folder / "clean.jsonl", rows[good + bad :])
    return [f"data.path={train}", f"data.eval_path={clean}"], {f"{train}:{line}" for line in lines}


def found_first(folder, words, bad) -> tuple[float, float]:
    """Share of the planted rows among as many first ones, by effect and by gradient norm, over the run's last epoch:
    each row at the weights of its own step."""
    train_here(["recipe=quickstart", *words, "train.report=false", "train.compare_prompts=0"], folder)
    per_epoch = json.loads((folder / "data_report.json").read_text())["first_epoch"]["steps"]
    last = max(read_flight(folder))
    replayed = replay(load_run(folder), folder, last - per_epoch + 1, last, Screen())
    assert replayed.differs == []
    by_effect, by_norm = (len({row.place for row in rows[: len(bad)]} & bad) / len(bad) for rows in ranked(replayed))
    return by_effect, by_norm


def test_planted_rows_come_first(tmp_path):
    words, bad = planted(tmp_path, good=44, bad=4, held_out=6)
    words += ["train.epochs=4", "train.accumulation_steps=1", "train.micro_batch_tokens=512", "quant=none"]
    by_effect, by_norm = found_first(tmp_path / "run", words, bad)
    assert by_effect >= 0.75 and by_norm == 1.0


@pytest.mark.slow
def test_a_step_of_a_stream_is_remade_to_the_last_bit(base_overrides, chats, tmp_path):
    words = ["data.streaming=true", "data.streaming_window=4", "train.max_steps=6", "train.save_every=4"]
    train_here([*base_overrides, *words, f"data.eval_path={chats}", "adapter.dropout=0.1"], tmp_path)
    for step in (3, 6):
        replayed = replay(load_run(tmp_path), tmp_path, step, step, Screen())
        assert replayed.differs == [] and len(replayed.checked) == 2
        assert all(row.place.startswith(f"{chats}:") for row in replayed.rows)


@pytest.mark.slow
def test_a_hundred_planted_rows_are_found(tmp_path):
    words, bad = planted(tmp_path, good=700, bad=100, held_out=24)
    assert min(found_first(tmp_path / "run", [*words, "train.epochs=2"], bad)) >= 0.95
