"""Steps of a streamed run: whole epochs, the index to go on from, and what it says when it cannot be trusted."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.data.batches.test_prefetch import assert_same
from tests.data.tokens.test_row_stream import mixture, pairs, stream, write
from tests.support import chat_rows, write_jsonl
from trainer.data.batches.packing import BestFit, NoPacking
from trainer.data.batches.streamed_steps import Index, StreamedSteps
from trainer.data.sources import file_marks as marks_module
from trainer.data.sources import rows as rows_module
from trainer.errors import StorageError


@pytest.fixture
def open_steps():
    """Makes StreamedSteps, and closes them."""
    opened: list[StreamedSteps] = []

    def make(*words, max_steps=40, packing=None, accumulation_steps=3, seed=0, **more) -> StreamedSteps:
        train = SimpleNamespace(
            max_steps=max_steps, accumulation_steps=accumulation_steps, micro_batch_tokens=256, micro_batch_size=2
        )
        opened.append(StreamedSteps(stream(*words), packing or BestFit(1000), train, seed, pin=False, **more))
        return opened[-1]

    yield make
    for steps in opened:
        steps.close()


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "PIECE_BYTES", 700)
    return [f"data.path={write_jsonl(tmp_path / 'rows.jsonl', chat_rows(pairs(50)))}", "data.streaming_window=12"]


def take(open_steps, words, file: Path, num_steps: int) -> None:
    """A run that keeps its index in a file and stops after some steps."""
    steps = open_steps(*words, index=Index(file))
    steps.begin()
    for step in range(1, num_steps + 1):
        steps.step(step)
    steps.close()


def places(steps: StreamedSteps, step: int) -> list[list[str]]:
    return [[tokens.place(i) for i in row] for tokens, row in steps.samples(step)]


@pytest.mark.parametrize("packing", [BestFit(1000), NoPacking()], ids=["packed", "padded"])
def test_every_epoch_has_every_sample_once_and_only_its_last_step_is_short(words, open_steps, packing):
    steps = open_steps(*words, packing=packing)
    seen: dict[int, Counter] = {}
    sizes: dict[int, list[int]] = {}
    orders: dict[int, list[str]] = {}
    for step in range(1, 41):
        found = places(steps, step)
        position = steps.position(step)
        seen.setdefault(position.epoch, Counter()).update(p for row in found for p in row)
        sizes.setdefault(position.epoch, []).append(len(found))
        orders.setdefault(position.epoch, []).extend(p for row in found for p in row)
        assert position.index == len(sizes[position.epoch]) - 1
    for epoch in list(seen)[:-1]:  # the last may be cut off
        assert len(seen[epoch]) == 50 and set(seen[epoch].values()) == {1}
        assert set(sizes[epoch][:-1]) == {3} and 1 <= sizes[epoch][-1] <= 3
    assert len(seen) > 2 and orders[0] != orders[1]
    assert steps.position(len(sizes[0])).steps_in_epoch == len(sizes[0])
    assert [steps.position(sum(map(len, list(sizes.values())[:n]))).epochs_done for n in (1, 2)] == [1, 2]


def test_rows_fit_and_a_window_is_shuffled(words, open_steps):
    steps = open_steps(*words)
    for step in (1, 2, 9):
        for batch in steps.step(step):
            assert batch.num_tokens <= 256
    tokens, rows = steps.first_rows()
    assert len(tokens) == 12 and sorted(np.concatenate(rows)) == list(range(12)) != list(np.concatenate(rows))
    other = open_steps(*words, seed=1)
    assert any(a.tolist() != b.tolist() for a, b in zip(rows, other.first_rows()[1], strict=False))


def test_steps_made_ahead_are_steps_made_on_demand(words, open_steps):
    ahead, plain = open_steps(*words), open_steps(*words)
    for step in (1, 2, 3, 4, 5, 9, 10, 2, 40):
        assert_same(ahead.step(step), plain.make(step))


@pytest.mark.parametrize("mixed", [False, True])
def test_a_run_goes_on_by_its_index_with_the_same_batches(mixed, words, tmp_path, open_steps):
    if mixed:
        words = mixture(tmp_path, [25, 40], [2, 1], "data.stop=all_exhausted")
    whole = open_steps(*words)
    expected = [whole.make(step) for step in range(1, 41)]
    for stop in (1, 4, 7, 20, 39):
        folder = tmp_path / str(stop)
        folder.mkdir()
        take(open_steps, words, folder / "stream.jsonl", stop)
        again = open_steps(*words, index=Index(folder / "stream.jsonl"), step=stop + 1)
        known = len(again.entries)
        assert known > 1
        for step in range(stop + 1, 41):
            assert_same(again.step(step), expected[step - 1])
            assert again.position(step).epoch == whole.position(step).epoch
        assert again.entries[:known] == whole.entries[:known] and again.ends() == whole.ends()


def test_windows_before_the_step_are_not_read_again(words, tmp_path, open_steps, monkeypatch):
    take(open_steps, words, tmp_path / "stream.jsonl", 19)
    read: list[int] = []
    original = StreamedSteps._read
    monkeypatch.setattr(StreamedSteps, "_read", lambda self, k: (read.append(k), original(self, k))[1])
    again = open_steps(*words, index=Index(tmp_path / "stream.jsonl"), step=20)
    again.step(20)
    assert min(read) == again._find(20) > 3


@pytest.mark.parametrize("damage", ["gone", "half a line", "other run", "no json"])
def test_an_index_that_cannot_be_used_costs_time_only(damage, words, tmp_path, open_steps):
    file = tmp_path / "stream.jsonl"
    take(open_steps, words, file, 20)
    text = file.read_text()
    if damage == "gone":
        file.unlink()
    else:
        file.write_text(
            {"half a line": text[:-40], "other run": text.replace("ident", "idemt"), "no json": "x"}[damage]
        )
    again = open_steps(*words, index=Index(file), step=21)
    again.begin()
    whole = open_steps(*words)
    for step in range(21, 30):
        assert_same(again.step(step), whole.make(step))
    again.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 1 + len(again.entries) and set(lines[0]) == {"identity"}


def test_rows_that_changed_inside_a_file_are_found(words, tmp_path, open_steps, monkeypatch):
    """Where an edit put the time of modification back, the windows' digests see it as far as they were read."""
    monkeypatch.setattr(marks_module, "END_BYTES", 10)
    take(open_steps, words, tmp_path / "stream.jsonl", 5)
    file = tmp_path / "rows.jsonl"
    text, before = file.read_text(), file.stat()
    file.write_text(text.replace("A ball", "A bull"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len(file.read_text()) == len(text)
    with pytest.raises(StorageError, match="window 0 of the stream holds other samples"):
        open_steps(*words, index=Index(tmp_path / "stream.jsonl"), step=1)


def test_the_fullest_micro_batch_is_what_the_settings_allow(words, open_steps):
    tokens, rows = open_steps(*words).fullest()
    assert tokens.lengths.tolist() == [256] and tokens.num_targets == 256 and rows.tolist() == [0]
    tokens, rows = open_steps(*words, packing=NoPacking()).fullest()
    assert tokens.lengths.tolist() == [256, 256] and rows.tolist() == [0, 1]


def test_the_end_of_the_epoch_is_unknown_until_it_is_read(tmp_path, open_steps):
    file = write_jsonl(tmp_path / "rows.jsonl", chat_rows(pairs(400)))
    steps = open_steps(f"data.path={file}", "data.streaming_window=10", max_steps=3)
    steps.step(1)
    position = steps.position(1)
    assert position.steps_in_epoch is None and 0 < position.epochs_done < 0.1


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_where_a_step_lies_does_not_depend_on_what_has_been_read(kind, tmp_path, open_steps, monkeypatch):
    """Asked at once, asked when everything is read, and asked of a run that goes on: by the bytes, or not known."""
    monkeypatch.setattr(rows_module, "PIECE_BYTES", 700)
    if kind == "jsonl":  # of the second source, windows hold a sample at most: a resume has not opened its file
        words = mixture(tmp_path, [50, 6], [12, 1])
    else:
        words = [f"data.path={write('csv', tmp_path, pairs(50))}", "data.streaming_window=12"]
    steps = open_steps(*words, index=Index(tmp_path / "stream.jsonl"))
    steps.begin()
    early = []
    for step in range(1, 41):
        steps.step(step)
        early.append(steps.position(step).epochs_done)
    assert [steps.position(step).epochs_done for step in range(1, 41)] == early
    steps.close()
    known = [done for done in early if done is not None]
    assert known == sorted(set(known)) and {1.0, 2.0} < set(known) and (known == early) == (kind == "jsonl")
    lines = (tmp_path / "stream.jsonl").read_text().splitlines(keepends=True)
    for stop in (3, 8, 17, 30):
        kept = next(k for k, entry in enumerate(steps.entries) if entry.steps_before * 3 + entry.first_row >= stop * 3)
        index = Index(tmp_path / f"{stop}.jsonl")
        index.file.write_text("".join(lines[: 1 + kept]))
        again = open_steps(*words, index=index, step=stop + 1)
        for step in range(stop + 1, 41):
            again.step(step)
            assert again.position(step).epochs_done == early[step - 1]
        assert again.entries[:kept] == steps.entries[:kept]
        again.close()


def test_not_more_than_the_next_window_is_read(tmp_path, open_steps):
    file = write_jsonl(tmp_path / "rows.jsonl", chat_rows(pairs(400)))
    steps = open_steps(f"data.path={file}", "data.streaming_window=10")
    steps.step(1)
    steps.close()
    assert len(steps.entries) <= 3 and len(steps._windows) <= 3


def test_an_interrupt_while_the_first_window_is_read_does_not_wait_for_it(words, monkeypatch):
    """What a signal raises in the main thread, while the other one reads what has no end."""
    rows = chat_rows(pairs(20))

    def endless(file):
        while True:
            yield rows_module.Rows([rows_module.Row("f:1", row) for row in rows])

    monkeypatch.setattr("trainer.data.tokens.row_stream.read_pieces", endless)
    monkeypatch.setattr(Future, "result", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    train = SimpleNamespace(max_steps=3, accumulation_steps=1, micro_batch_tokens=256, micro_batch_size=2)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        StreamedSteps(stream(*words, "data.streaming_window=1000000000"), BestFit(1000), train, 0, pin=False)
    assert threading.active_count() == before
