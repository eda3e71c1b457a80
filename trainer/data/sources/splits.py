"""Which files of a folder are its training, validation and test split: by their names, as the hub's loader has it."""

from __future__ import annotations

import re
from collections.abc import Iterable

WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""The hub's names of its splits (datasets.data_files.SPLIT_KEYWORDS)."""

_BORDER = "[-._ 0-9]"


def splits_of(names: Iterable[str]) -> dict[str, list[str]]:
    """The splits that these paths inside a folder tell, in the loader's order of rules; none: all is one split.

    A rule that finds anything decides alone: numbered shards in data/, then names of folders, then names of files.
    """
    names = list(names)
    numbered: dict[str, list[str]] = {}
    for name in names:
        if match := re.match(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*$", name):
            numbered.setdefault(match[1], []).append(name)
    return numbered or _by_words(_FOLDER, names) or _by_words(_FILE, names)


def named(split: str) -> str:
    """The hub's name of a split: valid and dev are validation."""
    return next((name for name, words in WORDS.items() if split in words), split)


def _by_words(patterns: dict[str, re.Pattern], names: list[str]) -> dict[str, list[str]]:
    found = {split: [name for name in names if pattern.match(name)] for split, pattern in patterns.items()}
    return {split: members for split, members in found.items() if members}


def _patterns(shape: str) -> dict[str, re.Pattern]:
    return {split: re.compile(shape % f"(?:{'|'.join(words)})") for split, words in WORDS.items()}


_FOLDER = _patterns(rf"(?:.*/)?(?:[^/]*{_BORDER})?%s(?:{_BORDER}[^/]*)?/.+$")
_FILE = _patterns(rf"(?:.*/)?(?:[^/]*{_BORDER})?%s{_BORDER}[^/]*$")
