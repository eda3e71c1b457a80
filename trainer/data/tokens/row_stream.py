"""Data read as it is needed: windows of samples, tokenised and packed one after the other, and nothing kept.

A window is a pure function of the state it starts from, and a state is small: for each source which file, which piece
of it and how many of the piece's samples are used. So a run that goes on starts reading where it was.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.data_settings import Data, DataSource, MixBy, Stop, training_sources
from trainer.data.sources.file_marks import FileMark
from trainer.data.sources.files import DataFile, find_files, is_hub_id
from trainer.data.sources.rows import Lines, Piece, in_pieces, read_again, read_pieces
from trainer.data.tokens.cache import shape_hash
from trainer.data.tokens.counts import Counts
from trainer.data.tokens.token_sets import TokenSet
from trainer.data.tokens.tokenize import Tally
from trainer.data.tokens.worker import TokenBlock, Tokenisers, Worker, num_processes
from trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class StreamPlace:
    """Where reading stands in one source."""

    file: int = 0
    piece: int = 0
    """number of the piece in its file"""
    offset: int = 0
    line: int = 1
    """byte and line at which the piece begins; only of uncompressed lines"""
    used: int = 0
    """samples of the piece that are taken already"""
    counted: bool = False
    """whether the piece's rows have been counted"""
    share: float | None = 0.0
    """of a pass that is behind; None where the files do not tell"""


@dataclass(frozen=True)
class StreamState:
    """Where reading stands between two windows."""

    epoch: int
    places: tuple[StreamPlace, ...]
    taken: tuple[int, ...]
    """samples or tokens (data.mix_by) taken of each source in this epoch"""
    seen: tuple[bool, ...]
    """sources of which this epoch has seen the end"""

    @classmethod
    def begin(cls, epoch: int, num_sources: int) -> StreamState:
        return cls(epoch, (StreamPlace(),) * num_sources, (0,) * num_sources, (False,) * num_sources)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> StreamState:
        places = tuple(StreamPlace(**place) for place in values["places"])
        return cls(values["epoch"], places, tuple(values["taken"]), tuple(values["seen"]))


@dataclass(frozen=True)
class StreamWindow:
    """Samples that are shuffled and packed together."""

    tokens: TokenSet = field(repr=False)
    start: StreamState
    end: StreamState
    counts: list[Counts]
    """one a source: the rows that were read for this window"""
    share: float | None
    """of the epoch that is behind after it; None where the files do not tell"""

    @property
    def ends_epoch(self) -> bool:
        return self.end.epoch > self.start.epoch

    @property
    def digest(self) -> str:
        return self.tokens.content_hash()[:32]


class _SourceReader:
    """One source, from a place on."""

    def __init__(self, source: DataSource, number: int, tokenisers: Tokenisers, place: StreamPlace):
        self.source, self._number, self._tokenisers = source, number, tokenisers
        self.files: list[DataFile] = _files(source)
        self.begin_again(place)

    def begin_again(self, place: StreamPlace | None = None) -> None:
        """From a place on, or from the beginning."""
        self._start = place or StreamPlace()
        self._from_beginning, self._gave = place is None or place == StreamPlace(), False
        self._under_way: list[tuple[int, int, Piece]] = []
        self._blocks = self._tokenisers.blocks(self._number, self._pieces())
        self._block: TokenBlock | None = None
        self._used = 0

    def ready(self, tally: Tally) -> bool:
        """Whether there is another sample; the rows of a piece are counted when it is opened. Raises DataError."""
        while self._block is None or self._used == len(self._block.lengths):
            block = next(self._blocks, None)
            if block is None:
                if self._from_beginning and not self._gave:
                    tally.finish()
                    raise DataError(
                        f"{self.source.key}={self.source.path}: no usable sample in a whole pass. "
                        f"{tally.counts.sentence(self.source.data.max_length)}."
                    )
                return False
            first = self._block is None
            self._block, self._at = block, self._under_way.pop(0)
            self._used = self._start.used if first else 0
            self._gave = self._gave or len(block.lengths) > 0
            self._ends = np.cumsum(block.lengths)
            if not (first and self._start.counted):
                tally.add(block)
        return True

    def take(self) -> tuple[np.ndarray, np.ndarray, bytes]:
        """The next sample: tokens, targets and its file:line."""
        stop = int(self._ends[self._used])
        span = slice(stop - int(self._block.lengths[self._used]), stop)
        where = self._block.texts["where"][self._used]
        self._used += 1
        return self._block.input_ids[span], self._block.is_target[span], where

    def place(self) -> StreamPlace:
        """Where to begin to get the samples that are not taken yet."""
        if self._block is None:
            return self._start
        file, number, piece = self._at
        offset, line = (piece.offset, piece.first) if isinstance(piece, Lines) else (0, 1)
        return StreamPlace(file, number, offset, line, self._used, True, self.share())

    def share(self) -> float | None:
        """Of a pass that is behind."""
        if not self.files or not all(map(_can_seek, self.files)):
            return None
        if self._block is None:
            return self._start.share
        file, _, piece = self._at
        sizes = [f.path.stat().st_size for f in self.files]
        inside = len(piece.content) * self._used / max(1, len(self._block.lengths))
        return (sum(sizes[:file]) + piece.offset + inside) / sum(sizes)

    def _pieces(self) -> Iterator[Piece]:
        """Pieces from the start on; what is under way is noted."""
        start = self._start
        for file, number, piece in _from(self.source, self.files, start):
            self._under_way.append((file, number, piece))
            yield piece


def _from(source: DataSource, files: list[DataFile], start: StreamPlace) -> Iterator[tuple[int, int, Piece]]:
    """(file, number in the file, piece) of a source. What can be jumped over is not read."""
    if not files:
        from trainer.data.sources.tabular import hub_stream

        pieces = in_pieces(hub_stream(source.path, source.key, source.data.split))
        yield from ((0, number, piece) for number, piece in enumerate(pieces) if number >= start.piece)
        return
    for index in range(start.file, len(files)):
        file, first = files[index], start.piece if index == start.file else 0
        if first and start.offset and _can_seek(file):
            begun = Lines(file.name, file.kind, start.line, b"", start.offset)
            yield from ((index, number, piece) for number, piece in enumerate(read_again(file, begun), start=first))
            continue
        yield from ((index, number, piece) for number, piece in enumerate(read_pieces(file)) if number >= first)


def _can_seek(file: DataFile) -> bool:
    """Whether a piece's offset is a place in the file to begin at; what is compressed or a table is read through."""
    return file.compression is None and file.kind in ("jsonl", "txt")


def _files(source: DataSource) -> list[DataFile]:
    """None for a data set on the hub."""
    return [] if is_hub_id(source.path) else find_files(source.path, source.key, source.data.split)


class RowStream:
    """The windows of a run's training data. Not for several threads at once."""

    def __init__(self, data: Data, tokenizer: PreTrainedTokenizerBase, check: Callable[[StreamWindow], None]):
        """`check` looks at every window and raises where a run must not go on with it."""
        self.data, self.check = data, check
        self.sources = training_sources(data)
        workers = [Worker(source.data, source.path, tokenizer) for source in self.sources]
        self.marks = {file.name: FileMark.of(file.path) for source in self.sources for file in _files(source)}
        size = sum(mark.num_bytes for mark in self.marks.values())
        from_hub = any(is_hub_id(source.path) for source in self.sources)
        self._tokenisers = Tokenisers(workers, num_processes(data.workers, sys.maxsize if from_hub else size))
        self._readers: list[_SourceReader] = []
        self._state: StreamState | None = None
        self._stopped = False
        self._hash = _identity(data, self.sources, self.marks, tokenizer)

    def content_hash(self) -> str:
        """sha256 over the names and marks of the files, and over the settings that shape and mix samples."""
        return self._hash

    def stop(self) -> None:
        """A window that is being read is broken off, with CancelledError; may be called from any thread."""
        self._stopped = True

    def close(self) -> None:
        """Ends the processes that tokenise."""
        self._tokenisers.close()

    def begin(self) -> StreamState:
        """The start of the first window."""
        return StreamState.begin(0, len(self.sources))

    def window(self, start: StreamState) -> StreamWindow:
        """The window that starts there. Raises DataError for rows that cannot be used."""
        if start != self._state:
            pairs = enumerate(zip(self.sources, start.places, strict=True))
            self._readers = [_SourceReader(source, i, self._tokenisers, place) for i, (source, place) in pairs]
        self._state = None
        tallies = [Tally(source.data, source.path, source.key) for source in self.sources]
        samples, end, share = self._fill(start, tallies)
        counts = [tally.finish() for tally in tallies]
        window = StreamWindow(_together(samples), start, end, counts, share)
        self.check(window)
        self._state = end
        return window

    def _fill(self, state: StreamState, tallies: list[Tally]) -> tuple[list, StreamState, float | None]:
        """Up to data.streaming_window samples, of each source by its weight; fewer where an epoch ends."""
        taken, seen, samples = list(state.taken), list(state.seen), []
        while True:
            if self._stopped:
                raise CancelledError
            chosen = min(range(len(taken)), key=lambda i: (taken[i] / self.sources[i].weight, i))
            reader = self._readers[chosen]
            if not reader.ready(tallies[chosen]):
                seen[chosen] = True
                if self.data.stop is Stop.first_exhausted or all(seen):
                    for each in self._readers:
                        each.begin_again()
                    return samples, StreamState.begin(state.epoch + 1, len(taken)), 1.0
                reader.begin_again()
                continue
            if len(samples) == self.data.streaming_window:
                places = tuple(reader.place() for reader in self._readers)
                end = replace(state, places=places, taken=tuple(taken), seen=tuple(seen))
                return samples, end, self._share(seen)
            samples.append(reader.take())
            taken[chosen] += len(samples[-1][0]) if self.data.mix_by is MixBy.tokens else 1

    def _share(self, seen: list[bool]) -> float | None:
        shares = [1.0 if over else reader.share() for over, reader in zip(seen, self._readers, strict=True)]
        if None in shares:
            return None
        return max(shares) if self.data.stop is Stop.first_exhausted else min(shares)


def _together(samples: list[tuple[np.ndarray, np.ndarray, bytes]]) -> TokenSet:
    return TokenSet(
        input_ids=np.concatenate([ids for ids, _, _ in samples]),
        is_target=np.concatenate([is_target for _, is_target, _ in samples]),
        offsets=np.cumsum([0, *(len(ids) for ids, _, _ in samples)], dtype=np.int64),
        sources=(),
        places=[where.decode("utf-8", "surrogateescape") for _, _, where in samples],
    )


def _identity(
    data: Data, sources: list[DataSource], marks: dict[str, FileMark], tokenizer: PreTrainedTokenizerBase
) -> str:
    parts: list[Any] = [data.streaming_window, data.mix_by.value, data.stop.value]
    for source in sources:
        files = [[file.name, marks[file.name].to_json()] for file in _files(source)]
        content = json.dumps([source.path, source.data.split, files])
        parts.append([source.weight, shape_hash(source.data, content, tokenizer)])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
