"""Bytes of live tensor storages at every operation: a dispatch mode with weak references on storages.

Works on fake and on real tensors. Operations that hide their temporaries behind one call are opened here: they are
run as the sequence of operations that they are made of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trainer.model.attention import flash_backward_bytes

OPAQUE = ("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",)
"""torch.library operations written in Python: their function can be run on fake tensors."""


ROUNDING = {"cuda": 512, "cpu": 1}
"""Bytes to which the device's allocator rounds a tensor (CUDACachingAllocator.cpp: kMinBlockSize)."""


def rounded(device_type: str) -> Callable[[torch.Tensor], int]:
    """Bytes that the device's allocator takes for a tensor's storage."""
    step = ROUNDING[device_type]

    def size(tensor: torch.Tensor) -> int:
        return -(-tensor.numel() * tensor.element_size() // step) * step

    return size


def _gemm_4bit(
    a, b, shape, absmax, blocksize, quant_type, bias=None, absmax_8bit=None, absmax_code=None, absmax_offset=None
):
    """bitsandbytes' 4-bit product at training sizes: dequantise the scales, then the weight, then multiply."""
    ops = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        absmax = ops.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, 256, torch.float32)
        absmax = absmax + absmax_offset
    weight = ops.dequantize_4bit.default(b, absmax, blocksize, quant_type, shape, a.dtype)
    return torch.nn.functional.linear(a, weight, bias)


def _varlen_backward(grad_out, query, key, value, out, lse, cu_seq_q, *_):
    """Flash attention's backward: its three gradients, and its scratch while it runs."""
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    torch.empty(flash_backward_bytes(query.shape, key.shape, len(cu_seq_q) - 1, query.itemsize), dtype=torch.uint8)
    return gradients


class LiveStorages(TorchDispatchMode):
    """Counts storages from their first sight to their end."""

    def __init__(self, rounding: int):
        super().__init__()
        self.rounding = rounding
        self.live = 0
        """bytes now"""
        self.peak = 0
        """most bytes since the last mark"""
        self._seen: dict[int, weakref.ref] = {}

    def hold(self, *tensors: Any) -> None:
        """Counts tensors that were there before, and whatever else is first seen."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)

    def mark(self) -> tuple[int, int]:
        """(live now, peak since the last mark); the next interval begins here."""
        reading = (self.live, self.peak)
        self.peak = self.live
        return reading

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = -(-storage.nbytes() // self.rounding) * self.rounding

        def gone(_, key=key, size=size):
            self.live -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        opened = _opened(function)
        if opened is not None:
            with self:
                result = opened(*args, **kwargs)
        else:
            result = function(*args, **kwargs)
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result


@cache
def _opened(operation: Any) -> Callable | None:
    """The Python function that an operation stands for. Asked when it is met: torch registers some on first use."""
    name = operation._schema.name
    if name == "bitsandbytes::gemm_4bit":
        return _gemm_4bit
    if name == "torch_attn::_varlen_attn_backward":
        return _varlen_backward
    if name in ("bitsandbytes::optimizer_update_32bit", "bitsandbytes::optimizer_update_8bit_blockwise"):
        from bitsandbytes.backends.cpu import ops  # the kernels of the CPU, written in torch's own operations

        return getattr(ops, f"_{name.rpartition(':')[2]}_cpu")
    return OPDEFS[name]._init_fn if name in OPAQUE else None
