"""train.deterministic: the same bits from the same run, on a GPU too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CUBLAS_WORKSPACE = ":4096:8"
"""Two streams' products must not share scratch space (cuBLAS, "Results reproducibility"): 8 buffers of 4 MiB."""


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Inside, torch takes kernels whose sums have one order, and refuses operations that have none.

    What it changes on a card: FlashAttention's backward adds dq in turn where it used atomics, with scratch space for
    it; gathered rows' gradients are sorted before they are added; cuBLAS keeps 32 MiB. Enter it before the first
    product on the card: cuBLAS reads its variable once.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a pass over each new tensor, against bugs only
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
