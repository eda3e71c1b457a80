"""Techniques in pairs: every two options of different groups in one run, planned, stopped, resumed and read back.

Options are read off conf/, so that one that is added is in the matrix the day it comes. A pair that a rule refuses is
left out of it; what only the model can refuse must do so in words.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, islice, product

import pytest
import torch
from safetensors.torch import load_file

from tests.factories import option, options
from tests.support import metrics, train_here
from trainer.config.compose import compose
from trainer.config.rules import broken_rules
from trainer.config.saved import load_run
from trainer.errors import ConfigError, ModelError, PlanError
from trainer.export.reload import load_trained
from trainer.memory.predict.planner import Planner
from trainer.training.weights import ADAPTER_FILE, MODEL_FILE

GROUPS = ("adapter", "optim", "checkpointing", "precision", "packing", "quant", "offload")
FIELDS = {
    ("adapter", "peft"): {"method": "HRA", "fields": {"r": 4}},
    ("optim", "galore_adamw"): {"rank": 8},
    ("optim", "galore_adamw_8bit"): {"rank": 8},
    ("checkpointing", "blocks"): {"none": ["0"], "selective": ["2"]},
}
"""Values of options that the tiny model needs, beside those of their YAML."""
BASE = """recipe=quickstart device=cpu data.max_length=128 train.micro_batch_tokens=256 train.micro_batch_size=2
train.accumulation_steps=2 train.save_every=1 train.log_every=1 train.compare_prompts=0 train.report=false
data.eval_fraction=0 schedule=constant schedule.warmup_ratio=0 train.resume=force memory.probe=never""".split()

Choice = tuple[str, str]
Row = tuple[Choice, ...]
"""An option of every group."""


@cache
def plain():
    return compose([*BASE, "quant=none", "optim=adamw"]).config


def allowed(row: Row) -> bool:
    made = {group: option(group, name, **FIELDS.get((group, name), {})) for group, name in row}
    return broken_rules(replace(plain(), **made)) == []


def rows(tries: int = 40) -> Iterator[Row]:
    """Rows that together hold every allowed pair, each the best of some random ones around a pair not yet held."""
    draw, names = random.Random(0), {group: options(group) for group in GROUPS}
    left = {frozenset(((a, x), (b, y))) for a, b in combinations(GROUPS, 2) for x, y in product(names[a], names[b])}
    for pair in sorted(left, key=sorted):
        if pair not in left:
            continue
        fixed, best = dict(pair), None
        for _ in range(tries):
            row = tuple((group, fixed.get(group) or draw.choice(names[group])) for group in GROUPS)
            held = {frozenset(two) for two in combinations(row, 2)} & left
            if (best is None or len(held) > len(best[1])) and allowed(row):
                best = row, held
        left.discard(pair)
        if best is not None:
            left -= best[1]
            yield best[0]


def words_of(row: Row) -> list[str]:
    words = []
    for group, name in row:
        words.append(f"{group}={name}")
        for field, value in FIELDS.get((group, name), {}).items():
            text = str(value).replace("'", "")
            words.append(f"{group}.{field}={text}")
    return words


def weights(folder) -> dict[str, torch.Tensor]:
    """What trained, as a checkpoint or a result has it."""
    (file,) = [folder / name for name in (ADAPTER_FILE, MODEL_FILE) if (folder / name).is_file()]
    return load_file(file)


def check(row: Row, folder) -> None:
    """Raises AssertionError; ConfigError or ModelError where the model refuses the row."""
    words = [*BASE, *words_of(row)]
    try:
        assert Planner(compose(words).config).predict().peak > 0
    except PlanError:
        pass  # said at the start of a run
    for name, parts in {"whole": [2], "halves": [1, 2]}.items():
        for steps in parts:
            train_here([*words, f"train.max_steps={steps}"], folder / name)
    whole, halves = folder / "whole", folder / "halves"
    assert [r["loss"] for r in metrics(whole)] == [r["loss"] for r in metrics(halves)], "a resume is another run"
    assert all(math.isfinite(r["loss"]) for r in metrics(whole))
    first, second = (weights(whole / f"checkpoints/step-0000000{step}") for step in (1, 2))
    still = [name for name in first if torch.equal(first[name], second[name])]
    assert not still, f"did not move: {still}"
    other = weights(halves / "checkpoints/step-00000002")
    assert all(torch.equal(second[name], other[name]) for name in second), "a resume is not bit-equal"
    with torch.no_grad():
        trained = load_trained(load_run(whole), whole)
        assert bool(trained.model(input_ids=torch.arange(5, 25)[None]).logits.isfinite().all())


def outcome(row: Row, folder) -> str:
    """ok, refused, or what is wrong."""
    try:
        check(row, folder)
    except (ConfigError, ModelError) as error:
        return "refused" if "Use " in str(error) or "use " in str(error) else f"refused without a way out: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def test_a_sample_of_pairs(tmp_path):
    (row,) = islice(rows(tries=10), 1)
    assert outcome(row, tmp_path) == "ok", row


@pytest.mark.slow
def test_every_pair(tmp_path):
    found = {row: outcome(row, tmp_path / str(number)) for number, row in enumerate(rows())}
    wrong = {row: result for row, result in found.items() if result not in ("ok", "refused")}
    refused = [row for row, result in found.items() if result == "refused"]
    print(f"{len(found)} rows, {len(refused)} refused: {refused}")
    assert not wrong, "\n".join(f"{' '.join(words_of(row))}: {result}" for row, result in wrong.items())
    assert len(refused) <= len(found) / 10
