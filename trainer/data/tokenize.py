"""Files to tokens: every row is used, or counted under the reason why it is not."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.chat import Encoder
from trainer.data.formats import BadRow, Dialogue, PlainText, Sample, to_sample
from trainer.data.options import Data, OnBadRow, OverLength
from trainer.data.rows import Row, read_rows
from trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LISTED = 10
"""Problems shown in one error."""


@dataclass
class TokenSet:
    """Samples end to end in flat arrays. Sample i is [offsets[i], offsets[i + 1])."""

    input_ids: np.ndarray
    """(tokens,) int32"""
    is_target: np.ndarray
    """(tokens,) bool"""
    offsets: np.ndarray
    """(samples + 1,) int64"""
    sources: list[Sample] = field(repr=False)
    """what each sample was made from"""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """(samples,) tokens in each"""
        return np.diff(self.offsets)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and targets of one sample, each (length,)."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        return self.input_ids[span], self.is_target[span]

    def content_hash(self) -> str:
        """sha256 over tokens, targets and borders."""
        digest = hashlib.sha256()
        for array in (self.input_ids, self.is_target, self.offsets):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def take(self, indices: np.ndarray) -> TokenSet:
        """The samples with these indices, in this order."""
        samples = [self.sample(i) for i in indices]
        return _token_set(samples, [self.sources[i] for i in indices])


@dataclass
class Counts:
    """What became of the rows of one file."""

    path: str
    rows: int = 0
    used: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """rows not used, by reason"""
    truncated: int = 0
    split: int = 0
    """samples made by cutting a longer one into parts"""
    tokens: int = 0
    targets: int = 0

    def sentence(self, max_length: int) -> str:
        """One line for the screen and for errors; the limit in force is always said."""
        parts = [f"{self.used} of {self.rows} rows used"]
        parts += [f"{count} dropped: {reason}" for reason, count in self.dropped.most_common()]
        if self.truncated:
            parts.append(f"{self.truncated} ({self.truncated / self.rows:.1%}) cut at {max_length} tokens")
        if self.split:
            parts.append(f"{self.split} parts of longer texts")
        return ", ".join(parts) + f" (limit {max_length} tokens)"


def load_tokens(data: Data, path: str, key: str, tokenizer: PreTrainedTokenizerBase) -> tuple[TokenSet, Counts]:
    """All usable samples of one file. `key` names the setting that `path` came from. Raises DataError."""
    encoder = Encoder(tokenizer, data.train_on)
    counts = Counts(path)
    samples: list[tuple[np.ndarray, np.ndarray]] = []
    sources: list[Sample] = []
    problems: list[str] = []
    for row in read_rows(path, key):
        counts.rows += 1
        try:
            sample = to_sample(row, data.format)
            ids, is_target = encoder.encode(sample)
            kept = _fit(ids, is_target, sample, data, counts, row)
        except BadRow as error:
            problems.append(f"{row.where}: {error}")
            counts.dropped["bad row"] += 1
            continue
        samples += kept
        sources += [sample] * len(kept)
        counts.used += bool(kept)
    if problems and data.on_bad_row is OnBadRow.error:
        raise DataError(
            _list(problems) + "\nFix these rows, or set data.on_bad_row=skip to leave them out and count them."
        )
    if not samples:
        raise DataError(
            f"{key}={path}: no usable sample. {counts.sentence(data.max_length)}." + _list(problems, before="\n")
        )
    tokens = _token_set(samples, sources)
    counts.tokens, counts.targets = len(tokens.input_ids), int(tokens.is_target.sum())
    return tokens, counts


def split_held_out(tokens: TokenSet, fraction: float, seed: int) -> tuple[TokenSet, TokenSet | None]:
    """Training and held-out samples, chosen by the seed alone; at least one of each, or None held out."""
    if fraction == 0.0 or len(tokens) < 2:
        return tokens, None
    held_out = min(max(1, round(fraction * len(tokens))), len(tokens) - 1)
    order = np.random.default_rng([seed, _HELD_OUT]).permutation(len(tokens))
    return tokens.take(np.sort(order[held_out:])), tokens.take(np.sort(order[:held_out]))


_HELD_OUT = 0x5EED
"""Keeps the split's random stream apart from the epochs'."""


def _fit(
    ids: list[int], is_target: list[bool], sample: Sample, data: Data, counts: Counts, row: Row
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The sample within data.max_length, by data.over_length: none, one, or several parts."""
    arrays = np.asarray(ids, dtype=np.int32), np.asarray(is_target, dtype=bool)
    limit = data.max_length
    if len(ids) <= limit:
        parts = [arrays]
    elif data.over_length is OverLength.drop:
        counts.dropped["over max_length"] += 1
        return []
    elif data.over_length is OverLength.truncate:
        parts = [(arrays[0][:limit], arrays[1][:limit])]
    elif data.over_length is OverLength.split and isinstance(sample, PlainText) and not sample.prompt:
        parts = [(arrays[0][i : i + limit], arrays[1][i : i + limit]) for i in range(0, len(ids), limit)]
    else:
        raise BadRow(
            f"{len(ids)} tokens, over data.max_length={limit}"
            + (" (only format text can be split)" if data.over_length is OverLength.split else "")
        )
    # The first token of a sample has nothing before it to be predicted from: as a target it would not count.
    parts = [part for part in parts if part[1][1:].any()]
    if not parts:
        cut = len(ids) > limit and any(is_target)
        counts.dropped["no targets left after the cut" if cut else "no targets"] += 1
        return []
    if len(ids) > limit:
        counts.truncated += data.over_length is OverLength.truncate
        counts.split += len(parts) if data.over_length is OverLength.split else 0
    return parts


def _token_set(samples: list[tuple[np.ndarray, np.ndarray]], sources: list[Sample]) -> TokenSet:
    offsets = np.zeros(len(samples) + 1, dtype=np.int64)
    np.cumsum([len(ids) for ids, _ in samples], out=offsets[1:])
    return TokenSet(
        input_ids=np.concatenate([ids for ids, _ in samples]),
        is_target=np.concatenate([targets for _, targets in samples]),
        offsets=offsets,
        sources=sources,
    )


def _list(problems: Iterable[str], before: str = "") -> str:
    problems = list(problems)
    if not problems:
        return ""
    shown = problems[:LISTED]
    more = [f"... and {len(problems) - LISTED} more"] if len(problems) > LISTED else []
    return before + "\n".join(shown + more)


def opening(sample: Sample) -> tuple[list[dict[str, str]], str] | None:
    """The messages before a dialogue's last answer, and that answer; None for anything else."""
    if not isinstance(sample, Dialogue) or sample.messages[-1]["role"] != "assistant" or len(sample.messages) < 2:
        return None
    return sample.messages[:-1], sample.messages[-1]["content"]
