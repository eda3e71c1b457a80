"""Rotary positions for longer contexts: frequencies by the papers' formulas, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.factories import option
from trainer.config.compose import compose
from trainer.errors import ConfigError, ModelError
from trainer.model.families import rotary_boundary
from trainer.model.loading.base import load_config, planned_config
from trainer.model.loading.rope import scaled
from trainer.model.model_settings import RopeScaling, Weights


def frequencies(config) -> torch.Tensor:
    return LlamaForCausalLM(config).model.rotary_emb.inv_freq


def model_of(kind, factor=4.0, **changes):
    return option("model", "tiny", rope_scaling=RopeScaling[kind], rope_factor=factor, **changes)


def test_linear_divides_all_frequencies():
    plain, longer = load_config(option("model", "tiny")), load_config(model_of("linear"))
    assert torch.allclose(frequencies(longer), frequencies(plain) / 4)
    assert longer.max_position_embeddings == 4 * plain.max_position_embeddings
    assert planned_config(model_of("linear")).rope_parameters == longer.rope_parameters


def test_yarn_leaves_fast_frequencies_and_divides_slow_ones():
    """Peng et al. 2023, equations 18 to 20: by turns over the length, a ramp from 32 (as it is) to 1 (divided)."""
    config = load_config(model_of("yarn", weights=Weights.random))
    plain = frequencies(load_config(option("model", "tiny")))
    size, base, length = 32, config.rope_parameters["rope_theta"], 1024

    def place(turns):
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(place(32)), 0), min(math.ceil(place(1)), size - 1)
    ramp = ((torch.arange(size // 2) - low) / (high - low)).clamp(0, 1)
    expected = plain * (1 - ramp) + plain / 4 * ramp
    assert torch.allclose(frequencies(config), expected)
    rotary = LlamaForCausalLM(config).model.rotary_emb
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)


def test_dynamic_trains_within_the_models_own_length():
    config = load_config(model_of("dynamic"))
    assert torch.equal(frequencies(config), frequencies(load_config(option("model", "tiny"))))
    assert rotary_boundary(config, 1024) is None
    with pytest.raises(ModelError, match="rope_type=dynamic"):
        rotary_boundary(config, 1025)


def test_what_cannot_be_scaled_is_refused():
    for words in (["model.rope_scaling=yarn"], ["model.rope_factor=2"]):
        with pytest.raises(ConfigError, match="a factor above 1 and its kind go together"):
            compose(words)
    own = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ModelError, match="has rope_type=linear for 2,048 tokens already"):
        scaled(LlamaConfig(rope_parameters=own), model_of("yarn"))
