"""The micro-batches of a streamed run: those of one window after the other, and an index to go on from.

Rows are numbered through an epoch, a step takes the next ones, and an epoch's last step may have fewer. The index says
for every window which rows it holds and from which state it was read; it is only a shortcut, for windows are a pure
function of the data, and a run without it reads from the beginning.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from trainer.data.batches.batch import MicroBatch, collate
from trainer.data.batches.loader import Position
from trainer.data.batches.packing import Packing
from trainer.data.batches.prefetch import Ahead
from trainer.data.tokens.row_stream import RowStream, StreamState, StreamWindow
from trainer.data.tokens.token_sets import TokenSet
from trainer.errors import StorageError

if TYPE_CHECKING:
    from trainer.data.batches.batching import Batching

_WINDOW = 0x57AE
"""Keeps a stream's random numbers apart from the epochs'."""


@dataclass(frozen=True)
class Entry:
    """What is known of a window once it has been read."""

    start: StreamState
    end: StreamState
    first_row: int
    """number of its first row in the epoch"""
    num_rows: int
    steps_before: int
    """optimizer steps before its epoch"""
    digest: str
    """of its tokens"""
    share: float | None
    """of the epoch that is behind after it"""
    ends: list[int]
    """tokens that its answers end with"""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "start": self.start.to_json(), "end": self.end.to_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Entry:
        return cls(
            **{**values, "start": StreamState.from_json(values["start"]), "end": StreamState.from_json(values["end"])}
        )

    @property
    def ends_epoch(self) -> bool:
        return self.end.epoch > self.start.epoch


class Index:
    """The entries of a run, in its folder: stream.jsonl, a header and a line a window."""

    def __init__(self, file: Path):
        self.file = file
        self._stream: IO[str] | None = None

    def read(self, identity: str) -> list[Entry]:
        """The entries of a stream of this identity, up to the first line that is no whole one."""
        entries: list[Entry] = []
        try:
            header, *lines = self.file.read_text(encoding="utf-8").splitlines()
            if json.loads(header) != {"identity": identity}:
                return []
            for line in lines:
                entries.append(Entry.from_json(json.loads(line)))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # a run that was killed leaves half a line, another trainer other fields
        return entries

    def write(self, identity: str, entries: list[Entry]) -> None:
        """Begins the file with what is known; `add` goes on with it."""
        building = self.file.with_name(f".{self.file.name}.building")
        lines = [{"identity": identity}, *(entry.to_json() for entry in entries)]
        building.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        building.replace(self.file)
        self._stream = self.file.open("a", encoding="utf-8")

    def add(self, entry: Entry) -> None:
        if self._stream is not None:
            self._stream.write(json.dumps(entry.to_json()) + "\n")
            self._stream.flush()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class StreamedSteps(Ahead):
    """The micro-batches of every optimizer step of a streamed run; the next window is read while one is trained on."""

    def __init__(
        self,
        stream: RowStream,
        packing: Packing,
        train: Batching,
        seed: int,
        pin: bool,
        index: Index | None = None,
        step=1,
    ):
        """`step`: the first that will be asked for; what lies before it is jumped over where the index allows."""
        super().__init__(pin)
        self.stream, self.packing, self.train, self.seed, self.index = stream, packing, train, seed, index
        self.num_steps = train.max_steps
        settings = (packing, train.micro_batch_tokens, train.micro_batch_size, train.accumulation_steps, seed)
        self._identity = f"{stream.content_hash()} {settings}"
        self.entries: list[Entry] = index.read(self._identity) if index is not None else []
        self._entries_lock = threading.Lock()  # the file has every entry, in order, whenever it is begun
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="windows")
        self._lock = threading.RLock()  # windows are asked for by either thread
        self._windows: dict[int, Future[tuple[StreamWindow, list[np.ndarray]]]] = {}
        try:
            self.first, self._first_rows = self._window(self._find(min(step, self.num_steps)))
        except BaseException:  # an interrupt too: a thread that goes on reading would keep the program from ending
            self.close()
            raise

    def begin(self) -> None:
        """From now on the index is kept in the run folder."""
        with self._entries_lock:
            self.index.write(self._identity, self.entries)

    def close(self) -> None:
        self.stream.stop()
        super().close()
        self._reader.shutdown(wait=True, cancel_futures=True)
        self.stream.close()
        if self.index is not None:
            self.index.close()

    def position(self, step: int) -> Position:
        """Where a step (from 1) lies, by the windows up to its last row: the same whatever has been read ahead.

        So how many steps its epoch has is known of a step that takes rows of the epoch's last window.
        """
        k = self._find(step)
        entry, per_step = self.entries[k], self.train.accumulation_steps
        epoch, index = entry.start.epoch, step - 1 - entry.steps_before
        row = (index + 1) * per_step
        while row > entry.first_row + entry.num_rows and not entry.ends_epoch:
            k += 1
            if k == len(self.entries):
                with self._lock:
                    self._window(k)
            entry = self.entries[k]
        total = -(-(entry.first_row + entry.num_rows) // per_step) if entry.ends_epoch else None
        return Position(epoch, index, total, self._share(k, row))

    def _share(self, k: int, row: int) -> float | None:
        """Of an epoch that is behind after its first `row` rows, the last of them in window k."""
        entry = self.entries[k]
        before = 0.0 if entry.first_row == 0 else self.entries[k - 1].share
        if entry.share is None or before is None:
            return None
        return before + min(1.0, (row - entry.first_row) / entry.num_rows) * (entry.share - before)

    def first_rows(self) -> tuple[TokenSet, list[np.ndarray]]:
        """The samples of the window that the run begins with, and its micro-batches."""
        return self.first.tokens, self._first_rows

    def ends(self) -> set[int]:
        """Tokens that answers end with in the windows of all steps so far."""
        return set().union(*(entry.ends for entry in self.entries))

    def samples(self, step: int) -> list[tuple[TokenSet, np.ndarray]]:
        """The samples of each micro-batch of a step (from 1): their window's tokens, and their numbers in it."""
        with self._lock:
            return self._samples(step)

    def _samples(self, step: int) -> list[tuple[TokenSet, np.ndarray]]:
        k = self._find(step)
        first = (step - 1 - self.entries[k].steps_before) * self.train.accumulation_steps
        found: list[tuple[TokenSet, np.ndarray]] = []
        while len(found) < self.train.accumulation_steps:
            window, rows = self._window(k)
            start = first + len(found) - self.entries[k].first_row
            found += [(window.tokens, row) for row in rows[start:][: self.train.accumulation_steps - len(found)]]
            if self.entries[k].ends_epoch:
                break
            k += 1
        return found

    def fullest(self) -> tuple[TokenSet, np.ndarray]:
        """The largest micro-batch that the settings allow, made of the first window's tokens, all of them targets."""
        lengths = self.packing.largest(self.stream.data.max_length, self.train)
        ids = np.resize(self.first.tokens.input_ids, sum(lengths))
        offsets = np.cumsum([0, *lengths], dtype=np.int64)
        return TokenSet(ids, np.ones(len(ids), dtype=bool), offsets, sources=()), np.arange(len(lengths))

    def make(self, step: int) -> list[MicroBatch]:
        return [collate(tokens, row, self.packing.packed) for tokens, row in self.samples(step)]

    def _find(self, step: int) -> int:
        """The window that holds a step's first row; reads on until it is there."""
        for k in range(len(self.entries) - 1, -1, -1):
            entry = self.entries[k]
            row = (step - 1 - entry.steps_before) * self.train.accumulation_steps
            if row >= entry.first_row:
                if row < entry.first_row + entry.num_rows:
                    return k
                break
        with self._lock:
            return self._read_until(step)

    def _read_until(self, step: int) -> int:
        while True:
            k = len(self.entries)
            self._window(k)
            entry = self.entries[k]
            row = (step - 1 - entry.steps_before) * self.train.accumulation_steps
            if entry.first_row <= row < entry.first_row + entry.num_rows:
                return k

    def _window(self, k: int) -> tuple[StreamWindow, list[np.ndarray]]:
        """Window k and its rows; the one before it is forgotten, the one after it is begun."""
        for old in [number for number in self._windows if number < k - 1]:
            del self._windows[old]
        found = self._windows.get(k) or self._submit(k)
        window, rows = found.result()
        entry = self.entries[k]
        following = entry.steps_before + (entry.first_row + entry.num_rows) // self.train.accumulation_steps
        if following < self.num_steps and k + 1 not in self._windows:
            self._submit(k + 1)
        return window, rows

    def _submit(self, k: int) -> Future[tuple[StreamWindow, list[np.ndarray]]]:
        self._windows[k] = self._reader.submit(self._read, k)
        return self._windows[k]

    def _read(self, k: int) -> tuple[StreamWindow, list[np.ndarray]]:
        """Reads window k, in the one thread that reads."""
        if k < len(self.entries):
            start = self.entries[k].start
        else:
            start = self.entries[k - 1].end if k else self.stream.begin()
        window = self.stream.window(start)
        rng = np.random.default_rng([self.seed, _WINDOW, k])
        rows = self.packing.micro_batches(window.tokens.lengths, self.train, rng)
        if k < len(self.entries):
            if self.entries[k].digest != window.digest:
                raise StorageError(
                    f"{self.index.file}: window {k} of the stream holds other samples than when this run first read "
                    "it: the data has changed. Put it back, or start anew in another output_dir."
                )
            return window, rows
        first_row, steps_before = 0, 0
        if k:
            before = self.entries[k - 1]
            first_row, steps_before = before.first_row + before.num_rows, before.steps_before
            if before.ends_epoch:
                steps_before += -(-first_row // self.train.accumulation_steps)
                first_row = 0
        ends = sorted(window.tokens.ends())
        entry = Entry(start, window.end, first_row, len(rows), steps_before, window.digest, window.share, ends)
        with self._entries_lock:
            self.entries.append(entry)
            if self.index is not None:
                self.index.add(entry)
        return window, rows
