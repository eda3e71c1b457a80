"""Runs whose data is streamed: killed and continued bit for bit, and what they say of what is not known."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.data.tokens.test_row_stream import mixture, pairs
from tests.processes import in_child, kill_after_step
from tests.program import here
from tests.run.test_beginning import assert_equal_runs
from tests.support import chat_rows, metrics, train_here, write_jsonl
from trainer.config.compose import compose
from trainer.data.sources import file_marks as marks_module
from trainer.data.sources import rows as rows_module
from trainer.data.sources.file_marks import FileMark
from trainer.data.tokens.row_stream import RowStream
from trainer.errors import StorageError


@pytest.fixture
def job(base_overrides, chats, tmp_path, monkeypatch) -> list[str]:
    """A mixture in windows of 7 samples, in two processes; checkpoints at steps 3, 6, 9 and 12."""
    monkeypatch.setattr(rows_module, "PIECE_BYTES", 700)
    return [
        *base_overrides,
        *mixture(tmp_path, [20, 30], [2, 1]),
        "data.streaming_window=7",
        f"data.eval_path={chats}",
        "data.streaming=true",
        "data.workers=2",
        "train.max_steps=12",
        "train.accumulation_steps=3",
        "train.log_every=1",
        "train.save_every=3",
        "train.eval_every=5",
        "adapter.dropout=0.1",
    ]


def entries(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "stream.jsonl").read_text().splitlines()[1:]]


def test_a_streamed_mixture_that_is_killed_in_a_window_goes_on_bit_for_bit(job, tmp_path, capfd):
    whole, run = tmp_path / "whole", tmp_path / "run"
    train_here(job, whole)

    def killed():
        kill_after_step(4)
        train_here(job, run)

    assert in_child(killed) == -signal.SIGKILL
    first_rows = [entry["first_row"] for entry in entries(run) if entry["start"]["epoch"] == 0]
    assert 3 * 3 not in first_rows and len(first_rows) > 3  # step 4 begins inside a window
    train_here(job, run)
    assert "resumed at step 3" in capfd.readouterr().out
    assert_equal_runs(run, whole)
    assert entries(run) == entries(whole)
    ends = [json.loads((folder / "adapter/generation_config.json").read_text()) for folder in (run, whole)]
    assert ends[0] == ends[1]
    rows = [row["epoch"] for row in metrics(whole)]
    assert rows == sorted(rows) and 0 < rows[0] < 1


def test_the_start_table_says_what_is_known_and_what_is_not(job, tmp_path, capsys):
    train_here([*job, "train.max_steps=1"], tmp_path / "run")
    text = " ".join(capsys.readouterr().out.split())
    assert "streamed: this is the window that it begins with, 7 samples" in text
    assert "how much is to come is not known; 8 held out" in text and "epochs as they come" in text
    assert "in this window" in text


def test_a_bad_row_far_into_a_stream_ends_the_run_with_its_state_saved(job, tmp_path, capsys):
    rows = chat_rows(pairs(60))
    rows[45] = {"question": "?"}
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    words = [word for word in job if not word.startswith(("data.sources", "data.path"))]
    words = [*words, f"data.path={file}", "data.streaming_window=8", "train.save_every=0", "train.max_steps=30"]
    run = tmp_path / "run"
    assert here(*words, f"output_dir={run}") == 3
    said = capsys.readouterr().err
    assert f"{file}:46: unknown format" in said and "is saved" in said and "train.resume=force" in said
    saved = json.loads(
        (run / "checkpoints" / (run / "checkpoints/last").read_text().strip() / "state.json").read_text()
    )
    assert saved["step"] > 2
    assert here(*words, f"output_dir={run}", "data.on_bad_row=skip", "train.resume=force") == 0
    assert f"resumed at step {saved['step']}" in capsys.readouterr().out
    assert metrics(run)[-1]["step"] == 30


def test_a_threshold_holds_for_every_window(job, tmp_path, capsys):
    long = [("x" * 300, "y")] * 6
    file = write_jsonl(tmp_path / "rows.jsonl", chat_rows([*pairs(40), *long, *pairs(30)]))
    words = [word for word in job if not word.startswith(("data.sources", "data.path"))]
    words = [*words, f"data.path={file}", "data.streaming_window=8", "train.max_steps=40"]
    assert here(*words, f"output_dir={tmp_path / 'run'}", "data.max_dropped_share=0.3") == 3
    said = capsys.readouterr().err
    assert "of the rows were dropped, over data.max_dropped_share=0.3" in said and "is saved" in said
    assert here(*words, f"output_dir={tmp_path / 'other'}", "data.max_dropped_share=0.9") == 0


def test_other_rows_are_not_gone_on_with(job, tmp_path):
    run = tmp_path / "run"

    def killed():
        kill_after_step(4)
        train_here(job, run)

    assert in_child(killed) == -signal.SIGKILL
    write_jsonl(tmp_path / "0.jsonl", chat_rows(pairs(21)))
    with pytest.raises(StorageError, match=r"the training data has changed since the run began: \S+/0.jsonl had"):
        train_here(job, run)


def test_bytes_that_changed_inside_a_file_are_not_gone_on_with(job, tmp_path, capfd, monkeypatch):
    """In a window that is not read yet, of the same size and away from both ends: only the time tells."""
    monkeypatch.setattr(marks_module, "END_BYTES", 100)
    run, file = tmp_path / "run", tmp_path / "1.jsonl"

    def killed():
        kill_after_step(4)
        train_here([*job, "train.max_steps=9"], run)

    assert in_child(killed) == -signal.SIGKILL
    size, content = file.stat().st_size, bytearray(file.read_bytes())
    mark = FileMark.of(file)
    copied = shutil.copytree(run, tmp_path / "copied")
    assert b"1025 " in content[100:-100]  # a row of the second half
    edited = content.replace(b"1025 ", b"9025 ")
    file.write_bytes(edited)
    after = FileMark.of(file)
    assert (after.num_bytes, after.ends) == (size, mark.ends) and edited != content
    reads = []
    original = RowStream.window
    monkeypatch.setattr(RowStream, "window", lambda self, start: (reads.append(start), original(self, start))[1])
    words = [*job, "train.max_steps=9", f"output_dir={run}"]
    assert here(*words) == 5 and not reads
    said = " ".join(capfd.readouterr().err.split())
    assert f"{file} was written again, {after.modified} instead of {mark.modified}" in said
    assert "train.resume=force goes on with it" in said and "0.jsonl" not in said
    assert here(*words, "train.resume=force") == 0
    assert "resumed at step 3" in capfd.readouterr().out and metrics(run)[-1]["step"] == 9

    other = [*job, "train.max_steps=9", f"output_dir={copied}"]
    file.write_bytes(content)
    assert here(*other) == 5
    os.utime(file, ns=(mark.modified_ns, mark.modified_ns))  # as a copy that keeps times: another inode, another ctime
    shutil.copy2(file, tmp_path / "moved")
    (tmp_path / "moved").replace(file)
    assert here(*other) == 0


def test_what_a_stream_needs_is_said_at_once(base_overrides, chats, capsys):
    words = [*base_overrides, f"data.path={chats}", "data.streaming=true", "data.eval_fraction=0.1"]
    assert here(*words) == 2
    said = capsys.readouterr().err
    assert "data.streaming=true needs train.max_steps" in said and "data.eval_fraction=0.1" in said


def test_the_probe_of_a_stream_is_the_largest_micro_batch_of_the_settings(job, tmp_path, capsys):
    train_here([*job, "train.max_steps=1", "memory.probe=always"], tmp_path / "run")
    assert "the largest micro-batch, 128 tokens, fits" in capsys.readouterr().out
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["micro_batch"]["lengths"] == [128]


def test_helpers_do_not_outlive_a_trainer_that_is_killed(job, tmp_path):
    pids = tmp_path / "pids"

    def killed():
        from trainer.data.tokens.row_stream import RowStream
        from trainer.model.loading.base import load_tokenizer

        config = compose([*job, f"output_dir={tmp_path / 'run'}"]).config
        stream = RowStream(config.data, load_tokenizer(config.model), lambda window: None)
        stream.window(stream.begin())
        pids.write_text(" ".join(map(str, stream._tokenisers._pool._processes)))
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(killed) == -signal.SIGKILL
    helpers = [int(pid) for pid in pids.read_text().split()]
    assert len(helpers) == 2
    for _ in range(100):
        if not any(alive(pid) for pid in helpers):
            return
        time.sleep(0.2)
    pytest.fail("a tokenising process is still there")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
