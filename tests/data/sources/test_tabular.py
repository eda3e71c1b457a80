"""Data sets on the hub, through a stand-in for it: no network is touched."""

from __future__ import annotations

import datasets
import pytest

from tests.support import CHATS, chat_rows, make_tokenizer
from trainer.config.compose import compose
from trainer.data.tokens.tokenize import load_tokens
from trainer.errors import DataError


def load(*words: str):
    words = ["data=file", "data.path=someone/chats", "data.max_length=128", *words]
    data = compose(words).config.data
    return load_tokens(data, data.path, "data.path", make_tokenizer())


def test_rows_come_through_datasets_by_split_and_are_cached(monkeypatch):
    asked = []

    def load_dataset(path, split):
        asked.append((path, split))
        return datasets.Dataset.from_list(chat_rows()[: 8 if split == "train" else 2])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    tokens, counts = load()
    assert len(tokens) == 8 and counts.format == "messages" and tokens.place(2) == "someone/chats:row 3"
    assert tokens.source(3).messages[1]["content"] == CHATS[3][1]
    few, _ = load("data.split=test")
    assert len(few) == 2 and asked == [("someone/chats", "train"), ("someone/chats", "test")]
    assert "hit" in load()[1].cache


def test_what_the_hub_does_not_give_is_one_line():
    """The tests run offline, so this is the library's own refusal."""
    with pytest.raises(DataError) as error:
        load()
    text = str(error.value)
    assert "data.path=someone/chats: is no file here, and the hub does not give it" in text and "\n" not in text
