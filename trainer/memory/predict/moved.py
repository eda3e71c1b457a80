"""Bytes that offloading moves, and how long that takes beside the computation."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from trainer.memory.predict.speed import EFFICIENCY, roofs
from trainer.model.offload.block_stream import SLOTS
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.memory.predict.planner import Planner
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


LINKS = {"RTX 3090": 25e9, "RTX 4090": 25e9, "A100": 25e9, "L40S": 25e9, "H100": 50e9}
"""Assumed bytes a second between pinned host memory and the device: about 80 % of PCIe 4.0 x16 and 5.0 x16."""
DISK = 3e9
"""Assumed bytes a second of a local NVMe disk; a run measures its own."""


@dataclass(frozen=True)
class Traffic:
    """What a micro-batch moves over the link, each way counted. Bytes."""

    blocks: int
    """frozen blocks, whatever the micro-batch's size"""
    inputs: int
    """inputs of checkpointed blocks, there and back: a token's worth each token"""

    @property
    def total(self) -> int:
        return self.blocks + self.inputs


def traffic(planner: Planner, policy: Checkpointing) -> Traffic:
    """Of the planned micro-batch."""
    blocks = 0
    if planner.static.streamed:
        blocks = moved_blocks(policy, planner.depth) * planner.static.streamed // planner.depth
    return Traffic(blocks, 2 * planner.moved_inputs(policy))


@dataclass(frozen=True)
class LinkUse:
    """A device's link, and the computation beside it. Seconds of a micro-batch."""

    gib_per_second: float
    moving_seconds: float
    computing_seconds: float
    hidden_from_tokens: int | None
    """the micro-batch from which on the computation hides the moving; None: never"""


@dataclass(frozen=True)
class OffloadPlan:
    """What lies elsewhere and what is moved."""

    elsewhere_gib: float
    on_disk: bool
    moved_gib_a_micro_batch: float
    moved_gib_a_step: float
    devices: dict[str, LinkUse]


def offload_plan(planner: Planner) -> OffloadPlan | None:
    """For the plan; None where nothing is offloaded."""
    policy, config = planner.policy, planner.config
    moved = traffic(planner, policy)
    elsewhere = planner.elsewhere(policy)
    if elsewhere == 0:
        return None
    tokens = planner.shape.num_tokens
    devices = {}
    for name, roof in roofs(planner, policy).items():
        rate = min(LINKS[name], DISK) if config.offload.from_disk else LINKS[name]
        token_seconds = 1 / (EFFICIENCY * roof)
        spare = token_seconds - moved.inputs / tokens / rate  # what a token computes longer than it moves
        devices[name] = LinkUse(
            gib_per_second=rate / GIB,
            moving_seconds=moved.total / rate,
            computing_seconds=tokens * token_seconds,
            hidden_from_tokens=ceil(moved.blocks / rate / spare) if spare > 0 else None,
        )
    return OffloadPlan(
        elsewhere_gib=elsewhere / GIB,
        on_disk=config.offload.from_disk,
        moved_gib_a_micro_batch=moved.total / GIB,
        moved_gib_a_step=moved.total * config.train.accumulation_steps / GIB,
        devices=devices,
    )
