"""Options of the group `model`: which causal language model, and where its weights come from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from trainer.registry import option


class Weights(Enum):
    pretrained = "pretrained"
    random = "random"


@option("model", "causal_lm")
@dataclass
class Model:
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
    weights: Weights
    """random builds the architecture below and downloads nothing"""
    architecture: dict[str, Any]
    """the fields of config.json, used with weights=random"""
    random_tokenizer: str
    """tokenizer used with weights=random, where there is no model folder to take one from"""
