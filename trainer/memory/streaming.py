"""Bytes that offloading moves, and how long that takes beside the computation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.model.offload.stream import SLOTS

if TYPE_CHECKING:
    from trainer.model.checkpointing import Checkpointing


def order_of_use(policy: Checkpointing, depth: int) -> list[int]:
    """The blocks that a micro-batch computes with, one after the other: forward, then backward with its recompute."""
    order = list(range(depth))
    segment = policy.segment(depth)
    if segment is None:
        return order + order[::-1]
    for start in reversed(range(0, depth, segment)):
        blocks = list(range(start, min(start + segment, depth)))
        order += blocks + blocks[::-1]
    return order


def moved_blocks(policy: Checkpointing, depth: int) -> int:
    """Blocks fetched in a micro-batch that follows another: slots hold the block in use and the one after it."""
    order = order_of_use(policy, depth) * 2
    held: list[int] = []
    fetched = 0
    for position, block in enumerate(order):
        if position == len(order) // 2:
            fetched = 0
        following = next((b for b in order[position:] if b != block), block)
        for wanted in (block, following):
            if wanted not in held:
                held = [b for b in held if b == block][: SLOTS - 1] + [wanted]
                fetched += 1
    return fetched
