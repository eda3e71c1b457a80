"""Options of the group `model`: which causal language model, and where its weights come from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from trainer.ranges import Range
from trainer.registry import Section, option

AT_LEAST_ONE = Range(lambda v: 1 <= v <= 1000, "must be from 1 to 1000")
MOST_BLOCKS = 1000
"""Transformers of 1,000 layers have been trained (Wang et al. 2022, DeepNet); building each takes milliseconds."""
LARGEST = {
    "num_hidden_layers": MOST_BLOCKS,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "head_dim": 2**14,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**31,
}
"""Sizes that an architecture may ask for: an order above the largest models, and little enough to count in seconds."""


def size_problems(architecture: dict[str, Any], key: str) -> list[str]:
    """Sizes that no model has, here and in nested configurations."""
    problems = []
    for name, value in architecture.items():
        if isinstance(value, dict):
            problems += size_problems(value, f"{key}.{name}")
        elif name in LARGEST and isinstance(value, int) and not 1 <= value <= LARGEST[name]:
            problems.append(f"{key}.{name}={value}: must be from 1 to {LARGEST[name]}")
    return problems


class Weights(Enum):
    pretrained = "pretrained"
    random = "random"


class RopeScaling(Enum):
    none = "none"
    linear = "linear"
    dynamic = "dynamic"
    yarn = "yarn"


class Attention(Enum):
    auto = "auto"
    varlen = "varlen"
    sdpa = "sdpa"
    flash = "flash"
    eager = "eager"


@option("model", "causal_lm")
@dataclass
class Model(Section):
    """A Hugging Face causal language model."""

    path: str | None
    """hub id or local folder; embedded:NAME is a model that comes with the trainer"""
    revision: str | None
    """commit, tag or branch on the hub; null: its main branch"""
    trust_remote_code: bool
    """run the model's own Python code; from the command line only, and with a commit as model.revision"""
    new_tokens: list[str]
    """tokens that the tokenizer does not have; only their rows of the embeddings train, beside the adapter"""
    quantized_cache: bool
    """store the quantised base in the cache folder (TRAINER_CACHE), and load it from there at the next start"""
    mlp_tiles: Any
    """pieces of a row that the MLP of each block runs over one after the other, for very long rows: a number, or auto
    for pieces as long as the hidden size is wide; equal gradients but for the order of their sums"""
    rope_scaling: RopeScaling
    """rotary positions for a longer context: linear (divided by the factor, Chen et al. 2023), yarn (Peng et al. 2023),
    or dynamic (a base that grows with the length; training stays within the model's own length). The base is another
    one with it: merge the result, or set the same in the config.json of the base that the adapter is loaded on"""
    rope_factor: Annotated[float, AT_LEAST_ONE]
    """how many times longer than max_position_embeddings the context becomes"""
    attention: Attention
    """auto: the fastest that serves the model, its head size and the device; varlen: packed rows sample by sample;
    sdpa, flash (needs the package flash-attn) and eager: transformers' own"""
    weights: Weights
    """random builds the architecture below and downloads nothing"""
    architecture: dict[str, Any]
    """the fields of config.json, used with weights=random"""
    random_tokenizer: str
    """tokenizer used with weights=random, where there is no model folder to take one from"""

    def problems(self, config):
        problems = size_problems(self.architecture, "model.architecture")
        if self.path is None and self.weights is Weights.pretrained:
            problems.append("model.path is missing: give a local folder or a hub id")
        if self.trust_remote_code and not re.fullmatch("[0-9a-f]{40}", self.revision or ""):
            revision = "null" if self.revision is None else self.revision
            problems.append(
                f"model.trust_remote_code=true runs code from model.path, so model.revision={revision} must be a "
                "commit (40 characters): the code that you have read, and no later one"
            )
        if (self.rope_scaling is RopeScaling.none) != (self.rope_factor == 1):
            problems.append(
                f"model.rope_scaling={self.rope_scaling.name} with model.rope_factor={self.rope_factor:g}: a factor "
                "above 1 and its kind go together, such as model.rope_scaling=yarn model.rope_factor=4"
            )
        if self.quantized_cache:
            problems += self._cache_problems(config)
        tiles = self.mlp_tiles
        if tiles != "auto" and not (isinstance(tiles, int) and not isinstance(tiles, bool) and tiles >= 1):
            problems.append(
                f"model.mlp_tiles={'null' if tiles is None else tiles}: must be auto, or a number of 1 or more"
            )
        return problems

    def _cache_problems(self, config):
        key = "model.quantized_cache=true"
        problems = []
        if not config.quant.stores_4bit:
            problems.append(f"{key} stores a 4-bit base: use quant=nf4 or quant=fp4, or leave it out")
        if self.weights is Weights.random:
            problems.append(f"{key} stores weights that are read from files, which model.weights=random does not do")
        if self.trust_remote_code:
            problems.append(f"{key} does not serve models with code of their own: leave out one of the two")
        return problems
