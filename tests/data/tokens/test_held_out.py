"""The held-out part: a partition by the seed, with equal samples on one side."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories import random_tokens
from tests.support import chat_rows, make_tokenizer, write_jsonl
from trainer.config.compose import compose
from trainer.data.tokens.gather import read_data
from trainer.data.tokens.held_out import split_held_out


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 60), fraction=st.floats(0, 0.99), seed=st.integers(0, 9))
def test_the_held_out_split_is_a_partition(count, fraction, seed):
    tokens = random_tokens(list(range(2, count + 2)))
    train, held_out = split_held_out(tokens, fraction, seed)
    kept = train.lengths.tolist() + (held_out.lengths.tolist() if held_out is not None else [])
    assert sorted(kept) == tokens.lengths.tolist()
    assert (held_out is None) == (fraction == 0 or count < 2)
    again = split_held_out(tokens, fraction, seed)[0]
    assert again.content_hash() == train.content_hash()


def read(*words: str):
    return read_data(compose(["data=file", "data.max_length=128", *words]).config.data, 0, make_tokenizer())


def words_of(tokens) -> list[bytes]:
    return [b"".join(part.tobytes() for part in tokens.sample(i)) for i in range(len(tokens))]


def repeated(file, start: int, stop: int, distinct: int):
    return write_jsonl(file, chat_rows([(f"q {i % distinct}", f"a {i % distinct}") for i in range(start, stop)]))


@pytest.mark.parametrize("fraction, about", [(0.3, 18), (0.02, 1), (0.9, 54)])
def test_no_sample_is_held_out_and_trained_on(tmp_path, fraction, about):
    """60 rows, 27 distinct."""
    loaded = read(f"data.path={repeated(tmp_path / 'a.jsonl', 0, 60, 27)}", f"data.eval_fraction={fraction}")
    train, held_out = words_of(loaded.train_set), words_of(loaded.held_out)
    assert len(train) + len(held_out) == 60 and not set(train) & set(held_out)
    assert abs(len(held_out) - about) <= 1


def test_the_choice_without_repetitions_is_the_seeds_permutation():
    """Oracle, and the choice of earlier runs."""
    tokens = random_tokens(list(range(5, 45)))
    order = np.random.default_rng([3, 0x5EED]).permutation(40)
    for all_differ in (False, True):
        _, held_out = split_held_out(tokens, 0.25, 3, all_differ=all_differ)
        assert held_out.lengths.tolist() == tokens.lengths[np.sort(order[:10])].tolist()


def test_sources_of_a_mixture_hold_out_the_same_samples(tmp_path):
    one, other = repeated(tmp_path / "a.jsonl", 0, 40, 40), repeated(tmp_path / "b.jsonl", 20, 60, 60)
    loaded = read(f"data.sources=[{{path: '{one}'}}, {{path: '{other}'}}]", "data.eval_fraction=0.25")
    assert len(loaded.held_out) >= 20 and not set(words_of(loaded.train_set)) & set(words_of(loaded.held_out))


def test_an_evaluation_files_overlap_is_counted(tmp_path):
    one, other = repeated(tmp_path / "a.jsonl", 0, 27, 27), repeated(tmp_path / "b.jsonl", 20, 30, 30)
    loaded = read(f"data.path={one}", f"data.eval_path={other}")
    both = [words for words in words_of(loaded.held_out) if words in set(words_of(loaded.train_set))]
    assert loaded.counts[-1].overlap == len(both) == 7
