"""Policies one below the other, each with less on the device and the same gradients: where a run goes that meets a lack
of memory."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.model.checkpointing import Attention, Checkpointing, Full, Keep, NoCheckpointing, PerBlock, Selective
from trainer.model.offload.activations import MovedInputs


def ladder(policy: Checkpointing, depth: int, device_type: str) -> Iterator[tuple[str, Checkpointing]]:
    """The cheaper policies below this one, by name: selective and full for the blocks that keep more than that, and on
    a GPU their inputs in host memory. Segments of blocks keep less than full does, and stay."""
    moved = policy.moves_inputs
    inner = policy.inner if isinstance(policy, MovedInputs) else policy
    if inner.segment(depth) is None:
        for name, rung, keeps_more in (
            ("selective", Selective(keep=Keep.attention), (NoCheckpointing, Attention)),
            ("full", Full(), (NoCheckpointing, Attention, Selective)),
        ):
            blocks = inner.blocks(depth)
            if any(isinstance(block, keeps_more) for block in blocks):
                inner = PerBlock([rung if isinstance(block, keeps_more) else block for block in blocks])
                yield name, MovedInputs(inner) if moved else inner
    if device_type == "cuda" and not moved:
        yield "activations", MovedInputs(inner)
