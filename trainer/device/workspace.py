"""What libraries of matrix products keep beside tensors, for as long as the process lives."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from trainer.device.malloc import mallinfo2

HANDLES = 2
"""Of cuBLAS: the thread's that runs forward, and the one's that runs backward."""
MOST = 2**32
"""Multiplications of a product that is tried on a CPU: tenths of a second. Buffers are for blocks of a product, so
fewer rows need little less."""


@dataclass(frozen=True, order=True)
class Product:
    """A linear layer by its sizes."""

    rows: int
    """of its input"""
    inputs: int
    outputs: int
    trained: bool
    """whether its weight's gradient is made"""
    is_head: bool
    """whether it makes logits"""


def cublas_bytes() -> int:
    """Torch gives each cuBLAS handle a workspace from its allocator: 32 MiB on compute capability 9, 8.125 MiB
    elsewhere and where no card is there, or what CUBLAS_WORKSPACE_CONFIG says (aten/src/ATen/cuda/CublasHandlePool.cpp,
    parseChosenWorkspaceSize)."""
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return HANDLES * 1024 * sum(int(size) * int(number) for size, number in pairs)
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return HANDLES * 1024 * (32 * 1024 if hopper else 4096 * 2 + 16 * 8)


PRIMITIVES = 64
"""Compiled products that oneDNN keeps (`trainer.__main__`)."""

_measured: dict[tuple[frozenset[Product], torch.dtype, int], int] = {}
"""A trial by what was tried: what it leaves stays in the process."""


@dataclass(frozen=True)
class Workspace:
    """Bytes on a CPU."""

    held: int
    """left by the trial of the products"""
    needed: int
    """in a run"""


def products_workspace(products: Iterable[Product], dtype: torch.dtype, lengths: int, has_bf16: bool) -> Workspace:
    """Of such products, in micro-batches of so many `lengths`.

    In fp32 MKL's buffers, which grow with the largest product. In bf16 oneDNN's compiled primitives, one a product and
    length; and where the CPU has no instructions for bf16, the sums of a product in fp32 while it is made.
    """
    wanted = frozenset(products)
    key = wanted, dtype, torch.get_num_threads()
    if key not in _measured:
        before = _held()
        for product in sorted(wanted):
            _multiply(product, dtype)
        _measured[key] = max(0, _held() - before)
    held = needed = _measured[key]
    if dtype == torch.bfloat16:
        primitives = sum(3 if product.trained else 2 for product in wanted)
        needed = held * max(1, min(lengths * primitives, PRIMITIVES)) // primitives
        if not has_bf16:
            needed += 4 * max(p.rows * max(p.inputs, p.outputs) for p in wanted if not p.is_head)
    return Workspace(held, needed)


def _multiply(product: Product, dtype: torch.dtype) -> None:
    """Forward, and backward into the input (and the weight)."""
    rows = max(1, min(product.rows, MOST // (product.inputs * product.outputs)))
    weight = torch.ones(product.outputs, product.inputs, dtype=dtype)
    hidden = torch.ones(rows, product.inputs, dtype=dtype)
    out = torch.nn.functional.linear(hidden, weight)
    torch.mm(out, weight)
    if product.trained:
        torch.mm(out.t(), hidden)


def _held() -> int:
    read = mallinfo2()
    if read is None:
        return 0
    gc.collect()
    info = read()
    return info.uordblks + info.hblkhd
