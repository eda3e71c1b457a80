"""Bytes of optimizer state, and of what a step needs beside it, from steps of the real optimizer.

Traced on fake tensors of the parameters' own shapes where that works. Some steps read values, which fakes have none
of: those are taken on small real tensors, and a size is the plane through them. A parameter of each shape is enough:
state adds up over parameters. Whether the workspace is that of one parameter at a time or of all at once is seen by
stepping with one and with two of each shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.model.live_storages import LiveStorages, rounded
from trainer.training.optimizer_state import flat

SMALL = 2**16
"""Numbers in a parameter that is stepped on real values; a larger one is measured by smaller ones."""

Build = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
Shape = tuple[int, ...]
Sizes = tuple[int, int]
"""Bytes of state, and of the workspace."""


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes."""

    state: int
    workspace: int
    """what a step needs beside weights, gradients and state"""


def measured(build: Build, parameters: Iterable[torch.nn.Parameter], device_type: str) -> OptimizerMemory:
    """State and workspace of an optimizer over these (meta) parameters."""
    counts = Counter(tuple(p.shape) for p in parameters)
    if not counts:
        return OptimizerMemory(0, 0)
    try:
        state, workspace = _on_fakes(build, counts, device_type)
    except Exception:  # whatever an optimizer that reads values meets where there are none
        state, workspace = _on_values(build, counts, device_type)
    return OptimizerMemory(sum(state[shape] * number for shape, number in counts.items()), workspace)


def _on_fakes(build: Build, counts: Counter[Shape], device_type: str) -> tuple[dict[Shape, int], int]:
    """State bytes of a parameter of each shape, and the workspace, from fake tensors of full size."""
    state, one = _fake_trial(build, list(counts), device_type)
    _, two = _fake_trial(build, [shape for shape in counts for _ in range(2)], device_type)
    if two > 1.5 * one:  # all parameters at once: it grows with their number
        numbers = sum(prod(shape) * number for shape, number in counts.items())
        return state, one * numbers // sum(prod(shape) for shape in counts)
    return state, one


def _fake_trial(build: Build, shapes: list[Shape], device_type: str) -> tuple[dict[Shape, int], int]:
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with fakes:
        parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in shapes]
    optimizer = build(parameters)  # not under fakes: bitsandbytes reads the values of its code tables
    opaque = hasattr(optimizer, "init_state")  # bitsandbytes: its update is one call, which fakes cannot follow
    with fakes:
        if opaque:
            _bitsandbytes_state(optimizer)
        else:
            workspace = _second_step(optimizer, parameters, device_type)
        state = {tuple(p.shape): _state(optimizer, p, device_type) for p in parameters}
    if opaque:  # its CUDA kernels work in place; on a CPU it takes one parameter at a time
        largest = max(parameter.numel() for parameter in parameters)
        workspace = 0 if device_type == "cuda" else _sizes(build, (SMALL,), "cpu")[1] * largest // SMALL
    return state, workspace


def _on_values(build: Build, counts: Counter[Shape], device_type: str) -> tuple[dict[Shape, int], int]:
    """The same from real tensors, a shape by itself: at full size where that is small, else by smaller ones."""
    sizes = {shape: _extrapolated(shape, lambda shape: _sizes(build, shape, device_type)) for shape in counts}
    largest = max(sizes, key=lambda shape: sizes[shape][1])
    one, two, three = (_sizes(build, _shrunk(largest), device_type, number)[1] for number in (1, 2, 3))
    workspace = sizes[largest][1]
    if three > 1.25 * two:  # all at once
        workspace = workspace * sum(prod(shape) * number for shape, number in counts.items()) // prod(largest)
    elif counts[largest] > 1 and one:  # something of one parameter is still there while the next is worked on
        workspace = workspace * two // one
    return {shape: state for shape, (state, _) in sizes.items()}, workspace


def _sizes(build: Build, shape: Shape, device_type: str, number: int = 1) -> Sizes:
    # Any values will do; random ones would move the generator that the run draws from.
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, prod(shape)).view(shape)) for _ in range(number)]
    optimizer = build(parameters)
    workspace = _second_step(optimizer, parameters, device_type)
    return _state(optimizer, parameters[0], device_type), workspace


def _shrunk(shape: Shape) -> Shape:
    """The shape with its largest dimensions halved until it is small."""
    sizes = list(shape)
    while prod(sizes) > SMALL:
        largest = sizes.index(max(sizes))
        sizes[largest] = (sizes[largest] + 1) // 2
    return tuple(sizes)


def _extrapolated(shape: Shape, sizes: Callable[[Shape], Sizes]) -> Sizes:
    """What is linear in each dimension (for a matrix in r c, r, c and 1), from two lengths of each that is shrunk."""
    small = _shrunk(shape)
    if small == shape:
        return sizes(shape)
    smaller = tuple(max(1, size // 2) if size > 1 else size for size in small)
    varied = [index for index, size in enumerate(small) if size != shape[index]]

    def at(index: int, fixed: Shape) -> tuple[float, float]:
        """The sizes with the first `index` of the varied dimensions at full length."""
        if index == 0:
            return sizes(fixed)
        dimension = varied[index - 1]
        here = at(index - 1, _with(fixed, dimension, small[dimension]))
        below = at(index - 1, _with(fixed, dimension, smaller[dimension]))
        reach = (shape[dimension] - small[dimension]) / (small[dimension] - smaller[dimension])
        return tuple(h + reach * (h - b) for h, b in zip(here, below, strict=True))

    state, workspace = at(len(varied), small)
    return round(state), round(workspace)


def _with(shape: Shape, dimension: int, size: int) -> Shape:
    return (*shape[:dimension], size, *shape[dimension + 1 :])


def _state(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, device_type: str) -> int:
    """Bytes of a parameter's state; counters, and bitsandbytes' code tables, which are one for all, left out."""
    size = rounded(device_type)
    tensors = {
        id(value): value
        for value in flat(optimizer.state[parameter]).values()
        if isinstance(value, torch.Tensor) and value.ndim
    }
    return sum(size(value) for value in tensors.values())


def _bitsandbytes_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes the state of a bitsandbytes optimizer."""
    optimizer.name2qmap = {name: torch.empty(256) for name in ("dynamic", "udynamic")}  # else made by reading values
    optimizer.is_paged = False  # paged memory holds the same bytes, and cannot be faked
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, group_index, index)


def _second_step(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], device_type: str) -> int:
    """Workspace of a second step (the first makes the state); on CUDA torch works on all parameters at once."""
    for group in optimizer.param_groups:
        if device_type == "cuda" and group.get("foreach", 0) is None:
            group["foreach"] = True
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    storages = LiveStorages(rounding=1)
    for parameter in parameters:
        storages.hold(parameter, parameter.grad, *flat(optimizer.state[parameter]).values())
    before = storages.live
    with storages:
        optimizer.step()
    return storages.peak - before
