"""Pieces of rows to blocks of tokens, in this process or in several; the order of the rows is kept."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.chat.encoder import Encoded, Encoder
from trainer.data.chat.formats import RowReader
from trainer.data.chat.messages import BadRow, PlainText, Sample
from trainer.data.chat.templates import row_template
from trainer.data.data_settings import Data, Format, OverLength
from trainer.data.sources.row import Row
from trainer.data.sources.rows import Piece
from trainer.data.tokens.counts import Counts
from trainer.data.tokens.store import dump_sample
from trainer.data.tokens.token_sets import fingerprint
from trainer.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORTH_A_PROCESS = 4 << 20
"""Bytes of rows below which starting a process costs more than it saves."""


@dataclass
class TokenBlock:
    """The tokens of one piece."""

    counts: Counts
    input_ids: np.ndarray
    is_target: np.ndarray
    lengths: np.ndarray
    """tokens of each sample"""
    full_lengths: np.ndarray
    """tokens of each row's sample before any cut"""
    fingerprints: np.ndarray
    """(samples,) uint64: equal tokens and targets, equal number"""
    texts: dict[str, list[bytes]]
    formats: dict[Format, str] = field(default_factory=dict)
    """formats met, with the place of the first row of each"""
    too_long: list[str] = field(default_factory=list)


class Worker:
    """Turns pieces into blocks with one tokenizer."""

    def __init__(self, data: Data, path: str, tokenizer: PreTrainedTokenizerBase):
        self.data, self.path = data, path
        template = row_template(data.row_template) if data.row_template is not None else None
        self.reader = RowReader(data.format, dict(data.columns), dict(data.roles), template)
        self.encoder = Encoder(
            tokenizer, data.train_on, data.chat_template, data.train_part, data.empty_answers, data.today
        )

    def block(self, piece: Piece) -> TokenBlock:
        """The samples of a piece's rows. Raises DataError for what ends the whole source."""
        counts, formats, too_long = Counts(self.path), {}, []
        rows: list[Row] = []
        samples: list[Sample] = []
        for row in piece.rows():
            counts.rows += 1
            try:
                sample, format = self.reader.sample(row)
            except BadRow as error:
                counts.refuse(row.where, str(error))
                continue
            except DataError as error:  # of the row template
                raise DataError(f"{row.where}: {error}") from None
            formats.setdefault(format, row.where)
            rows.append(row)
            samples.append(sample)
        parts, full, texts = [], [], {"where": [], "source": []}
        remarks: list[set[str]] = [set() for _ in samples]
        all_encoded = self._encoded(rows, samples, remarks)
        for row, sample, encoded, remarked in zip(rows, samples, all_encoded, remarks, strict=True):
            if isinstance(encoded, BadRow):
                counts.refuse(row.where, _with_roles(encoded, sample))
                continue
            full.append(len(encoded[0]))
            try:
                kept = fit(encoded, sample, self.data, counts, row)
            except TooLong as error:
                counts.drop("over max_length", row.where)
                too_long.append(f"{row.where}: {error}")
                continue
            counts.used += bool(kept)
            counts.plain += len(kept) if isinstance(sample, PlainText) else 0
            for what in sorted(remarked) if kept else ():
                counts.remark(what, row.where)
            parts += kept
            texts["where"] += [row.where.encode("utf-8", "surrogateescape")] * len(kept)
            texts["source"] += [dump_sample(sample)] * len(kept)
        return self._block(counts, parts, full, texts, formats, too_long)

    def _encoded(self, rows: list[Row], samples: list[Sample], remarks: list[set[str]]) -> list[Encoded | BadRow]:
        """The samples' tokens; what is remarked of each is added to its set.

        Raises DataError and ModelError that name the row whose rendering ends the run.
        """
        at = None

        def each() -> Iterator[Sample]:
            nonlocal at
            for at, sample in zip(rows, samples, strict=True):
                yield sample

        try:
            return self.encoder.encode_many(each(), lambda number, what: remarks[number].add(what))
        except (DataError, ModelError) as error:
            raise type(error)(f"{at.where}: {error}") from None

    def _block(self, counts, parts, full, texts, formats, too_long) -> TokenBlock:
        ids = np.concatenate([part[0] for part in parts]) if parts else np.zeros(0, dtype=np.int32)
        targets = np.concatenate([part[1] for part in parts]) if parts else np.zeros(0, dtype=bool)
        counts.samples, counts.tokens, counts.targets = len(parts), len(ids), int(targets.sum())
        counts.ended = sum(self.encoder.is_ended(ids[: np.flatnonzero(is_target)[-1] + 1]) for ids, is_target in parts)
        prints = [fingerprint(*part) for part in parts]
        return TokenBlock(
            counts=counts,
            input_ids=ids,
            is_target=targets,
            lengths=np.array([len(part[0]) for part in parts], dtype=np.int64),
            full_lengths=np.array(full, dtype=np.int32),
            fingerprints=np.frombuffer(b"".join(prints), dtype=np.uint64),
            texts=texts,
            formats=formats,
            too_long=too_long,
        )


class Tokenisers:
    """Processes that turn pieces into blocks; with one, the work is done here. Made before there is a GPU to fork."""

    def __init__(self, workers: list[Worker], processes: int):
        self.workers, self.processes = workers, processes
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            # Forked, so that the tokenizer need not be made again: a new interpreter takes ten seconds to import it.
            context = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(processes, context, _begin_process, (workers,))

    def blocks(self, number: int, pieces: Iterable[Piece]) -> Iterator[TokenBlock]:
        """Blocks of worker `number`, in the order of their pieces; a few pieces are under way at a time."""
        if self._pool is None:
            yield from map(self.workers[number].block, pieces)
            return
        under_way: deque[Future[TokenBlock]] = deque()
        for piece in pieces:
            under_way.append(self._pool.submit(_block_in_process, number, piece))
            if len(under_way) > 3 * self.processes:
                yield _result(under_way.popleft())
        while under_way:
            yield _result(under_way.popleft())

    def close(self) -> None:
        """Ends the processes; what they have not begun is left undone."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _result(block: Future[TokenBlock]) -> TokenBlock:
    try:
        return block.result()
    except BrokenProcessPool:
        raise DataError(
            "a process that tokenises was killed, most likely because the memory was full. Set data.workers=1."
        ) from None


_process: list[Worker] = []
"""The workers of a tokenising process; empty in the trainer's own."""


def _begin_process(workers: list[Worker]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer's own process decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _process[:] = workers
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this process when the trainer's is gone: one that is killed cannot end its helpers, and they would stay."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _block_in_process(number: int, piece: Piece) -> TokenBlock:
    return _process[number].block(piece)


def num_processes(workers: int | None, size: int) -> int:
    if "fork" not in multiprocessing.get_all_start_methods():
        return 1
    if workers is not None:
        return workers
    return max(1, min(len(os.sched_getaffinity(0)), size // WORTH_A_PROCESS))


class TooLong(Exception):
    """A sample over data.max_length where the policy allows none."""


def fit(
    encoded: tuple[list[int], list[bool]], sample: Sample, data: Data, counts: Counts, row: Row
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The sample within data.max_length, by data.over_length: none, one, or several parts. Raises TooLong."""
    ids, is_target = encoded
    arrays = np.asarray(ids, dtype=np.int32), np.asarray(is_target, dtype=bool)
    limit, cut = data.max_length, len(ids) > data.max_length
    if not cut:
        parts = [arrays]
    elif data.over_length is OverLength.drop:
        counts.drop("over max_length", row.where)
        return []
    elif data.over_length is OverLength.truncate:
        parts = [(arrays[0][:limit], arrays[1][:limit])]
    elif data.over_length is OverLength.split and isinstance(sample, PlainText) and not sample.prompt:
        parts = [(arrays[0][i : i + limit], arrays[1][i : i + limit]) for i in range(0, len(ids), limit)]
    else:
        only = " (only format text can be split)" if data.over_length is OverLength.split else ""
        raise TooLong(f"{len(ids)} tokens, over data.max_length={limit}{only}")
    # The first token of a sample has nothing before it to be predicted from: as a target it would not count.
    parts = [part for part in parts if part[1][1:].any()]
    if not parts:
        counts.drop("no targets left after the cut" if cut and any(is_target) else "no targets", row.where)
        return []
    if cut:
        counts.truncated += data.over_length is OverLength.truncate
        counts.split += len(parts) if data.over_length is OverLength.split else 0
    return parts


def _with_roles(error: BadRow, sample: Sample) -> str:
    text = str(error)
    if isinstance(sample, PlainText) or "roles" in text:
        return text
    return f"{text} (roles: {', '.join(message['role'] for message in sample.messages)})"
