"""Makers for tests below the run: samples of random tokens, a model in memory, an adapter on it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import get_type_hints

import numpy as np
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from trainer.config import schema  # noqa: F401  (registers the options)
from trainer.data.batches.batch import MicroBatch, collate
from trainer.data.tokens.tokenize import TokenSet
from trainer.model.precision import Dtypes
from trainer.registry import OPTIONS
from trainer.resources import shipped

FP32 = Dtypes(torch.float32, "cpu")
VOCABULARY = 300


def options(group: str) -> list[str]:
    """Names of a group's options: what conf/ holds."""
    return sorted(file.stem for file in (shipped("conf") / group).glob("*.yaml"))


def option(group: str, name: str, **changes):
    """An option's dataclass with the values of its YAML, some changed; Hydra, a hundred times slower, is left out."""
    values = yaml.safe_load((shipped("conf") / group / f"{name}.yaml").read_text(encoding="utf-8"))
    schema_name = values.pop("defaults")[0].removeprefix(f"/schema/{group}/").removesuffix("@_here_")
    cls = OPTIONS[group][schema_name]
    values |= changes
    for name, kind in get_type_hints(cls).items():
        if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(values.get(name), str):
            values[name] = kind[values[name]]
    return cls(**values)


def random_tokens(lengths: list[int], vocabulary: int = VOCABULARY, seed: int = 0, targets: float = 0.7) -> TokenSet:
    """Samples of these lengths; about `targets` of the tokens are targets, the last one always."""
    rng = np.random.default_rng(seed)
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    is_target = rng.random(offsets[-1]) < targets
    is_target[offsets[1:] - 1] = True
    ids = rng.integers(5, vocabulary, offsets[-1], dtype=np.int32)
    return TokenSet(ids, is_target, offsets, sources=[])


def packed_batch(tokens: TokenSet) -> MicroBatch:
    """All samples in one row."""
    return collate(tokens, np.arange(len(tokens)), packed=True)


def padded_batch(tokens: TokenSet, *indices: int) -> MicroBatch:
    """Some samples as padded rows; all of them where none is named."""
    return collate(tokens, np.array(indices or range(len(tokens))), packed=False)


def load(folder: Path, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A saved model as plain transformers loads it, in evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=dtype).eval()


def llama(attention: str = "sdpa", seed: int = 0, **fields) -> PreTrainedModel:
    """A random Llama in memory: 2 layers, hidden 64, 4 heads, 2 key/value heads."""
    torch.manual_seed(seed)
    config = LlamaConfig(**{**LLAMA, **fields}, attn_implementation=attention)
    return LlamaForCausalLM(config).eval()


LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all gradients by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy written out: minus the log of the softmax at the label, over the positions that have one."""
    chosen = labels != -100
    logarithms = logits.float().log_softmax(-1)[chosen]
    return -logarithms.gather(1, labels[chosen][:, None]).sum()


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference of two sets of tensors with the same names."""
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)
