"""Options of the group `checkpointing`: which activations are kept for backward and which are computed again.

d: hidden size. Kept bytes are a token and block in d-vectors; what each policy keeps stands in
conf/checkpointing/selective.yaml.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil, sqrt
from typing import TYPE_CHECKING, Annotated, ClassVar

from trainer.errors import ConfigError, ModelError
from trainer.model.recompute import Again, Keep, Segment, attention_of, checkpointable, keeps, kept_operations, run_by
from trainer.ranges import AT_LEAST_1
from trainer.registry import Section, name_of, option

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class BlockWork:
    """Operations of the blocks' forward pass, a token."""

    kernel: float
    """attention's own"""
    linear: float
    """all linear layers', adapters included"""
    projections: float
    """of the linear layers inside attention"""
    counted: Callable[[Checkpointing], float]
    """the share of them that a policy runs again, counted while its step is traced"""

    @property
    def total(self) -> float:
        return self.kernel + self.linear


@dataclass
class Checkpointing(Section, ABC):
    """What the decoder keeps between forward and backward."""

    moves_inputs: ClassVar[bool] = False
    """whether the kept inputs of blocks lie in host memory"""
    recomputes_blocks: ClassVar[bool] = True
    """whether blocks run again in backward from their kept inputs"""
    cuts_blocks: ClassVar[bool] = False
    """whether a part of a block is kept and a part runs again, which compiled code does not know"""
    says: ClassVar[str] = "under a policy of their own"
    """of blocks: what happens to them"""

    def apply(self, model: torch.nn.Module) -> None:
        """Sets the policy on a transformers model, block by block. Raises ModelError where it does not fit."""
        for block in blocks_of(model, self):
            self.apply_block(block)

    @abstractmethod
    def apply_block(self, block: torch.nn.Module) -> None:
        """Sets the policy on one decoder block."""

    def blocks(self, depth: int) -> list[Checkpointing]:
        """The per-block policies that a prediction traces, one a block."""
        return [self] * depth

    def segment(self, depth: int) -> int | None:
        """Blocks recomputed together, where it is more than one."""
        return None

    def ladder(self) -> list[Checkpointing] | None:
        """Policies of a block among which the plan chooses, the fastest first; None where this is one itself."""
        return None

    def cheaper(self) -> Checkpointing | None:
        """The next policy of a block that keeps less, where memory runs out; None where none is known."""
        return None

    def recomputed(self, work: BlockWork) -> float:
        """Share of a block's forward arithmetic that runs again in backward."""
        return work.counted(self)


@option("checkpointing", "none")
@dataclass
class NoCheckpointing(Checkpointing):
    """Keep everything: fastest, most memory."""

    recomputes_blocks = False
    says = "kept whole"

    def apply(self, model):
        for block in checkpointable(model):
            self.apply_block(block)

    def apply_block(self, block):
        run_by(block, None)

    def cheaper(self):
        return Selective(keep=Keep.attention)

    def recomputed(self, work):
        return 0.0


@option("checkpointing", "full")
@dataclass
class FullCheckpointing(Checkpointing):
    """Keep each block's input and run the block again in backward (Chen et al. 2016)."""

    says = "recomputed"

    def apply_block(self, block):
        # Not through transformers' activation_checkpointing_enable: that makes the embedding's output require
        # gradients, which costs block 0's backward through q, k, v. Non-reentrant checkpointing does not need it.
        from torch.utils.checkpoint import checkpoint

        run_by(block, partial(checkpoint, use_reentrant=False))

    def recomputed(self, work):
        return 1.0


@dataclass
class Segments(Checkpointing):
    """Blocks in segments: one kept input a segment, whose blocks run again together in backward."""

    @abstractmethod
    def length(self, depth: int) -> int:
        """Blocks in a segment. Raises ConfigError where it does not fit the depth."""

    def apply(self, model):
        blocks = blocks_of(model, self)
        length = self.length(len(blocks))
        for start in range(0, len(blocks), length):
            segment = Segment(blocks[start : start + length])
            for position, block in enumerate(segment.blocks):
                run_by(block, segment.runner(position))

    def apply_block(self, block):
        raise AssertionError("a segment is more than a block")

    def blocks(self, depth):
        if self.segment(depth) is None:
            return [FullCheckpointing()] * depth
        return [NoCheckpointing(), *[FullCheckpointing()] * (depth - 1)]

    def segment(self, depth):
        length = self.length(depth)
        return length if length > 1 and depth > 1 else None


@option("checkpointing", "every_k")
@dataclass
class EveryK(Segments):
    """Segments of k blocks."""

    k: Annotated[int, AT_LEAST_1]
    """blocks in a segment, 1 to the model's depth; 1 is the same as full"""

    def length(self, depth):
        if self.k > depth:
            raise ConfigError(
                f"checkpointing.k={self.k}: the model has {depth} blocks. Allowed: 1 to {depth}; "
                f"about the square root, {ceil(sqrt(depth))}, keeps the least."
            )
        return self.k


@option("checkpointing", "sqrt")
@dataclass
class Sqrt(Segments):
    """Segments of the square root of the depth, rounded up (Chen et al. 2016, section 4.1)."""

    def length(self, depth):
        return ceil(sqrt(depth))


@option("checkpointing", "attention")
@dataclass
class Attention(Checkpointing):
    """Keep all of a block but what its attention makes: projections and attention run again in backward."""

    recomputes_blocks = False
    cuts_blocks = True

    def apply_block(self, block):
        run_by(block, None)
        attention = attention_of(block)
        if attention is None:
            raise ModelError(
                f"checkpointing=attention: {type(block).__name__} has no attention module. Use checkpointing=full."
            )
        attention.forward = Again(attention)  # on this instance only; the block's code calls it as before

    def cheaper(self):
        return Selective(keep=Keep.attention)

    def recomputed(self, work):
        return (work.kernel + work.projections) / work.total


@option("checkpointing", "selective")
@dataclass
class Selective(Checkpointing):
    """Keep each block's input and the outputs of some operations; everything else runs again (torch's selective
    activation checkpointing). A dequantised weight is never kept."""

    says = "recomputed but for attention"

    keep: Keep
    """attention: outputs of the attention kernels; linear: outputs of all matrix products; or both"""

    cuts_blocks = True

    def apply_block(self, block):
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        contexts = partial(create_selective_checkpoint_contexts, partial(keeps, set(kept_operations(self.keep))))
        run_by(block, partial(checkpoint, use_reentrant=False, context_fn=contexts))

    def cheaper(self):
        return FullCheckpointing()

    def recomputed(self, work):
        kept = {Keep.attention: work.kernel, Keep.linear: work.linear, Keep.both: work.total}
        return 1 - kept[self.keep] / work.total


@dataclass
class PerBlock(Checkpointing):
    """A policy for each block: what checkpointing=auto resolves to."""

    policies: list[Checkpointing]

    def apply(self, model):
        for block, policy in zip(checkpointable(model), self.policies, strict=True):
            policy.apply_block(block)

    def apply_block(self, block):
        raise AssertionError("each block has its own policy")

    def blocks(self, depth):
        return list(self.policies)


@option("checkpointing", "auto")
@dataclass
class AutoCheckpointing(Checkpointing):
    """The least recomputation that fits memory.budget_gib: per block none, selective or full."""

    def apply_block(self, block):
        raise AssertionError("auto is resolved before it is applied")

    def ladder(self):
        return [NoCheckpointing(), Selective(keep=Keep.attention), FullCheckpointing()]


@option("checkpointing", "blocks")
@dataclass
class Blocks(Checkpointing):
    """A policy a block, chosen by hand; blocks in no list are recomputed whole."""

    none: list[str]
    """blocks that are kept whole: numbers from 0 and ranges, both ends included"""
    attention: list[str]
    """blocks of which all is kept but what attention makes"""
    selective: list[str]
    """blocks that are recomputed, the attention kernels' outputs kept"""

    @property
    def cuts_blocks(self):
        return bool(self.attention or self.selective)

    def _lists(self) -> list[tuple[str, list[str], Checkpointing]]:
        return [
            ("none", self.none, NoCheckpointing()),
            ("attention", self.attention, Attention()),
            ("selective", self.selective, Selective(keep=Keep.attention)),
        ]

    def problems(self, config):
        return [
            f"checkpointing.{name}={span}: must be a block's number from 0, or a range such as 0-7"
            for name, spans, _ in self._lists()
            for span in spans
            if re.fullmatch(r"\d+(-\d+)?", str(span)) is None
        ]

    def blocks(self, depth):
        policies: dict[int, Checkpointing] = {}
        for name, spans, policy in self._lists():
            for span in spans:
                first, _, last = str(span).partition("-")
                chosen = range(int(first), int(last or first) + 1)
                twice = sorted(policies.keys() & set(chosen))
                if not chosen or chosen[-1] >= depth or twice:
                    why = f"block {twice[0]} has a policy already" if twice else f"the model's are 0 to {depth - 1}"
                    raise ConfigError(f"checkpointing.{name}={span}: {why}.")
                policies |= dict.fromkeys(chosen, policy)
        return [policies.get(block, FullCheckpointing()) for block in range(depth)]

    def apply(self, model):
        PerBlock(self.blocks(len(blocks_of(model, self)))).apply(model)

    def apply_block(self, block):
        raise AssertionError("each block has its own policy")


def blocks_of(model: torch.nn.Module, policy: Checkpointing) -> list[torch.nn.Module]:
    """The decoder's blocks; ModelError where transformers knows none."""
    blocks = checkpointable(model)
    if not blocks:
        name = name_of("checkpointing", policy)
        raise ModelError(
            f"checkpointing={name}: {type(model).__name__} has no layers that transformers can checkpoint. "
            "Use checkpointing=none."
        )
    return blocks
