"""The inputs of checkpointed blocks in host memory: sent away in forward, fetched back one ahead in backward.

Checkpointing saves a block's input through autograd's saved-tensor hooks, which are ours while it does. One queue of
copies in order makes a host buffer safe to use again: its next copy in comes after its last copy out. Device tensors
are kept until the copy that reads them is done.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from trainer.model.checkpointing import Checkpointing
from trainer.model.offload.copies import Copies, copies_for
from trainer.model.recompute import checkpointable

IN_FLIGHT = 2
"""Inputs on their way to the host at a time; the device holds no more of them than this, and two on the way back."""


@dataclass
class MovedInputs(Checkpointing):
    """Another policy, with the inputs that it keeps in host memory."""

    inner: Checkpointing
    mover: Mover | None = field(default=None, init=False, repr=False, compare=False)
    """of the model that it was applied to"""

    moves_inputs = True

    def apply(self, model):
        self.inner.apply(model)
        device = next(model.parameters()).device
        self.mover = Mover(copies_for(device), device)
        move_inputs(model, self.mover)

    def apply_block(self, block):
        self.inner.apply_block(block)

    def blocks(self, depth):
        return self.inner.blocks(depth)

    def segment(self, depth):
        return self.inner.segment(depth)


def move_inputs(model: torch.nn.Module, mover: Mover) -> None:
    """What each checkpointed block of a model saves goes through `mover`."""
    for block in checkpointable(model):
        if block.gradient_checkpointing:
            block._gradient_checkpointing_func = _through(mover, block._gradient_checkpointing_func)


def _through(mover: Mover, checkpoint: Callable) -> Callable:
    def run(function: Callable, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        with saved_tensors_hooks(mover.pack, mover.unpack):
            return checkpoint(function, hidden, *args)

    return run


class Kept:
    """One input in host memory."""

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor, pool: list[torch.Tensor], before: Kept | None):
        self.shape, self.dtype, self.host = tensor.shape, tensor.dtype, host
        self.device_tensor: torch.Tensor | None = tensor
        """the input itself while it is on the device, on its way there or back"""
        self.handle: Any = None
        """of the copy that brings it back"""
        self.before = weakref.ref(before) if before is not None else None
        """the one that was saved before it: backward asks for that one next"""
        weakref.finalize(self, pool.append, host)


class Mover:
    """Moves inputs between the device and buffers in host memory that are used again and again."""

    what = "block inputs"

    def __init__(self, copies: Copies, device: torch.device):
        self.copies, self.device = copies, device
        self.moved_bytes = 0
        self.fetched = 0
        """inputs that were copied back; the last ones may still be on the device"""
        self._pinned = device.type == "cuda"
        self._free: list[torch.Tensor] = []
        self._leaving: deque[tuple[Kept, Any]] = deque()
        self._last: weakref.ref[Kept] | None = None

    def pack(self, tensor: torch.Tensor) -> Kept | torch.Tensor:
        """Sends an input away."""
        if not tensor.is_floating_point():
            return tensor
        while len(self._leaving) >= IN_FLIGHT:
            self._let_go()
        tensor = tensor.detach()  # the graph behind an input is no part of what is kept
        before = self._last() if self._last is not None else None
        kept = Kept(tensor, self._buffer(tensor.nbytes), self._free, before)
        work = _Copy(self._view(kept), tensor)
        self._leaving.append((kept, self.copies.enqueue(work, after=self.copies.computed())))
        self._last = weakref.ref(kept)
        self.moved_bytes += tensor.nbytes
        return kept

    def unpack(self, kept: Kept | torch.Tensor) -> torch.Tensor:
        """The input on the device; starts fetching the one that comes next in backward."""
        if isinstance(kept, torch.Tensor):
            return kept
        self._fetch(kept)
        if kept.handle is not None:
            self.copies.wait(kept.handle)
        tensor, kept.device_tensor, kept.handle = kept.device_tensor, None, None
        self._leaving = deque((other, handle) for other, handle in self._leaving if other is not kept)
        upcoming = kept.before() if kept.before is not None else None
        if upcoming is not None:
            self._fetch(upcoming)
        return tensor

    def _fetch(self, kept: Kept) -> None:
        """Starts the way back of an input that is not on the device."""
        if kept.device_tensor is not None:
            return
        kept.device_tensor = torch.empty(kept.shape, dtype=kept.dtype, device=self.device)
        # The device's memory may have been used by earlier computation until now: the copy comes after that.
        work = _Copy(kept.device_tensor, self._view(kept))
        kept.handle = self.copies.enqueue(work, after=self.copies.computed())
        self.fetched += 1
        self.moved_bytes += kept.device_tensor.nbytes

    def _let_go(self) -> None:
        """The input that left first is dropped from the device, as soon as its copy is done."""
        kept, handle = self._leaving.popleft()
        self.copies.wait(handle)
        kept.device_tensor = None

    def _buffer(self, size: int) -> torch.Tensor:
        """Host memory of at least `size` bytes."""
        for position, buffer in enumerate(self._free):
            if len(buffer) >= size:
                return self._free.pop(position)
        if self._free:
            self._free.pop()  # too small: a larger one takes its place
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    @staticmethod
    def _view(kept: Kept) -> torch.Tensor:
        return kept.host[: kept.shape.numel() * kept.dtype.itemsize].view(kept.dtype).view(kept.shape)


@dataclass(frozen=True, eq=False)
class _Copy:
    target: torch.Tensor
    source: torch.Tensor

    @torch.no_grad()
    def __call__(self) -> None:
        self.target.copy_(self.source, non_blocking=True)
