"""The trials of a search: those that are missing in its folder, in batches for the launcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from trainer.commands.study import draw
from trainer.config.check import parse
from trainer.config.space import fixed_words, space_of
from trainer.tracking.sweep_folder import SweepFolder


def drawn_trials(composed: DictConfig, words: list[str]) -> Iterator[tuple[int, list[list[str]]]]:
    """The number of the first of a batch of consecutive trials, and the words of each.

    A trial that ended well or was pruned is not given again; one that failed is, with the words that it had.
    """
    search = OmegaConf.to_object(composed.search)
    folder, overrides = SweepFolder(Path(composed.hydra.sweep.dir)), parse(words)
    fixed, space = fixed_words(overrides), space_of(overrides)
    done = folder.trials()
    missing = [n for n in range(search.trials) if n not in done or not done[n].settled]
    for numbers in _batches(missing, search.parallel):
        known, drawn = folder.trials(), []
        for number in numbers:
            again = (
                [word for word in known[number].overrides if word.partition("=")[0] in space] if number in known else []
            )
            drawn.append(again or draw(search, space, composed.seed, number, list(known.values()), drawn))
        yield numbers[0], [[*fixed, *words] for words in drawn]


def _batches(numbers: list[int], size: int) -> list[list[int]]:
    """Consecutive numbers, at most `size` together: a launcher counts on from the first."""
    batches: list[list[int]] = []
    for number in numbers:
        if batches and number == batches[-1][-1] + 1 and len(batches[-1]) < size:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches
