"""Rows to tokens, a piece at a time, in this process or in several; the order of the rows is kept."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.cache import cache_key, cached, files_hash
from trainer.data.chat import Encoder
from trainer.data.counts import LISTED, Counts
from trainer.data.files import find_files, is_hub_id
from trainer.data.formats import BadRow, Dialogue, PlainText, Reader, Sample
from trainer.data.options import Data, Format, OnBadRow, OverLength
from trainer.data.rows import Piece, Row, in_pieces, read_pieces
from trainer.data.store import TokenWriter, dump_sample
from trainer.data.templates import row_template
from trainer.data.tokens import Mixture, Tokens, TokenSet
from trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Counts", "Mixture", "TokenSet", "Tokens", "load_tokens", "opening", "openings", "split_held_out"]

WORTH_A_PROCESS = 4 << 20
"""Bytes of rows below which starting a process costs more than it saves."""


@dataclass
class Block:
    """The tokens of one piece."""

    counts: Counts
    input_ids: np.ndarray
    is_target: np.ndarray
    lengths: np.ndarray
    """tokens of each sample"""
    full_lengths: np.ndarray
    """tokens of each row's sample before any cut"""
    fingerprints: np.ndarray
    """(samples,) uint64: equal tokens, equal number"""
    texts: dict[str, list[bytes]]
    formats: dict[Format, str] = field(default_factory=dict)
    """formats met, with the place of the first row of each"""
    too_long: list[str] = field(default_factory=list)


class Worker:
    """Turns pieces into blocks with one tokenizer."""

    def __init__(self, data: Data, path: str, tokenizer: PreTrainedTokenizerBase):
        self.data, self.path = data, path
        template = row_template(data.row_template) if data.row_template is not None else None
        self.reader = Reader(data.format, dict(data.columns), dict(data.roles), template)
        self.encoder = Encoder(tokenizer, data.train_on, data.chat_template)

    def block(self, piece: Piece) -> Block:
        """The samples of a piece's rows. Raises DataError for what ends the whole source."""
        counts, formats, too_long = Counts(self.path), {}, []
        rows: list[Row] = []
        samples: list[Sample] = []
        for row in piece.rows():
            counts.rows += 1
            try:
                sample, format = self.reader.sample(row)
            except BadRow as error:
                counts.drop(BAD_ROW, f"{row.where}: {error}")
                continue
            formats.setdefault(format, row.where)
            rows.append(row)
            samples.append(sample)
        parts, full, texts = [], [], {"where": [], "source": []}
        for row, sample, encoded in zip(rows, samples, self.encoder.encode_many(samples), strict=True):
            if isinstance(encoded, BadRow):
                counts.drop(BAD_ROW, f"{row.where}: {_with_roles(encoded, sample)}")
                continue
            full.append(len(encoded[0]))
            try:
                kept = fit(encoded, sample, self.data, counts, row)
            except TooLong as error:
                counts.drop("over max_length", row.where)
                too_long.append(f"{row.where}: {error}")
                continue
            counts.used += bool(kept)
            parts += kept
            texts["where"] += [row.where.encode("utf-8", "surrogateescape")] * len(kept)
            texts["source"] += [dump_sample(sample)] * len(kept)
        return self._block(counts, parts, full, texts, formats, too_long)

    def _block(self, counts, parts, full, texts, formats, too_long) -> Block:
        ids = np.concatenate([part[0] for part in parts]) if parts else np.zeros(0, dtype=np.int32)
        targets = np.concatenate([part[1] for part in parts]) if parts else np.zeros(0, dtype=bool)
        special = self.encoder.special_ids
        counts.samples, counts.tokens, counts.targets = len(parts), len(ids), int(targets.sum())
        counts.ended = sum(int(ids[np.flatnonzero(is_target)[-1]]) in special for ids, is_target in parts)
        prints = [hashlib.blake2b(part[0].tobytes(), digest_size=8).digest() for part in parts]
        return Block(
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


BAD_ROW = "bad row"


def load_tokens(
    data: Data, path: str, key: str, tokenizer: PreTrainedTokenizerBase, name: str = ""
) -> tuple[TokenSet, Counts]:
    """All usable samples of one path, from the token cache where they are in it.

    `key` names the setting that `path` came from, `name` the source in a mixture. Raises DataError.
    """
    pieces, content, size = _pieces(data, path, key)
    worker = Worker(data, path, tokenizer)
    processes = _processes(data.workers, size)

    def make(folder: Path) -> Counts:
        return _tokenise(worker, pieces, processes, folder, key)

    return cached(data.cache_dir, cache_key(data, content, tokenizer), name, make)


def _pieces(data: Data, path: str, key: str) -> tuple[Iterable[Piece], str, int]:
    """The rows of a path, a hash of their content, and about how many bytes they are."""
    if is_hub_id(path):
        from trainer.data.tables import hub_rows

        rows, fingerprint, size = hub_rows(path, key, data.split)
        return in_pieces(rows), fingerprint, size
    files = find_files(path, key, data.split)
    size = sum(file.path.stat().st_size for file in files)
    return (piece for file in files for piece in read_pieces(file)), files_hash(files), size


def _tokenise(worker: Worker, pieces: Iterable[Piece], processes: int, folder: Path, key: str) -> Counts:
    """Writes the tokens of all pieces into the folder. Raises DataError where a rule or a row stops it."""
    data, counts = worker.data, Counts(worker.path)
    writer = TokenWriter(folder)
    too_long: list[str] = []
    first: tuple[Format, str] | None = None
    full, prints = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.uint64)]
    for block in _blocks(worker, pieces, processes):
        for format, where in block.formats.items():
            first = first or (format, where)
            if format is not first[0]:
                raise DataError(
                    f"{where}: this row is of format {format.value}, but {first[1]} is {first[0].value}. Choose one "
                    "with data.format=, or put the files into data.sources, each with its own format."
                )
        counts.add(block.counts)
        too_long += block.too_long[: LISTED + 1 - len(too_long)]
        full.append(block.full_lengths)
        prints.append(block.fingerprints)
        writer.append(block.input_ids, block.is_target, block.lengths, block.texts)
    _check(counts, data, key, too_long)
    writer.finish()
    counts.format = first[0].value
    counts.measure(np.concatenate(full))
    counts.duplicates = counts.samples - len(np.unique(np.concatenate(prints)))
    return counts


def _check(counts: Counts, data: Data, key: str, too_long: list[str]) -> None:
    path = counts.path
    if not counts.rows:
        raise DataError(f"{key}={path}: the file is empty: 0 rows, 0 usable samples.")
    bad = counts.dropped[BAD_ROW]
    if bad and data.on_bad_row is OnBadRow.error:
        raise DataError(
            listed(counts.examples[BAD_ROW], bad)
            + "\nFix these rows, or set data.on_bad_row=skip to leave them out and count them."
        )
    if too_long:
        number = counts.dropped["over max_length"]
        raise DataError(
            listed(too_long, number) + "\nRaise data.max_length, or set data.over_length=drop, truncate or split."
        )
    if not counts.samples:
        reasons = "".join(f"\n{place}" for place in counts.examples.get(BAD_ROW, ()))
        raise DataError(f"{key}={path}: no usable sample. {counts.sentence(data.max_length)}.{reasons}")


def _blocks(worker: Worker, pieces: Iterable[Piece], processes: int) -> Iterator[Block]:
    """The blocks in the order of their pieces; a few pieces are under way at a time."""
    if processes == 1:
        yield from map(worker.block, pieces)
        return
    # Forked, so that the tokenizer need not be made again: a new interpreter takes ten seconds to import it.
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, initializer=_begin_process, initargs=(worker,)) as pool:
        under_way: deque = deque()
        for piece in pieces:
            under_way.append(pool.apply_async(_block_in_process, (piece,)))
            if len(under_way) > 3 * processes:
                yield under_way.popleft().get()
        while under_way:
            yield under_way.popleft().get()


_process: dict[str, Worker] = {}
"""The worker of a tokenising process; empty in the trainer's own."""


def _begin_process(worker: Worker) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer's own process decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _process["worker"] = worker


def _block_in_process(piece: Piece) -> Block:
    return _process["worker"].block(piece)


def _processes(workers: int | None, size: int) -> int:
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


def split_held_out(tokens: TokenSet, fraction: float, seed: int) -> tuple[TokenSet, TokenSet | None]:
    """Training and held-out samples, chosen by the seed alone; at least one of each, or None held out."""
    if fraction == 0.0 or len(tokens) < 2:
        return tokens, None
    held_out = min(max(1, round(fraction * len(tokens))), len(tokens) - 1)
    order = np.random.default_rng([seed, _HELD_OUT]).permutation(len(tokens))
    return tokens.take(np.sort(order[held_out:])), tokens.take(np.sort(order[:held_out]))


_HELD_OUT = 0x5EED
"""Keeps the split's random stream apart from the epochs'."""


def listed(problems: list[str], number: int) -> str:
    """The first problems, one a line, and how many more there are."""
    shown = problems[:LISTED]
    return "\n".join(shown + ([f"... and {number - len(shown)} more"] if number > len(shown) else []))


def _with_roles(error: BadRow, sample: Sample) -> str:
    text = str(error)
    if isinstance(sample, PlainText) or "roles" in text:
        return text
    return f"{text} (roles: {', '.join(message['role'] for message in sample.messages)})"


def opening(sample: Sample) -> tuple[list[dict], str] | None:
    """The messages before a dialogue's last answer, and that answer; None for anything else."""
    if not isinstance(sample, Dialogue) or sample.messages[-1]["role"] != "assistant" or len(sample.messages) < 2:
        return None
    return sample.messages[:-1], sample.messages[-1]["content"]


def openings(tokens: Tokens, count: int) -> list[tuple[list[dict], str]]:
    """Up to `count` openings, spread over the samples."""
    places = np.linspace(0, len(tokens) - 1, min(4 * count, len(tokens))).astype(int)
    found = [pair for i in np.unique(places) if (pair := opening(tokens.source(i))) is not None]
    spread = np.linspace(0, len(found) - 1, min(count, len(found))).astype(int)
    return [found[i] for i in spread]
