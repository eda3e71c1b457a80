"""All data of a run: one source or a mixture, its held-out part, and the thresholds that can stop the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.data.counts import Counts
from trainer.data.options import Data, training_sources
from trainer.data.tokenize import load_tokens, split_held_out
from trainer.data.tokens import Mixture, Tokens, TokenSet
from trainer.errors import DataError, listing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Loaded:
    """What a run trains and evaluates on."""

    train_set: Tokens
    held_out: Tokens | None
    counts: list[Counts]
    """one a source; data.eval_path's comes last"""


def load_data(data: Data, seed: int, tokenizer: PreTrainedTokenizerBase) -> Loaded:
    """The data of a run that may begin. Raises DataError, also where more was lost than the settings allow."""
    loaded = read_data(data, seed, tokenizer)
    problems = over_thresholds(data, loaded.counts)
    if problems:
        raise DataError(listing(problems))
    return loaded


def read_data(data: Data, seed: int, tokenizer: PreTrainedTokenizerBase) -> Loaded:
    """Reads and tokenises everything, or finds it in the token cache. Raises DataError."""
    sources = training_sources(data)
    loaded = [load_tokens(s.data, s.path, s.key, tokenizer, s.name) for s in sources]
    counts = [count for _, count in loaded]
    fraction = data.eval_fraction if data.eval_path is None else 0.0
    split = [split_held_out(tokens, fraction, seed) for tokens, _ in loaded]
    held_out: Tokens | None = _together(data, [part for _, part in split if part is not None], None)
    if data.eval_path is not None:
        held_out, eval_counts = load_tokens(data, data.eval_path, "data.eval_path", tokenizer)
        counts.append(eval_counts)
    train_set = _together(data, [part for part, _ in split], [source.weight for source in sources])
    assert train_set is not None
    return Loaded(train_set, held_out, counts)


def _together(data: Data, parts: list[TokenSet], weights: list[float] | None) -> Tokens | None:
    """One set as it is, several as a mixture."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return Mixture(parts, weights or [1.0] * len(parts), data.mix_by, data.stop)


def over_thresholds(data: Data, counts: list[Counts]) -> list[str]:
    """Where more was lost than the settings allow, in a user's words."""
    problems = []
    for count in counts:
        for key, share, what in (
            ("max_dropped_share", count.dropped_share, "rows were dropped"),
            ("max_truncated_share", count.truncated_share, "samples were truncated"),
            ("max_duplicate_share", count.duplicate_share, "samples repeat an earlier one"),
        ):
            allowed = getattr(data, key)
            if share > allowed:
                problems.append(
                    f"{count.path}: {share:.1%} of the {what}, over data.{key}={allowed:g}. "
                    f"{count.sentence(data.max_length)}. See them with: trainer data"
                )
    return problems
