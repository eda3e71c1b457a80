"""Policies one below the other, each with less on the device and the same gradients: where a run goes that meets a lack
of memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from trainer.model.checkpointing import Checkpointing, PerBlock
from trainer.model.offload.activations import MovedInputs
from trainer.registry import name_of


def ladder(policy: Checkpointing, depth: int, device_type: str) -> Iterator[tuple[str, Checkpointing]]:
    """The cheaper policies below this one, by name: at each rung the blocks that keep most take the next policy they
    know; then, on a GPU, the inputs lie in host memory. Segments keep less than full checkpointing does, and stay."""
    moved = policy.moves_inputs
    inner = policy.inner if isinstance(policy, MovedInputs) else policy
    while inner.segment(depth) is None:
        blocks = inner.blocks(depth)
        most = max(map(_rungs, blocks))
        if most == 0:
            break
        below = [block.cheaper() if _rungs(block) == most else block for block in blocks]
        name = next(name_of("checkpointing", b) for b, above in zip(below, blocks, strict=True) if b is not above)
        inner = PerBlock(below)
        yield name, MovedInputs(inner) if moved else inner
    if device_type == "cuda" and not moved:
        yield "activations", MovedInputs(inner)


def _rungs(block: Checkpointing) -> int:
    """Below a block's policy."""
    for number in count():
        following = block.cheaper()
        if following is None:
            return number
        block = following
