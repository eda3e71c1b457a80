"""What no single type can say: ranges, and settings that exclude each other. All in one place."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer.config.types import shown
from trainer.data.data_settings import OverLength, source_problems
from trainer.model.adapters import LoRA, NoAdapter
from trainer.model.checkpointing import Attention, NoCheckpointing, Selective
from trainer.model.kernels import Compiled, Torch
from trainer.model.model_settings import Weights
from trainer.model.offload.offloads import Activations, NoOffload, StreamedBase
from trainer.model.quant import FourBit, Int8, NoQuant
from trainer.training.engine import Single

if TYPE_CHECKING:
    from trainer.config.schema import Config

Check = tuple[Callable[[Any], bool], str]

POSITIVE: Check = (lambda v: v > 0, "must be above 0")
NOT_NEGATIVE: Check = (lambda v: v >= 0, "must be 0 or more")
AT_LEAST_1: Check = (lambda v: v >= 1, "must be 1 or more")
SHARE: Check = (lambda v: 0 <= v < 1, "must be from 0 to below 1")
RATIO: Check = (lambda v: 0 <= v <= 1, "must be from 0 to 1")
DECAYS: Check = (lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "must be two numbers from 0 to below 1")

RANGES: dict[str, Check] = {
    "seed": (lambda v: 0 <= v < 2**32, "must be from 0 to 4294967295"),
    "data.eval_fraction": SHARE,
    "data.max_dropped_share": RATIO,
    "data.max_truncated_share": RATIO,
    "data.max_duplicate_share": RATIO,
    "data.workers": AT_LEAST_1,
    "data.streaming_window": AT_LEAST_1,
    "data.max_length": (lambda v: v >= 2, "must be 2 or more: a target needs a token before it"),
    "quant.outlier_threshold": NOT_NEGATIVE,
    "adapter.r": AT_LEAST_1,
    "adapter.alpha": POSITIVE,
    "adapter.dropout": SHARE,
    "optim.learning_rate": (lambda v: 0 < v <= 1000, "must be above 0 and at most 1000: 2e-4, not 2e4"),
    "optim.weight_decay": NOT_NEGATIVE,
    "optim.betas": DECAYS,
    "optim.eps": POSITIVE,
    "schedule.warmup_steps": NOT_NEGATIVE,
    "schedule.warmup_ratio": SHARE,
    "schedule.final_ratio": RATIO,
    "schedule.decay_ratio": (lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
    "loss.chunk_tokens": AT_LEAST_1,
    "packing.window": AT_LEAST_1,
    "checkpointing.k": AT_LEAST_1,
    "memory.budget_gib": POSITIVE,
    "memory.snapshot": NOT_NEGATIVE,
    "train.epochs": AT_LEAST_1,
    "train.max_steps": AT_LEAST_1,
    "train.accumulation_steps": AT_LEAST_1,
    "train.micro_batch_tokens": (lambda v: v >= 2, "must be 2 or more"),
    "train.micro_batch_size": AT_LEAST_1,
    "train.max_grad_norm": POSITIVE,
    "train.log_every": AT_LEAST_1,
    "train.eval_every": NOT_NEGATIVE,
    "train.save_every": NOT_NEGATIVE,
    "train.keep_checkpoints": AT_LEAST_1,
    "train.compare_prompts": NOT_NEGATIVE,
}


def broken_rules(config: Config, trains: bool = True) -> list[str]:
    """Every rule that this configuration breaks, in a user's words; those of training only where it `trains`."""
    problems = _ranges(config) + _across(config)
    return problems + _streaming(config) if trains and config.data.streaming else problems


def _ranges(config: Config) -> list[str]:
    problems = []
    for key, (holds, words) in RANGES.items():
        section, _, name = key.rpartition(".")
        holder = getattr(config, section) if section else config
        value = getattr(holder, name, None)  # absent where the chosen option has no such setting, or null
        if value is None:
            continue
        finite = not isinstance(value, float) or math.isfinite(value)
        if not (finite and holds(value)):
            problems.append(f"{key}={value}: {words}")
    return problems


def _across(config: Config) -> list[str]:
    problems = []
    data, train, adapter = config.data, config.train, config.adapter
    problems += source_problems(data)
    if config.model.path is None and config.model.weights is Weights.pretrained:
        problems.append("model.path is missing: give a local folder or a hub id")
    if config.model.trust_remote_code and not re.fullmatch("[0-9a-f]{40}", config.model.revision or ""):
        problems.append(
            f"model.trust_remote_code=true runs code from model.path, so model.revision={shown(config.model.revision)} "
            "must be a commit (40 characters): the code that you have read, and no later one"
        )
    if config.model.quantized_cache:
        problems += _quantized_cache(config)
    if config.packing.packed and train.micro_batch_tokens < data.max_length:
        problems.append(
            f"train.micro_batch_tokens={train.micro_batch_tokens} is below data.max_length={data.max_length}: "
            "a sample must fit a row. Raise the first or lower the second"
        )
    if isinstance(adapter, NoAdapter) and not isinstance(config.quant, NoQuant):
        problems.append("adapter=none trains every weight, which a quantised base cannot: use quant=none")
    problems += _offload(config)
    tiles = config.model.mlp_tiles
    if tiles != "auto" and not (isinstance(tiles, int) and not isinstance(tiles, bool) and tiles >= 1):
        problems.append(f"model.mlp_tiles={shown(tiles)}: must be auto, or a number of 1 or more")
    problems += _kernels(config)
    if isinstance(adapter, LoRA):
        problems += _target_modules(adapter.target_modules)
    if data.over_length is OverLength.split and data.format.value not in ("auto", "text"):
        problems.append(f"data.over_length=split cuts plain text; data.format={data.format.value} cannot be split")
    return problems


def _streaming(config: Config) -> list[str]:
    """What training needs, since a stream's end is not known before it is read."""
    problems = []
    if config.train.max_steps is None:
        problems.append(
            "data.streaming=true needs train.max_steps: how many steps an epoch has is not known before it is read"
        )
    if config.data.eval_path is None and config.data.eval_fraction > 0:
        problems.append(
            f"data.streaming=true cannot hold out data.eval_fraction={config.data.eval_fraction} of what it has not "
            "read: give data.eval_path, or set data.eval_fraction=0"
        )
    return problems


def _kernels(config: Config) -> list[str]:
    problems = []
    if isinstance(config.adapter, LoRA) and config.adapter.fused and not isinstance(config.kernels, Torch):
        problems.append(
            "kernels=compiled and kernels=liger take the place of the trainer's own functions: add adapter.fused=false"
        )
    if not isinstance(config.kernels, Torch) and config.model.mlp_tiles != 1:
        problems.append(
            "kernels=compiled and kernels=liger bring an MLP of their own, which does not run in pieces: use "
            "model.mlp_tiles=1 or kernels=torch"
        )
    if not isinstance(config.kernels, Compiled):
        return problems
    if isinstance(config.checkpointing, (Attention, Selective)):
        problems.append(
            "kernels=compiled: checkpointing=attention and selective cut through a block, which compiled code cannot "
            "keep. Use checkpointing=full or none"
        )
    if not isinstance(config.offload, NoOffload):
        problems.append("kernels=compiled: what offload moves, it moves inside a block. Use offload=none")
    return problems


def _quantized_cache(config: Config) -> list[str]:
    key = "model.quantized_cache=true"
    problems = []
    if not isinstance(config.quant, FourBit):
        problems.append(f"{key} stores a 4-bit base: use quant=nf4 or quant=fp4, or leave it out")
    if config.model.weights is Weights.random:
        problems.append(f"{key} stores weights that are read from files, which model.weights=random does not do")
    if config.model.trust_remote_code:
        problems.append(f"{key} does not serve models with code of their own: leave out one of the two")
    return problems


def _offload(config: Config) -> list[str]:
    problems = []
    if isinstance(config.offload, Activations) and isinstance(config.checkpointing, (NoCheckpointing, Attention)):
        problems.append(
            "offload=activations moves the inputs of blocks that are recomputed, and this checkpointing has none: use "
            "checkpointing=full, selective, every_k, sqrt or auto"
        )
    if isinstance(config.offload, StreamedBase):
        key = f"offload={config.offload.name}"
        if isinstance(config.adapter, NoAdapter):
            problems.append(f"{key} streams frozen blocks, and adapter=none trains them: use adapter=lora")
        if isinstance(config.quant, Int8):
            problems.append(f"{key} streams plain and 4-bit weights; LLM.int8() keeps its own copies: use quant=nf4")
        if not isinstance(config.engine, Single):
            problems.append(f"{key} is made for one process on one device: use engine=single")
        if config.model.trust_remote_code:
            problems.append(f"{key} does not serve models with code of their own: leave out one of the two")
        if config.model.quantized_cache:
            problems.append(f"{key} keeps its own files while it runs: leave out model.quantized_cache=true")
    return problems


def _target_modules(value: Any) -> list[str]:
    if isinstance(value, str) and value:
        return []
    if isinstance(value, list) and value and all(isinstance(name, str) and name for name in value):
        return []
    return [
        f"adapter.target_modules={value}: must be all-linear, a regular expression, or a list of module name endings"
    ]
