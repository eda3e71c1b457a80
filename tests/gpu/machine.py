"""The machine: what doctor says of it, what CUDA takes outside the allocator, and how fast matrices multiply."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import torch

from tests.gpu.prove import Setting, attempt
from trainer.commands.checkup import CHECKS, examine
from trainer.device.workspace import cublas_bytes
from trainer.memory.predict.planner import CUDA_CONTEXT
from trainer.model import attention
from trainer.training.throughput import matmul_flops
from trainer.units import GIB

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "hydra-core")


def results(setting: Setting) -> Iterator[dict[str, Any]]:
    device = setting.device
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    name = "cpu, dry run" if setting.dry else torch.cuda.get_device_name(device)
    yield {"device": name, **versions, "enable_gqa": attention.asks_for_grouped_heads()}
    if not setting.dry:
        yield attempt({"what": "CUDA outside the allocator"}, lambda: _context(device))
        yield attempt({"what": "cuBLAS workspaces"}, lambda: _workspaces(device))
    yield attempt({"what": "roof"}, lambda: {"tflops_bf16": matmul_flops(device, torch.bfloat16) / 1e12})
    for part, check in CHECKS.items():
        for row in examine(part, check):
            yield {"doctor": row.part, "state": row.state, "found": row.found}


def _context(device: torch.device) -> dict[str, float]:
    torch.ones(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - torch.cuda.memory_reserved(device)
    return {"gib": used / GIB, "assumed_gib": CUDA_CONTEXT / GIB}


def _workspaces(device: torch.device) -> dict[str, float]:
    """What products leave in the allocator."""
    x = torch.randn(256, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    before = torch.cuda.memory_allocated(device)
    (x @ x).sum().backward()
    x.grad = None
    held = torch.cuda.memory_allocated(device) - before
    return {"mib": held / 2**20, "by_source_mib": cublas_bytes() / 2**20}
