"""Bytes of optimizer state, and of what a step needs beside it, from one step of the real optimizer on fake tensors.

A parameter of each shape is enough: state adds up over parameters. Whether the workspace of a step is that of one
parameter at a time or of all at once is seen by stepping with one and with two of each shape.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.memory.predict.live_storages import Tracker, rounded

if TYPE_CHECKING:
    from trainer.training.optimizers import Optim

BNB_CPU_COPIES = 5
"""fp32 copies of one parameter that bitsandbytes' CPU step makes: two moments, the scaled gradient, and the
denominator with its root (bitsandbytes/backends/cpu/ops.py). Its CUDA kernels work in place."""


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes."""

    state: int
    workspace: int
    """what a step needs beside weights, gradients and state"""


def optimizer_memory(optim: Optim, parameters: list[torch.nn.Parameter], device_type: str) -> OptimizerMemory:
    """State and workspace of an optimizer over these (meta) parameters."""
    counts = Counter(tuple(p.shape) for p in parameters)
    if not counts:
        return OptimizerMemory(0, 0)
    state, one = _trial(optim, list(counts), device_type)
    _, two = _trial(optim, [shape for shape in counts for _ in range(2)], device_type)
    total = sum(state[shape] * number for shape, number in counts.items())
    workspace = one
    if two > 1.5 * one:  # all parameters at once: it grows with their number
        numbers = sum(torch.Size(shape).numel() * number for shape, number in counts.items())
        workspace = one * numbers // sum(torch.Size(shape).numel() for shape in counts)
    return OptimizerMemory(total, workspace)


def _trial(optim: Optim, shapes: list[tuple[int, ...]], device_type: str) -> tuple[dict[tuple[int, ...], int], int]:
    """State bytes of a parameter of each shape, and the most that a step holds beside what was there."""
    size = rounded(device_type)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with fakes:
        parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in shapes]
    optimizer = optim.build(parameters)  # not under fakes: bitsandbytes reads the values of its code tables
    with fakes:
        workspace = _bitsandbytes_step(optimizer, device_type) if hasattr(optimizer, "init_state") else None
        if workspace is None:
            workspace = _step(optimizer, parameters, device_type)
        state = {}
        for parameter in parameters:
            tensors = {
                id(value): value
                for key, value in optimizer.state[parameter].items()
                if isinstance(value, torch.Tensor) and not key.startswith("qmap") and value.ndim
            }
            state[tuple(parameter.shape)] = sum(size(value) for value in tensors.values())
    return state, workspace


def _bitsandbytes_step(optimizer: torch.optim.Optimizer, device_type: str) -> int:
    """Makes the state of a bitsandbytes optimizer, whose update is one opaque call; returns its workspace."""
    optimizer.name2qmap = {name: torch.empty(256) for name in ("dynamic", "udynamic")}  # else made by reading values
    optimizer.is_paged = False  # paged memory holds the same bytes, and cannot be faked
    largest = 0
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, group_index, index)
            largest = max(largest, parameter.numel())
    return 0 if device_type == "cuda" else BNB_CPU_COPIES * 4 * largest


def _step(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], device_type: str) -> int:
    """A second step of a torch optimizer (the first makes the state); on CUDA torch works on all at once."""
    for group in optimizer.param_groups:
        if device_type == "cuda" and group.get("foreach", 0) is None:
            group["foreach"] = True
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    tracker = Tracker(rounding=1)
    for parameter in parameters:
        tracker.hold(parameter, parameter.grad, *optimizer.state[parameter].values())
    before = tracker.live
    with tracker:
        optimizer.step()
    return tracker.peak - before
