"""Frozen blocks that are on the device only while they are used: asked for at first use, the next one fetched ahead.

Whoever computes with a streamed linear layer calls its `fetch` first (`Projection.weight` of the fused functions, and
the forward that `install` gives the layer). Autograd saves no streamed weight: backward fetches it again. So any order
of use is right, under every checkpointing policy, in evaluation and in generation; the order only decides how much of
the copying is hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes

from trainer.model.experts import Stack4bit
from trainer.model.fused.functions import Projection
from trainer.model.offload.copies import Copies

SLOTS = 2
"""Blocks on the device at a time: the one in use, and the next one."""
HISTORY = 3
"""Blocks, each in forward or backward, by which the next one is foreseen: tells the two passes over a segment apart."""
ALIGNMENT = 256
"""Bytes: each tensor in a slot begins at a multiple of this (CUDA kernels load up to 16 at once)."""


@dataclass(frozen=True)
class BlockPlace:
    """One tensor of a block: which attribute it is, and where it lies in a slot."""

    name: str
    holder: Any
    attribute: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int
    """bytes from the slot's beginning"""

    @property
    def size(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.offset : self.offset + self.size].view(self.dtype).view(self.shape)

    def put(self, tensor: torch.Tensor) -> None:
        setattr(self.holder, self.attribute, tensor)

    def absent(self, device: torch.device) -> torch.Tensor:
        """The tensor's shape without its bytes. NaN where it can be: a use without a fetch spoils the loss."""
        value = float("nan") if self.dtype.is_floating_point else 0
        return torch.full((), value, dtype=self.dtype, device=device).expand(self.shape)


@dataclass(frozen=True)
class StreamedBlock:
    """What of one decoder block is streamed."""

    index: int
    linears: list[torch.nn.Module]
    places: list[BlockPlace]
    absent: list[torch.Tensor] = field(default_factory=list, repr=False)
    """what stands for each tensor while it is away, made once"""

    @property
    def size(self) -> int:
        """Bytes in a slot."""
        return max((aligned(place.offset + place.size) for place in self.places), default=0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is there now, by name."""
        return {place.name: getattr(place.holder, place.attribute) for place in self.places}

    def bind(self, buffer: torch.Tensor) -> None:
        for place in self.places:
            place.put(place.view(buffer))

    def unbind(self, device: torch.device) -> None:
        if not self.absent:
            self.absent.extend(place.absent(device) for place in self.places)
        for place, tensor in zip(self.places, self.absent, strict=True):
            place.put(tensor)


def streamed_block(index: int, linears: dict[str, torch.nn.Module]) -> StreamedBlock:
    """The frozen weights of a block's linear layers, by name; biases and code tables stay where they are."""
    places, offset = [], 0
    for name, linear in linears.items():
        for suffix, holder, attribute in _streamed(linear):
            tensor = getattr(holder, attribute)
            places.append(BlockPlace(f"{name}.{suffix}", holder, attribute, tensor.dtype, tensor.shape, offset))
            offset = aligned(offset + tensor.nbytes)
    return StreamedBlock(index, list(linears.values()), places)


def _streamed(linear: torch.nn.Module) -> list[tuple[str, Any, str]]:
    """(name, holder, attribute) of each large tensor of a plain or 4-bit linear layer, named as bitsandbytes does, or
    of a 4-bit stack of experts."""
    found: list[tuple[str, Any, str]] = [("weight", linear.weight, "data")]
    if isinstance(linear, Stack4bit):
        return [*found, *((name, linear, name) for name in linear.scales())]
    state = getattr(linear.weight, "quant_state", None)
    if state is not None:
        found.append(("weight.absmax", state, "absmax"))
        if state.nested:
            found.append(("weight.nested_absmax", state.state2, "absmax"))
    return found


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class BlockSource(Protocol):
    """Where the blocks lie."""

    reads: bool
    """whether reading keeps a thread of the host busy"""

    def put(self, block: StreamedBlock) -> None:
        """Takes a copy of a block that is complete on the device."""

    def read(self, index: int, buffer: torch.Tensor) -> None:
        """Fills a slot. Runs inside the queue of copies. Raises StorageError."""

    def close(self) -> None:
        """Gives back what it holds."""


@dataclass
class _Slot:
    buffer: torch.Tensor
    block: int | None = None
    handle: Any = None
    """of the copy into it"""
    bound: bool = False
    """whether the copy is done and the block's modules use it"""
    used: Any = None
    """event: the last computation with what it held"""


@dataclass
class Moved:
    """What was copied since the beginning."""

    blocks: int = 0
    num_bytes: int = 0
    unforeseen: int = 0
    """blocks that were asked for before they had been fetched ahead"""
    order: list[int] | None = field(default=None, repr=False)
    """each block in the order of use, where someone wants to know"""


class BlockStream:
    """Brings blocks to the device."""

    what = "blocks"

    def __init__(self, blocks: list[StreamedBlock], source: BlockSource, copies: Copies, device: torch.device):
        self.blocks, self.source, self.copies, self.device = blocks, source, copies, device
        self.moved = Moved()
        self.slot_bytes = max(block.size for block in blocks)
        self._slots = [_Slot(torch.empty(self.slot_bytes, dtype=torch.uint8, device=device)) for _ in range(SLOTS)]
        self._current: _Slot | None = None
        self._past: tuple[tuple[bool, int], ...] = ()
        self._after: dict[tuple[tuple[bool, int], ...], int] = {}

    def need(self, index: int) -> None:
        """The block is on the device, and bound to its modules, for all computation that is asked for from here on."""
        if self._current is None or self._current.block != index:
            with _disable_current_modes():  # selective checkpointing counts operations, and these are not the model's
                self._move_to(index)

    def _move_to(self, index: int) -> None:
        current = self._current
        if current is not None:
            current.used = self.copies.computed()
            self._after[self._past] = index
        slot = next((s for s in self._slots if s.block == index), None)
        if slot is None:
            self.moved.unforeseen += 1
            slot = self._bring(index)
        self._arrive(slot)
        self._current = slot
        in_backward = torch._C._current_graph_task_id() != -1  # as torch.utils.checkpoint asks
        self._past = (*self._past, (in_backward, index))[-HISTORY:]
        if self.moved.order is not None:
            self.moved.order.append(index)
        upcoming = self._expected()
        if all(s.block != upcoming for s in self._slots):
            self._bring(upcoming)

    @property
    def moved_bytes(self) -> int:
        return self.moved.num_bytes

    def close(self) -> None:
        self.copies.close()
        self.source.close()

    def _bring(self, index: int) -> _Slot:
        """Starts copying a block into the slot that is not in use."""
        slot = next(s for s in self._slots if s is not self._current)
        if slot.bound:
            self.blocks[slot.block].unbind(self.device)
        slot.block, slot.bound = index, False
        slot.handle = self.copies.enqueue(partial(self.source.read, index, slot.buffer), after=slot.used)
        self.moved.blocks += 1
        self.moved.num_bytes += self.blocks[index].size
        return slot

    def _arrive(self, slot: _Slot) -> None:
        """Waits for a slot's copy, the first time it is used."""
        if slot.bound:
            return
        index, slot.block = slot.block, None  # a copy that fails leaves nothing
        self.copies.wait(slot.handle)
        self.blocks[index].bind(slot.buffer)
        slot.block, slot.bound = index, True

    def _expected(self) -> int:
        """The block that will be used next: as it was after the same past, else the neighbour ahead."""
        if self._past in self._after:
            return self._after[self._past]
        in_backward, index = self._past[-1]
        return min(max(index + (-1 if in_backward else 1), 0), len(self.blocks) - 1)


def install(stream: BlockStream) -> None:
    """Takes the blocks' weights away from their modules, which fetch them from here on."""
    for block in stream.blocks:
        for linear in block.linears:
            linear.fetch = partial(stream.need, block.index)
            if not isinstance(linear, Stack4bit):  # those are asked for by the experts that they are
                linear.forward = _forward(linear)
        block.unbind(stream.device)


def _forward(linear: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    own, projection = linear.forward, Projection(linear, adapted=False)

    def forward(x: torch.Tensor) -> torch.Tensor:
        linear.fetch()
        if not (torch.is_grad_enabled() and x.requires_grad):
            return own(x)
        return _Frozen.apply(x, own, projection)

    return forward


class _Frozen(Function):
    """A frozen linear layer that saves no weight: y = x W^T + b, and g W in backward with the weight fetched again."""

    @staticmethod
    def forward(ctx, x, own, projection):
        ctx.projection, ctx.x_dtype = projection, x.dtype
        return own(x)

    @staticmethod
    def backward(ctx, grad):
        compute = getattr(ctx.projection.base, "compute_dtype", None) or grad.dtype
        with torch.autocast(grad.device.type, enabled=False):
            grad_x = torch.matmul(grad.to(compute), ctx.projection.weight(compute))
        return grad_x.to(ctx.x_dtype), None, None
