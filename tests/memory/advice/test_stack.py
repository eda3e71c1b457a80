"""The 70B's stack of techniques in our numbers, against sums by hand and against a plan at full depth."""

from __future__ import annotations

import copy

import pytest

from trainer.config.compose import compose
from trainer.config.shelf import all_options
from trainer.memory.advice.stack import _Deep, stack
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.static import Static
from trainer.units import GIB

LINEAR = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
TABLE = 128256 * 8192
NORMS = (2 * 80 + 1) * 8192
THETA = 80 * 16 * (2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672))


@pytest.fixture(scope="module")
def config():
    return compose(["recipe=quickstart", "device=cpu"]).config


@pytest.fixture(scope="module")
def rungs(config):
    return {rung.technique: rung for rung in stack(config, all_options())}


def test_weights_and_states_are_the_sums_by_hand(rungs):
    """fp32 masters, gradients and two moments: 16 bytes; a bf16 base and 8 bytes + 8-bit state a trainable number;
    half a byte a linear weight and its scales, embeddings and head in bf16."""
    all_of_them = LINEAR + 2 * TABLE + NORMS
    adapter = THETA * (4 + 4 + 2.03)
    nf4 = LINEAR * (1 / 2 + 1 / 64 + 4 / 64 / 256) + 2 * (2 * TABLE + NORMS)
    held = LINEAR * (1 / 2 + 1 / 64 + 4 / 64 / 256) * 2 / 80 + 2 * (2 * TABLE + NORMS)
    expected = {
        "full, mixed precision": 16 * all_of_them,
        "+ checkpointing": 16 * all_of_them,
        "+ 8-bit states": 10.03 * all_of_them,
        "+ LoRA r=16": 2 * all_of_them + adapter,
        "+ QLoRA": nf4 + adapter,
        "+ streamed base, 2 blocks held": held + adapter,
    }
    assert list(rungs) == list(expected)
    for name, size in expected.items():
        assert rungs[name].static == pytest.approx(size / GIB, rel=0.002), name


def test_each_technique_brings_what_the_textbook_says_it_brings(rungs):
    peaks = [rung.peak for rung in rungs.values()]
    assert peaks == sorted(peaks, reverse=True)
    assert rungs["+ QLoRA"].peak > 24 > rungs["+ streamed base, 2 blocks held"].peak
    inputs = 80 * 2048 * 8192 * 2 / GIB  # one a block, which full checkpointing keeps
    assert inputs == rungs["+ LoRA r=16"].book_activations < rungs["+ LoRA r=16"].activations < 2 * inputs


def test_two_depths_give_what_the_whole_depth_gives(config):
    """A 12-layer model in place of the 70B's 80, so that the whole is quickly made."""
    deep = _Deep(config, all_options(), quant="nf4", adapter="lora", optim="adamw_8bit")
    planner = deep._planners[1]
    shallow_config = copy.deepcopy(planner.model_config)
    shallow_config.num_hidden_layers = 12
    whole = Planner(planner.config, shallow_config).static
    deep.layers = 12
    few, more = (p.static for p in deep._planners)
    for name in ("weights", "adapter", "gradients", "optimizer", "trainable", "base_parameters"):
        assert deep._line(getattr(few, name), getattr(more, name)) == getattr(whole, name), name
    assert isinstance(whole, Static)
