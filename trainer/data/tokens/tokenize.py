"""All rows of a path to tokens on disk, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.chat.encoder import Asked
from trainer.data.chat.messages import PlainText, Sample
from trainer.data.data_settings import Data, Format, OnBadRow
from trainer.data.sources.files import find_files, is_hub_id, passed_over
from trainer.data.sources.rows import Piece, in_pieces, read_pieces
from trainer.data.tokens.cache import cache_key, cached, files_hash
from trainer.data.tokens.counts import BAD_ROW, LISTED, Counts
from trainer.data.tokens.store import TokenWriter
from trainer.data.tokens.token_sets import Mixture, Tokens, TokenSet
from trainer.data.tokens.worker import TokenBlock, Tokenisers, Worker, num_processes
from trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Counts", "Mixture", "TokenSet", "Tokens", "load_tokens", "opening", "openings"]


def load_tokens(
    data: Data, path: str, key: str, tokenizer: PreTrainedTokenizerBase, name: str = ""
) -> tuple[TokenSet, Counts]:
    """All usable samples of one path, from the token cache where they are in it.

    `key` names the setting that `path` came from, `name` the source in a mixture. Raises DataError.
    """
    pieces, content, size = _pieces(data, path, key)
    worker = Worker(data, path, tokenizer)
    processes = num_processes(data.workers, size)

    def make(folder: Path) -> Counts:
        tokenisers = Tokenisers([worker], processes)
        try:
            return _tokenise(tokenisers, pieces, folder, key)
        finally:
            tokenisers.close()

    tokens, counts = cached(data.cache_dir, cache_key(data, content, tokenizer), name, make)
    counts.passed_over = passed_over(path, key, data.split)  # the cache knows only the files that were read
    return tokens, counts


def _pieces(data: Data, path: str, key: str) -> tuple[Iterable[Piece], str, int]:
    """The rows of a path, a hash of their content, and about how many bytes they are."""
    if is_hub_id(path):
        from trainer.data.sources.tabular import hub_rows

        rows, fingerprint, size = hub_rows(path, key, data.split)
        return in_pieces(rows), fingerprint, size
    files = find_files(path, key, data.split)
    size = sum(file.path.stat().st_size for file in files)
    return (piece for file in files for piece in read_pieces(file)), files_hash(files), size


class Tally:
    """What the blocks of one source amount to, while they come."""

    def __init__(self, data: Data, path: str, key: str):
        self.data, self.key, self.counts = data, key, Counts(path)
        self._too_long: list[str] = []
        self._first: tuple[Format, str] | None = None
        self._full = [np.zeros(0, dtype=np.int32)]
        self._prints = [np.zeros(0, dtype=np.uint64)]

    def add(self, block: TokenBlock) -> None:
        """Counts one more block. Raises DataError for a row of another format than the first one's."""
        for format, where in block.formats.items():
            self._first = self._first or (format, where)
            if format is not self._first[0]:
                raise DataError(
                    f"{where}: this row is of format {format.value}, but {self._first[1]} is {self._first[0].value}. "
                    "Choose one with data.format=, or put the files into data.sources, each with its own format."
                )
        self.counts.add(block.counts)
        self._too_long += block.too_long[: LISTED + 1 - len(self._too_long)]
        self._full.append(block.full_lengths)
        self._prints.append(block.fingerprints)

    def finish(self) -> Counts:
        """The counts, complete. Raises DataError where a row or a rule stops the run."""
        counts = self.counts
        self._check()
        if self._first is not None:
            counts.format = self._first[0].value
        counts.measure(np.concatenate(self._full))
        counts.duplicates = counts.samples - len(np.unique(np.concatenate(self._prints)))
        counts.passed_over = passed_over(counts.path, self.key, self.data.split)
        return counts

    def _check(self) -> None:
        bad = self.counts.dropped[BAD_ROW]
        if bad and self.data.on_bad_row is OnBadRow.error:
            by_setting = all("data." in problem for problem, _, _ in self.counts.bad_rows.values())
            fix = "Or set" if by_setting else "Fix these rows, or set"
            lines = [*self.counts.problems(), f"{fix} data.on_bad_row=skip to leave them out and count them."]
            raise DataError("\n".join(lines))
        if self._too_long:
            number = self.counts.dropped["over max_length"]
            raise DataError(
                listed(self._too_long, number)
                + "\nRaise data.max_length, or set data.over_length=drop, truncate or split."
            )

    def refuse_nothing(self) -> None:
        """Raises DataError where not one sample can be used."""
        counts, what = self.counts, f"{self.key}={self.counts.path}"
        if not counts.rows:
            raise DataError(f"{what}: the file is empty: 0 rows, 0 usable samples.")
        if not counts.samples:
            reasons = "".join(f"\n{line}" for line in counts.problems())
            raise DataError(f"{what}: no usable sample. {counts.sentence(self.data.max_length)}.{reasons}")


def _tokenise(tokenisers: Tokenisers, pieces: Iterable[Piece], folder: Path, key: str) -> Counts:
    """Writes the tokens of all pieces into the folder. Raises DataError where a rule or a row stops it."""
    (worker,) = tokenisers.workers
    writer, tally = TokenWriter(folder), Tally(worker.data, worker.path, key)
    for block in tokenisers.blocks(0, pieces):
        tally.add(block)
        writer.append(block.input_ids, block.is_target, block.lengths, block.texts)
    counts = tally.finish()
    tally.refuse_nothing()
    writer.finish()
    return counts


def listed(problems: list[str], number: int) -> str:
    """The first problems, one a line, and how many more there are."""
    shown = problems[:LISTED]
    return "\n".join(shown + ([f"... and {number - len(shown)} more"] if number > len(shown) else []))


@dataclass(frozen=True)
class Opening:
    """What a sample asks, and what it answers."""

    asked: Asked
    answer: str
    tools: list[dict] | None = None

    @property
    def question(self) -> str:
        """Its last words."""
        return self.asked if isinstance(self.asked, str) else self.asked[-1]["content"]


def opening(sample: Sample) -> Opening | None:
    """What stands before a dialogue's last answer, or before a text; None for anything else."""
    if isinstance(sample, PlainText):
        return Opening(sample.prompt, sample.text) if sample.prompt else None
    if sample.messages[-1]["role"] != "assistant" or len(sample.messages) < 2:
        return None
    return Opening(sample.messages[:-1], sample.messages[-1]["content"], sample.tools)


def opening_places(tokens: Tokens, count: int) -> list[int]:
    """The samples that `openings` looks at."""
    return np.unique(np.linspace(0, len(tokens) - 1, min(4 * count, len(tokens))).astype(int)).tolist()


def openings(tokens: Tokens, count: int) -> list[Opening]:
    """Up to `count` openings, spread over the samples."""
    found = [found for i in opening_places(tokens, count) if (found := opening(tokens.source(i))) is not None]
    spread = np.linspace(0, len(found) - 1, min(count, len(found))).astype(int)
    return [found[i] for i in spread]
