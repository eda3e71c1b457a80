"""All data of a run: one source or a mixture, its held-out part, and the thresholds that can stop the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.data.data_settings import Data, training_sources
from trainer.data.tokens.counts import Counts, over_thresholds
from trainer.data.tokens.held_out import overlap, split_held_out
from trainer.data.tokens.token_sets import Mixture, Tokens, TokenSet
from trainer.data.tokens.tokenize import load_tokens
from trainer.errors import DataError, listing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Loaded:
    """What a run trains and evaluates on."""

    train_set: Tokens | None
    """None: it is streamed"""
    held_out: Tokens | None
    counts: list[Counts]
    """one a source; data.eval_path's comes last"""


def load_data(data: Data, seed: int, tokenizer: PreTrainedTokenizerBase) -> Loaded:
    """The data of a run that may begin. Raises DataError, also where more was lost than the settings allow."""
    loaded = read_data(data, seed, tokenizer)
    check_losses(data, loaded.counts)
    return loaded


def check_losses(data: Data, counts: list[Counts]) -> None:
    """Raises DataError where more was lost than the settings allow."""
    problems = over_thresholds(data, counts)
    if problems:
        raise DataError(listing(problems))


def read_data(data: Data, seed: int, tokenizer: PreTrainedTokenizerBase) -> Loaded:
    """Reads and tokenises all that is not streamed, or finds it in the token cache. Raises DataError."""
    sources = [] if data.streaming else training_sources(data)
    loaded = [load_tokens(s.data, s.path, s.key, tokenizer, s.name) for s in sources]
    counts = [count for _, count in loaded]
    fraction = data.eval_fraction if data.eval_path is None else 0.0
    split: list[tuple[TokenSet, TokenSet | None]] = []
    for tokens, count in loaded:
        all_differ = len(loaded) == 1 and not count.duplicates
        split.append(split_held_out(tokens, fraction, seed, split, all_differ))
    held_out: Tokens | None = _together(data, [part for _, part in split if part is not None], None)
    if data.eval_path is not None:
        held_out, eval_counts = load_tokens(data, data.eval_path, "data.eval_path", tokenizer)
        counts.append(eval_counts)
    train_set = _together(data, [part for part, _ in split], [source.weight for source in sources])
    if data.eval_path is not None and train_set is not None:
        counts[-1].overlap = overlap(train_set, held_out)
    return Loaded(train_set, held_out, counts)


def _together(data: Data, parts: list[TokenSet], weights: list[float] | None) -> Tokens | None:
    """One set as it is, several as a mixture."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return Mixture(parts, weights or [1.0] * len(parts), data.mix_by, data.stop)
