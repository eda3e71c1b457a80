"""What each technique would change: from the traces at hand and closed forms, not a trace a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer.config.shelf import option_values, schema_of, usable
from trainer.memory.advice.derive import derived
from trainer.memory.predict.moved import moved_blocks
from trainer.memory.predict.optimizer_memory import optimizer_memory
from trainer.memory.predict.planner import keeps_input
from trainer.memory.predict.speed import recomputed_share, work
from trainer.memory.predict.static import count_static
from trainer.model.adapters import LoRA, decoder_linears
from trainer.model.checkpointing import (
    Attention,
    Checkpointing,
    EveryK,
    Full,
    Keep,
    NoCheckpointing,
    Segments,
    Selective,
    Sqrt,
)
from trainer.model.fused.tiles import AUTO
from trainer.model.offload.activations import MovedInputs
from trainer.model.quant import Int8
from trainer.registry import OPTIONS
from trainer.training.losses import Chunked
from trainer.training.losses import Full as FullLoss
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.memory.predict.planner import Planner

POLICIES: dict[str, Checkpointing] = {
    "checkpointing=none": NoCheckpointing(),
    "checkpointing=attention": Attention(),
    "checkpointing=selective checkpointing.keep=attention": Selective(keep=Keep.attention),
    "checkpointing=full": Full(),
    "checkpointing=every_k checkpointing.k=2": EveryK(k=2),
    "checkpointing=sqrt": Sqrt(),
}

BITS = {"nf4": 4.127, "fp4": 4.127, "int8": 8.0}
"""Bits a quantised weight, scales included."""


@dataclass(frozen=True)
class Row:
    """One change by itself."""

    change: str
    """the words to add to the command"""
    needed: int
    """bytes of the device with it"""
    cost: str
    effort: int
    """how much it takes away, for the order of advice: 0 nothing, 9 another training"""


def rows(planner: Planner) -> list[Row]:
    """Every change that can be said at once, in groups."""
    now = planner.needed(planner.predict())
    return [
        *_policies(planner),
        *_sizes(planner),
        *_optimizers(planner, now),
        *_quantisations(planner, now),
        *_ranks(planner, now),
        *_losses(planner),
        *_offloads(planner),
        *_tiles(planner),
    ]


def _policies(planner: Planner) -> list[Row]:
    current, found = planner.policy, []
    if planner.profile_of_policy.whole:
        return found  # no checkpointing but none works there
    now, full = work(planner, current), planner.needed(planner.predict(planner.config.offload.policy(Full())))
    for words, policy in POLICIES.items():
        policy = planner.config.offload.policy(policy)
        if repr(policy) == repr(current) or (isinstance(policy, Segments) and planner.depth < 3):
            continue
        if policy.moves_inputs and planner.moved_inputs(policy) == 0:
            continue  # refused: it has no inputs to move
        needed = planner.needed(derived(planner, policy))
        more = work(planner, policy) / now - 1
        cost = f"recomputes {recomputed_share(planner, policy):.0%} of the blocks, {more:+.0%} work"
        if isinstance(policy, Segments) and needed > full:
            cost += "; more memory than full: a whole segment is alive in backward"
        found.append(Row(words, needed, cost, 2))
    return found


def _sizes(planner: Planner) -> list[Row]:
    tokens, found = planner.shape.num_tokens, []
    train = planner.config.train
    half = planner.needed(planner.predict(tokens=max(tokens // 2, 2)))
    double = planner.needed(planner.predict(tokens=2 * tokens))
    if planner.shape.packed:
        size = train.micro_batch_tokens
        if size // 2 >= planner.config.data.max_length:
            words = f"train.micro_batch_tokens={size // 2} train.accumulation_steps={2 * train.accumulation_steps}"
            found.append(Row(words, half, "the same batch in shorter rows: dequantisation weighs more", 1))
        else:
            words = (
                f"train.micro_batch_tokens={size // 2} data.max_length={size // 2} "
                f"train.accumulation_steps={2 * train.accumulation_steps}"
            )
            found.append(Row(words, half, f"samples over {size // 2} tokens are dropped or cut", 5))
        found.append(Row(f"train.micro_batch_tokens={2 * size}", double, "longer rows, fewer dequantisations", 1))
        count = train.micro_batch_size
        padded = count * planner.config.data.max_length
        needed = planner.needed(planner.predict(tokens=padded))
        found.append(Row("packing=none", needed, f"{count} padded samples; padding is computed too", 6))
        return found
    packed = planner.needed(planner.predict(tokens=train.micro_batch_tokens))
    words = f"packing=best_fit train.micro_batch_tokens={train.micro_batch_tokens}"
    found.append(Row(words, packed, "rows of whole samples, no padding is computed", 1))
    if train.micro_batch_size > 1:
        words = (
            f"train.micro_batch_size={train.micro_batch_size // 2} train.accumulation_steps="
            f"{2 * train.accumulation_steps}"
        )
        found.append(Row(words, half, "the same batch in smaller pieces", 1))
    return found


def _optimizers(planner: Planner, now: int) -> list[Row]:
    found = []
    optim = planner.config.optim
    for name in usable("optim"):
        cls = schema_of("optim", name)
        if cls is type(optim) or cls not in OPTIONS["optim"].values():
            continue
        try:
            other = optimizer_memory(
                cls(**option_values("optim", name)), planner.model.trainable(), planner.device_type
            )
        except Exception:
            continue  # its library is absent, or its step reads values, which a plan has none of
        change = other.state - planner.optimizer.state
        found.append(Row(f"optim={name}", now + change, "other updates, the learning rate may need another look", 3))
    return found


def _quantisations(planner: Planner, now: int) -> list[Row]:
    config, found = planner.config, []
    if planner.model.adapted is planner.model.base or planner.static.streamed:
        return []
    linears = [planner.skeleton.get_submodule(name).weight for name in decoder_linears(planner.skeleton)]
    numel = sum(weight.numel() for weight in linears)
    width = planner.dtypes.compute.itemsize
    workspace = max(weight.numel() for weight in linears) * width
    weights = planner.static.weights
    mine = weights["quantised weights"] + weights["absmax"] + weights["linear weights"]
    quantised = weights["quantised weights"] > 0
    costs = {
        "none": "no dequantisation",
        "nf4": "dequantises every weight 2-3 times a micro-batch",
        "fp4": "as nf4, less exact",
        "int8": "half the saving of nf4, smaller error",
    }
    for name in ("none", "int8", "nf4", "fp4"):
        if schema_of("quant", name) is type(config.quant):
            continue
        stored = numel * width if name == "none" else round(numel * BITS[name] / 8)
        extra = (0 if name == "none" else workspace) - (workspace if quantised else 0)
        found.append(Row(f"quant={name}", now + stored - mine + extra, costs[name], 4))
    return found


def _ranks(planner: Planner, now: int) -> list[Row]:
    adapter = planner.config.adapter
    if not isinstance(adapter, LoRA):
        return []
    found = []
    mine = planner.static.adapter + planner.static.gradients + planner.optimizer.state
    for rank in (adapter.r // 2, adapter.r * 2):
        if rank == 0:
            continue
        sizes = [tuple(rank if size == adapter.r else size for size in p.shape) for p in planner.model.trainable()]
        resized = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
        weights = sum(4 * p.numel() for p in resized)
        other = 2 * weights + optimizer_memory(planner.config.optim, resized, planner.device_type).state
        cost = "less capacity" if rank < adapter.r else "more capacity"
        found.append(Row(f"adapter.r={rank}", now + other - mine, cost, 3))
    return found


def _losses(planner: Planner) -> list[Row]:
    """The other of full and chunked: the blocks as traced, the loss from a trace of one block."""
    name, cost = "full", "logits of every token: the reference"
    if isinstance(planner.config.loss, FullLoss):
        name, cost = "chunked", "the same loss, no logits of all tokens"
    elif not isinstance(planner.config.loss, Chunked):
        return []
    if planner.profile_of_policy.whole:
        return []  # the loss is not apart from the model in its trace
    other = schema_of("loss", name)(**option_values("loss", name))
    return [Row(f"loss={name}", planner.needed(planner.with_loss(other)), cost, 0)]


def _offloads(planner: Planner) -> list[Row]:
    """What leaves the device, where nothing has left it yet."""
    found: list[Row] = []
    policy = planner.policy
    if planner.static.streamed or policy.moves_inputs:
        return found
    if planner.device_type == "cuda":
        recomputes = any(keeps_input(block) for block in policy.blocks(planner.depth))
        moved = MovedInputs(policy if recomputes else Full())
        size = planner.moved_inputs(moved) / GIB
        words = "offload=activations" if recomputes else "offload=activations checkpointing=full"
        cost = f"{size:.2f} GiB of host memory, moved there and back each micro-batch"
        found.append(Row(words, planner.needed(planner.predict(moved)), cost, 1))
    if planner.model.adapted is planner.model.base or isinstance(planner.config.quant, Int8):
        return found
    static = count_static(planner.model, planner.optimizer, planner.device_type, streams=True)
    needed = planner.needed_bytes(planner.predict().peak - planner.static.total + static.total)
    times = moved_blocks(policy, planner.depth) / planner.depth
    cost = f"{static.streamed / GIB:.2f} GiB {{}}, moved {times:.1f} times a micro-batch"
    if planner.device_type == "cuda":
        found.append(Row("offload=base_cpu", needed, cost.format("of host memory"), 2))
    found.append(Row("offload=base_disk", needed, cost.format("on disk"), 3))
    return found


def _tiles(planner: Planner) -> list[Row]:
    """The MLP in pieces, for rows longer than a piece; from a trace of its own."""
    width = planner.model_config.get_text_config().hidden_size
    if planner.config.model.mlp_tiles != 1 or planner.shape.row_tokens <= width or not planner.model.layers():
        return []
    needed = planner.needed(planner.with_tiles(AUTO).predict(planner.policy))
    full = all(isinstance(block, Full) for block in planner.policy.blocks(planner.depth))
    return [Row("model.mlp_tiles=auto", needed, "the same arithmetic" if full else "each MLP runs forward twice", 0)]


def ranked(planner: Planner, budget: int) -> list[Row]:
    """Single changes that make a budget hold, the smallest first."""
    return sorted((row for row in rows(planner) if row.needed <= budget), key=lambda row: (row.effort, -row.needed))
