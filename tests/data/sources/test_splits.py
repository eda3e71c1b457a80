"""Splits by name, against the loader that the hub uses."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress

import pytest
from datasets.data_files import get_data_patterns, resolve_pattern
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.sources.splits import named, splits_of

WORDS = ["train", "training", "test", "valid", "dev", "val", "eval", "orders", "trainer", "latest", "data"]
PARTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3)


@st.composite
def names(draw) -> str:
    stem = draw(st.sampled_from(["-", "_", ".", " ", "1", ""])).join(draw(PARTS))
    folders = [draw(st.sampled_from("-_")).join(draw(PARTS)) for _ in range(draw(st.integers(0, 2)))]
    return "/".join([*folders, f"{stem}.jsonl"])


def of_the_hub(files: list[str]) -> dict[str, set[str]]:
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            os.makedirs(os.path.dirname(os.path.join(folder, file)), exist_ok=True)
            open(os.path.join(folder, file), "w").close()
        found = {}
        for split, patterns in get_data_patterns(folder).items():
            found[str(split)] = set()
            for pattern in patterns:
                with suppress(FileNotFoundError):  # of the patterns of a split some match
                    found[str(split)] |= {os.path.relpath(path, folder) for path in resolve_pattern(pattern, folder)}
        return found


@settings(max_examples=60, deadline=None)
@given(files=st.lists(names(), min_size=1, max_size=5, unique=True))
def test_splits_are_those_of_the_hubs_loader(files):
    ours = splits_of(files) or {"train": files}
    assert {split: set(members) for split, members in ours.items()} == of_the_hub(files)


@pytest.mark.parametrize(
    "files", [["data/train-00000-of-00002.parquet", "data/sft.v2-00001-of-00002.parquet", "test.jsonl"], ["a/b.jsonl"]]
)
def test_numbered_shards_and_none(files):
    ours = splits_of(files) or {"train": files}
    assert {split: set(members) for split, members in ours.items()} == of_the_hub(files)


def test_other_names_of_a_split():
    assert [named(word) for word in ("dev", "training", "eval", "sft")] == ["validation", "train", "test", "sft"]
