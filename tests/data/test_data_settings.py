"""Settings of the data that no single type can check: sources and mappings, each mistake in one line, all at once."""

from __future__ import annotations

import pytest

from trainer.config.compose import compose
from trainer.data.data_settings import Format, TrainOn, training_sources
from trainer.errors import ConfigError


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose(["data=file", *words])
    return str(error.value)


def test_a_source_has_its_own_settings_and_the_rest_from_data():
    first = "{path: a.jsonl, weight: 3, format: alpaca, train_on: last, roles: {bot: assistant}}"
    text = f"[{first}, {{path: b.jsonl, name: b}}]"
    data = compose(["data=file", f"data.sources={text}", "data.max_length=99"]).config.data
    first, second = training_sources(data)
    assert (first.path, first.name, first.weight, first.key) == ("a.jsonl", "a.jsonl", 3.0, "data.sources[0].path")
    assert (first.data.format, first.data.train_on, first.data.max_length) == (Format.alpaca, TrainOn.last, 99)
    assert first.data.roles == {"bot": "assistant"}
    assert (second.name, second.weight, second.data.format) == ("b", 1.0, Format.auto)


def test_one_path_is_one_source():
    (source,) = training_sources(compose(["data=file", "data.path=a.jsonl"]).config.data)
    assert (source.path, source.key, source.weight) == ("a.jsonl", "data.path", 1.0)


@pytest.mark.parametrize(
    "text, said",
    [
        ("[]", "must be a list of {path: ..., weight: ...}"),
        ("a.jsonl", "must be a list of {path: ..., weight: ...}"),
        ("[{weight: 1}]", "data.sources[0]: must be a mapping with a path"),
        ("[{path: a, wieght: 1}]", "data.sources[0].wieght: unknown key (did you mean weight?)"),
        ("[{path: a, weight: 0}]", "data.sources[0].weight=0: must be a number above 0"),
        ("[{path: a, weight: heavy}]", "data.sources[0].weight=heavy: must be a number above 0"),
        (
            "[{path: a, format: alpacca}]",
            "must be one of auto, messages, sharegpt, alpaca, prompt_completion, text (did",
        ),
        ("[{path: a, train_on: first}]", "data.sources[0].train_on=first: must be one of assistant, last, all"),
        ("[{path: a, columns: {quest: q}}]", "data.sources[0].columns: quest is none of ours"),
        ("[{path: a}, {path: a}]", "data.sources: a stands there more than once; give each its own name"),
    ],
)
def test_what_is_wrong_with_sources(text, said):
    assert said in refused(f"data.sources={text}")


def test_mappings_name_our_fields_and_roles():
    said = refused("data.path=a.jsonl", "data.columns={instruct: q}", "data.roles={bot: assistent}")
    assert "data.columns: instruct is none of ours (did you mean instruction?)" in said
    assert "data.roles: assistent is none of ours (did you mean assistant?)" in said


def test_no_data_at_all():
    assert "data.path is missing" in refused()


@pytest.mark.parametrize(
    "word", ["max_dropped_share=1.5", "max_truncated_share=-1", "max_duplicate_share=2", "workers=0"]
)
def test_ranges(word):
    assert f"data.{word.split('=')[0]}=" in refused("data.path=a.jsonl", f"data.{word}")


def test_a_part_of_an_answer_and_every_token_exclude_each_other():
    said = refused("data.path=a.jsonl", "data.train_on=all", "data.train_part=answer")
    assert "data.train_part=answer has no effect with data.train_on=all" in said
