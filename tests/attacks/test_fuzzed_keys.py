"""Odd values for every key, as a command line brings them: a configuration that comes back equal, or one sentence."""

from __future__ import annotations

import random

import pytest

from trainer.config.compose import plan
from trainer.config.saved import load_run, save_run
from trainer.config.schema import SECTIONS
from trainer.config.shelf import option_values, options, root_values
from trainer.errors import ConfigError
from trainer.registry import to_plain

BASE = ["data.path=x", "model.path=y"]
SEED, CI_WORDS, VALUES = 17, 40, 12
"""Of the draws; how many words CI tries, and how many for each key the whole suite."""

NUMBERS = "0 -0 -1 1 0.5 1e-400 1e400 1e308 -1e308 nan -inf inf 9223372036854775808 0x10 0b1 1_000 1e 007".split()
TEXTS = [
    "", " ", "''", '""', "null", "Null", "true", "off", "~", "?", "???", "*", "-", "--", "=", "a=b", "a b", "a,b", ",",
    "..", "../../etc/passwd", "/dev/zero", "~root", "C:\\x", "\\", "\\,", "'", '"', "'a", "é", "日本", "\u202e",
    "\x1b[2J", "\x00", "\udcff", "a\nb", "\t", "#x", "!!python/object:os.system", "&a", "*a", "${seed}", "${x}", "${",
    "$", "${oc.env:HOME}", "${oc.env:NOWHERE}", "${now:%Y}", "${.}", "${..seed}", "a" * 10_000, "range(1,3)",
    "choice(1,2)", "glob(*)", "sort(1)", "int(1)", "str(1)", "float(x)", "extend_list(1)",
]  # fmt: skip
NESTED = [
    "[]", "{}", "[[]]", "[1,]", "[,]", "[1,2", "{a:1}", "{a: 1, a: 2}", "{1: 2}", "{a: {b: [1]}}", "{:}", "{a}",
    "[a,b]", "[null]", "[nan]", "[" * 200, "[" * 200 + "]" * 200, "{a: " * 100 + "1" + "}" * 100,
    "[" + "1," * 5000 + "1]", "{_target_: os.system}", "['a', \"b\"]",
]  # fmt: skip
WAYS = ["{}={}"] * 6 + ["+{}={}", "++{}={}", "~{}", "~{}={}", "{}.x={}", "{}@x={}", "{}:={}", " {} = {} "]


def keys() -> dict[str, list[str]]:
    """Every key, with the word that picks an option which has it."""
    found = {key: [] for key in root_values() if key not in SECTIONS}
    for group in (*SECTIONS, "train"):
        for option in options(group):
            for name in option_values(group, option):
                found.setdefault(f"{group}.{name}", [f"{group}={option}"])
    return found


def odd_word(key: str, draw: random.Random) -> str:
    value = draw.choice([*NUMBERS, *TEXTS, *NESTED])
    if draw.random() < 0.2:  # any characters at all
        value = "".join(chr(draw.choice([draw.randrange(32, 127), draw.randrange(1, 0x3000)])) for _ in range(9))
    return draw.choice(WAYS).format(key, value)


def words() -> list[tuple[list[str], str]]:
    draw = random.Random(SEED)
    return [(pick, odd_word(key, draw)) for key, pick in keys().items() for _ in range(VALUES)]


def attack(pick: list[str], word: str, folder) -> bool:
    """Whether it is refused; what is taken is saved and comes back as it was."""
    try:
        planned = plan([*BASE, *pick, word])
    except ConfigError as error:
        said = str(error)
        assert said and len(said) < 11_000 and "Traceback" not in said
        return True
    if planned.trials is None:
        save_run(planned.run, folder)
        assert repr(to_plain(load_run(folder).config)) == repr(to_plain(planned.run.config))  # nan is not nan
    return False


def test_a_sample_of_keys(tmp_path, record_property):
    sample = random.Random(0).sample(words(), CI_WORDS)
    refused = sum(attack(pick, word, tmp_path) for pick, word in sample)
    record_property("attacks", CI_WORDS)
    assert refused > 0 and not attack([], "seed=3", tmp_path)


@pytest.mark.slow
def test_every_key(tmp_path, record_property):
    every = words()
    assert len(every) > 1000 and {key for key in keys() if key.startswith("optim.")} > {"optim.learning_rate"}
    failed = []
    for pick, word in every:
        try:
            attack(pick, word, tmp_path)
        except Exception as error:
            failed.append((pick, word[:200], repr(error)[:300]))
    record_property("attacks", len(every))
    record_property("failed", len(failed))
    assert failed == []
