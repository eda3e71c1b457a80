"""How blocks and attention modules are made to run again in backward: the mechanics of the group `checkpointing`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch.utils.checkpoint import CheckpointPolicy


def checkpointable(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that transformers can run under a checkpoint, in order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def attention_of(block: torch.nn.Module) -> torch.nn.Module | None:
    """The block's own attention module."""
    return next((child for child in block.children() if "Attention" in type(child).__name__), None)


def run_by(block: torch.nn.Module, function: Callable | None) -> None:
    """In training the block is run by `function`, or plainly, whatever policy it had before."""
    block.gradient_checkpointing = function is not None
    block._gradient_checkpointing_func = function
    attention = attention_of(block)
    if attention is not None and isinstance(attention.forward, Again):
        attention.forward = attention.forward.own


def checkpointed(function: Callable, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, *args, use_reentrant=False, **kwargs)


class Again:
    """The forward of an attention module that runs again in backward."""

    def __init__(self, attention: torch.nn.Module):
        self.attention, self.own = attention, attention.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.attention.training:
            return self.own(*args, **kwargs)
        return checkpointed(self.own, *args, **kwargs)


class Segment:
    """Runs the blocks of a segment under one checkpoint.

    A decoder calls its blocks one by one. All but the last are put off: they hand their input on unchanged and leave
    their call here; the last runs the whole segment. So each block gets its own arguments, whatever the model.
    """

    def __init__(self, blocks: list[torch.nn.Module]):
        self.blocks = blocks
        self._calls: list[Callable] = []

    def runner(self, position: int) -> Callable:
        last = position == len(self.blocks) - 1

        def run(function: Callable, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
            if position == 0:
                self._calls = []
            self._calls.append(lambda x: function(x, *args))
            return checkpointed(partial(_in_turn, self._calls), hidden) if last else hidden

        return run


def _in_turn(calls: list[Callable], hidden: torch.Tensor) -> torch.Tensor:
    import torch

    for call in calls:
        hidden = call(hidden)
        if not isinstance(hidden, torch.Tensor):
            raise ModelError("this model's blocks return more than hidden states: use checkpointing=full.")
    return hidden


class Keep(Enum):
    attention = "attention"
    linear = "linear"
    both = "both"


def kept_operations(keep: Keep) -> list[Any]:
    """Operations whose outputs a selective policy keeps; those that this torch does not have are left out."""
    import torch
    import torch.nn.attention.varlen  # registers its operation

    names = {
        Keep.attention: [
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_cudnn_attention",
            "torch_attn::_varlen_attn",
        ],
        Keep.linear: ["aten::mm", "aten::addmm", "aten::bmm", "bitsandbytes::gemm_4bit"],
    }
    keep = Keep(keep)
    chosen = names[Keep.attention] + names[Keep.linear] if keep is Keep.both else names[keep]
    found = []
    for name in chosen:
        space, _, operation = name.partition("::")
        packet = getattr(getattr(torch.ops, space), operation, None)
        if packet is not None:
            found.append(packet.default)
    return found


_nothing_kept = ContextVar("nothing_kept", default=False)


@contextmanager
def nothing_kept() -> Iterator[None]:
    """What is computed within it is computed again for backward by itself: a selective policy keeps none of it."""
    token = _nothing_kept.set(True)
    try:
        yield
    finally:
        _nothing_kept.reset(token)


def may_keep() -> bool:
    """Whether a selective policy keeps outputs of what runs now."""
    return not _nothing_kept.get()


def keeps(operations: set[Any], ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    from torch.utils.checkpoint import CheckpointPolicy

    kept = operation in operations and may_keep()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
