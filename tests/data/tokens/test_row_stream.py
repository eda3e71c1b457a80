"""Windows of a stream against the same rows tokenised whole, and against themselves read again from any state."""

from __future__ import annotations

import csv
import gzip
import json
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.support import CHATS, chat_rows, make_tokenizer, write_jsonl
from trainer.config.compose import compose
from trainer.data.sources import rows as rows_module
from trainer.data.tokens import worker as worker_module
from trainer.data.tokens.row_stream import RowStream, StreamState, StreamWindow
from trainer.data.tokens.tokenize import load_tokens
from trainer.errors import DataError

TOKENIZER = make_tokenizer()


def pairs(count: int, first: int = 0) -> list[tuple[str, str]]:
    return [(f"{CHATS[i % 8][0]} {i}", f"{i} {CHATS[i % 7][1]}" * (1 + i % 3)) for i in range(first, first + count)]


@cache
def settings(*words: str):
    base = ["data=file", "data.max_length=256", "data.streaming=true", "data.eval_fraction=0", "train.max_steps=1"]
    return compose([*base, "train.micro_batch_tokens=256", "data.workers=1", *words]).config.data


def stream(*words: str) -> RowStream:
    return RowStream(settings(*words), TOKENIZER, lambda window: None)


def epochs(reading: RowStream, count: int) -> list[list[StreamWindow]]:
    """The windows of the first epochs."""
    found, state = [], reading.begin()
    for epoch in range(count):
        found.append([])
        while state.epoch == epoch:
            window = reading.window(state)
            assert window.start == state
            found[-1].append(window)
            state = window.end
    return found


def samples(windows: list[StreamWindow]) -> list[tuple[bytes, bytes, str]]:
    return [
        (*(array.tobytes() for array in window.tokens.sample(i)), window.tokens.place(i))
        for window in windows
        for i in range(len(window.tokens))
    ]


def whole(*words: str) -> list[tuple[bytes, bytes, str]]:
    data = settings(*words)
    tokens, _ = load_tokens(data, data.path, "data.path", TOKENIZER)
    return [(*(array.tobytes() for array in tokens.sample(i)), tokens.place(i)) for i in range(len(tokens))]


def write(kind: str, folder, chats) -> str:
    file = folder / f"rows.{kind}"
    instructions = [{"instruction": q, "output": a} for q, a in chats]
    if kind == "jsonl":
        write_jsonl(file, chat_rows(chats))
    elif kind == "jsonl.gz":
        file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in chat_rows(chats)).encode()))
    elif kind == "lines.json":
        write_jsonl(file, chat_rows(chats))
    elif kind == "json":
        file.write_text(json.dumps(chat_rows(chats), indent=1))
    elif kind == "csv":
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, ["instruction", "output"])
            writer.writeheader()
            writer.writerows(instructions)
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(instructions), file)
    elif kind == "txt":
        file.write_text("".join(f"{q} {a}\n\n" for q, a in chats))
    elif kind == "folder":
        file.mkdir()
        for i in range(0, len(chats), 9):
            write_jsonl(file / f"part-{i:03d}.jsonl", chat_rows(chats[i : i + 9]))
    return str(file)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "lines.json", "json", "csv", "parquet", "txt", "folder"])
def test_a_stream_gives_the_samples_of_the_whole_in_order_and_from_any_window(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "PIECE_BYTES", 300)
    monkeypatch.setattr(rows_module, "PIECE_ROWS", 4)
    words = [f"data.path={write(kind, tmp_path, pairs(50))}", "data.streaming_window=7"]
    first, second = epochs(stream(*words), 2)
    assert samples(first) == samples(second) == whole(*words)
    assert [len(window.tokens) for window in first] == [7] * 7 + [1]
    assert [window.ends_epoch for window in first] == [False] * 7 + [True]
    assert sum(window.counts[0].rows for window in first) == 50
    for window in (*first, *second):
        start = StreamState.from_json(json.loads(json.dumps(window.start.to_json())))
        again = stream(*words).window(start)
        assert samples([again]) == samples([window]) and again.end == window.end and again.counts == window.counts
        assert again.digest == window.digest and again.share == window.share


def test_what_lies_before_a_place_in_a_file_of_lines_is_not_read(tmp_path, monkeypatch):
    file = write_jsonl(tmp_path / "rows.jsonl", chat_rows(pairs(400)))
    monkeypatch.setattr(rows_module, "PIECE_BYTES", 1000)
    words = [f"data.path={file}", "data.streaming_window=40"]
    (windows,) = epochs(stream(*words), 1)
    last = windows[-1].start
    content = bytearray(file.read_bytes())
    offset = last.places[0].offset
    assert offset > 0.8 * len(content)
    content[:offset] = b"?" * offset  # would be bad rows
    file.write_bytes(content)
    assert samples([stream(*words).window(last)]) == samples(windows[-1:])


def test_the_share_of_an_epoch_is_that_of_the_bytes(tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", chat_rows(CHATS[:1] * 100))
    (windows,) = epochs(stream(f"data.path={file}", "data.streaming_window=30"), 1)
    assert [window.share for window in windows] == pytest.approx([0.3, 0.6, 0.9, 1.0])
    (windows,) = epochs(stream(f"data.path={write('csv', tmp_path, pairs(10))}", "data.streaming_window=4"), 1)
    assert [window.share for window in windows] == [None, None, 1.0]


def mixture(tmp_path, sizes, weights, *words):
    files = [write_jsonl(tmp_path / f"{i}.jsonl", chat_rows(pairs(n, 1000 * i))) for i, n in enumerate(sizes)]
    sources = [f"{{path: '{f}', name: s{i}, weight: {w}}}" for i, (f, w) in enumerate(zip(files, weights, strict=True))]
    return [f"data.sources=[{', '.join(sources)}]", "data.path=null", "data.streaming_window=8", *words]


def test_the_share_of_a_mixture_is_the_same_from_any_window(tmp_path, monkeypatch):
    """Also where a window has no sample of one source, whose file a new process has not opened."""
    monkeypatch.setattr(rows_module, "PIECE_BYTES", 700)
    words = mixture(tmp_path, [50, 6], [12, 1])
    (windows,) = epochs(stream(*words), 1)
    assert any({source_of(where) for where in window.tokens.places} == {0} for window in windows)
    shares = [window.share for window in windows]
    assert shares == [stream(*words).window(window.start).share for window in windows] == sorted(shares)


def source_of(place: str) -> int:
    return int(place.rpartition("/")[2].partition(".")[0])


def test_a_mixture_takes_each_source_by_its_weight_until_the_first_ends(tmp_path):
    words = mixture(tmp_path, [20, 30], [2, 1])
    first, second = epochs(stream(*words), 2)
    order = [source_of(place) for _, _, place in samples(first)]
    for n in range(1, len(order) + 1):
        assert abs(order[:n].count(0) - 2 * n / 3) <= 1
    assert order.count(0) == 20 and order.count(1) == 10
    assert samples(second) == samples(first)  # an epoch begins again from the start
    lines = [int(place.rpartition(":")[2]) for _, _, place in samples(first) if source_of(place) == 1]
    assert lines == list(range(1, 11))


def test_all_exhausted_goes_on_until_every_source_has_been_seen(tmp_path):
    words = mixture(tmp_path, [5, 12], [1, 1], "data.stop=all_exhausted")
    (windows,) = epochs(stream(*words), 1)
    places = [place for _, _, place in samples(windows)]
    small = [int(p.rpartition(":")[2]) for p in places if source_of(p) == 0]
    large = [int(p.rpartition(":")[2]) for p in places if source_of(p) == 1]
    assert large == list(range(1, 13)) and small == [1 + i % 5 for i in range(len(small))] and len(small) in (12, 13)


def test_weights_by_tokens(tmp_path):
    words = mixture(tmp_path, [60, 60], [3, 1], "data.mix_by=tokens")
    (windows,) = epochs(stream(*words), 1)
    found = samples(windows)
    tokens = [sum(len(ids) // 4 for ids, _, place in found if source_of(place) == i) for i in (0, 1)]
    assert tokens[0] / tokens[1] == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_every_window_of_a_mixture_can_be_read_again(stop, tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "PIECE_BYTES", 500)
    words = mixture(tmp_path, [9, 25, 13], [1, 2, 0.7], f"data.stop={stop}")
    for window in [w for windows in epochs(stream(*words), 3) for w in windows]:
        again = stream(*words).window(window.start)
        assert samples([again]) == samples([window]) and (again.end, again.counts) == (window.end, window.counts)


def test_several_processes_give_the_same_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "PIECE_BYTES", 500)
    words = mixture(tmp_path, [30, 40], [1, 1])
    one, two = stream(*words), stream(*words, "data.workers=2")
    try:
        assert list(map(samples, epochs(one, 2))) == list(map(samples, epochs(two, 2)))
    finally:
        two.close()


def test_a_process_that_is_killed_ends_the_run_with_a_line(tmp_path, monkeypatch):
    def killed(self, piece):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(worker_module.Worker, "block", killed)
    reading = stream(f"data.path={write('jsonl', tmp_path, pairs(9))}", "data.workers=2")
    assert isinstance(reading._tokenisers._pool, ProcessPoolExecutor)
    with pytest.raises(DataError, match=r"was killed.*data\.workers=1"):
        reading.window(reading.begin())
    reading.close()


def test_bad_rows_stop_the_window_they_stand_in_or_are_counted_there(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "PIECE_BYTES", 400)
    rows = chat_rows(pairs(40))
    rows[30] = {"question": "?"}
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    words = [f"data.path={file}", "data.streaming_window=10"]
    reading = stream(*words)
    first = reading.window(reading.begin())
    assert len(first.tokens) == 10
    with pytest.raises(DataError, match=f"{file}:31: unknown format"):
        for _ in range(3):
            first = reading.window(first.end)
    (windows,) = epochs(stream(*words, "data.on_bad_row=skip"), 1)
    assert len(samples(windows)) == 39
    assert [dict(window.counts[0].dropped) for window in windows if window.counts[0].dropped] == [{"bad row": 1}]
    assert sum(window.counts[0].rows for window in windows) == 40


def test_a_source_without_a_usable_sample_ends_instead_of_looping(tmp_path):
    long = write_jsonl(tmp_path / "long.jsonl", chat_rows([("x" * 900, "y")] * 3))
    with pytest.raises(
        DataError, match="no usable sample in a whole pass. 3 rows, 0 used; 3 dropped .*over max_length"
    ):
        reading = stream(f"data.path={long}")
        reading.window(reading.begin())
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(DataError, match="no usable sample"):
        reading = stream(f"data.path={empty}")
        reading.window(reading.begin())


def test_the_identity_of_a_stream(tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", chat_rows(pairs(20)))
    own = stream(f"data.path={file}").content_hash()
    assert stream(f"data.path={file}", "data.workers=2").content_hash() == own
    for word in ("data.max_length=255", "data.train_on=last", "data.streaming_window=5"):
        assert stream(f"data.path={file}", word).content_hash() != own
    write_jsonl(file, chat_rows(pairs(19)) + chat_rows(pairs(1, 77)))
    assert stream(f"data.path={file}").content_hash() != own


def test_a_data_set_on_the_hub_is_read_as_it_comes(monkeypatch):
    import datasets

    asked = []

    def load_dataset(path, split, streaming):
        asked.append((path, split, streaming))
        return datasets.Dataset.from_list(chat_rows(pairs(25))).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(rows_module, "PIECE_ROWS", 4)
    words = ["data.path=someone/chats", "data.split=test", "data.streaming_window=10"]
    first, second = epochs(stream(*words), 2)
    assert [place for _, _, place in samples(first)] == [f"someone/chats:row {i}" for i in range(1, 26)]
    assert samples(first) == samples(second) and set(asked) == {("someone/chats", "test", True)}
    assert samples([stream(*words).window(first[2].start)]) == samples(first[2:])


def test_what_the_hub_does_not_give_is_one_line():
    reading = stream("data.path=someone/chats")
    with pytest.raises(DataError, match="data.path=someone/chats: is no file here, and the hub does not give it"):
        reading.window(reading.begin())
    reading.close()


def test_windows_hold_what_their_lengths_say(tmp_path):
    reading = stream(f"data.path={write('jsonl', tmp_path, pairs(30))}", "data.streaming_window=12")
    window = reading.window(reading.begin())
    assert np.array_equal(window.tokens.offsets, np.cumsum([0, *window.tokens.lengths]))
    assert window.tokens.num_targets == sum(int(window.tokens.sample(i)[1].sum()) for i in range(12))
