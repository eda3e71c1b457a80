"""What a run holds before its first step and after every step: the closed form, by walking the meta-device model.

Bytes by kind of weight, the adapter, its gradients and the optimizer's state. No weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.memory.predict.outline import Outline
from trainer.model.experts import stacks
from trainer.model.live_storages import rounded
from trainer.model.new_tokens import table_of
from trainer.model.offload.block_stream import SLOTS, aligned
from trainer.model.standins import Standin
from trainer.training.optimizer_memory import OptimizerMemory

WEIGHTS = (
    "quantised weights",
    "scales of quantised weights",
    "linear weights",
    "embeddings",
    "head",
    "norms and others",
)


@dataclass(frozen=True)
class Static:
    """Bytes by line, in the order they are shown. Empty lines are left out."""

    weights: dict[str, int]
    slots: int
    """places on the device for streamed blocks"""
    streamed: int
    """weights that lie in host memory or on disk, and on the device in slots only: in no line"""
    in_flight: int
    """inputs of blocks on their way to host memory or back"""
    host: int
    """what was moved to host memory, where that is the device's own"""
    libraries: int
    """workspace of libraries, which stays once it was asked for"""
    adapter: int
    gradients: int
    optimizer: int
    base_parameters: int
    """numbers that the base's weights stand for"""
    trainable: int
    """numbers that train"""

    def lines(self) -> dict[str, int]:
        found = {**self.weights, "slots of streamed blocks": self.slots, "adapter": self.adapter}
        found |= {"block inputs in flight": self.in_flight, "moved to host memory, which is the same": self.host}
        found |= {"gradients": self.gradients, "optimizer state": self.optimizer, "library workspace": self.libraries}
        return {name: size for name, size in found.items() if size}

    @property
    def total(self) -> int:
        return sum(self.lines().values())


def count_static(model: Outline, optimizer: OptimizerMemory, device_type: str, streams: bool) -> Static:
    """Walks the model once; a tied weight counts once. With `streams`, its blocks are elsewhere."""
    size = rounded(device_type)
    blocks = [_streamed(block) for block in model.layers()] if streams else []
    away = {id(tensor) for block in blocks for tensor in block}
    weights = dict.fromkeys(WEIGHTS, 0)
    adapter = base_parameters = 0
    base_ids = _base_ids(model)
    tables = {id(table_of(model.base.get_input_embeddings())): "embeddings"}
    head = model.base.get_output_embeddings()
    if head is not None:
        tables.setdefault(id(table_of(head)), "head")
    seen: set[int] = set()
    for module in model.adapted.modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if id(tensor) not in base_ids:
                adapter += size(tensor)
                continue
            if id(tensor) not in away:
                weights[tables.get(id(tensor)) or _kind(model, module, tensor)] += size(tensor)
            if isinstance(tensor, torch.nn.Parameter) or module in model.quantised:
                base_parameters += _numbers(model, module, tensor)
        if isinstance(module, Standin):
            weights["scales of quantised weights"] += sum(
                size(tensor) for tensor in module.scales() if id(tensor) not in away
            )
    trainable = model.trainable()
    return Static(
        weights=weights,
        slots=SLOTS * max((sum(aligned(tensor.nbytes) for tensor in block) for block in blocks), default=0),
        streamed=sum(tensor.nbytes for block in blocks for tensor in block),
        in_flight=0,
        host=0,
        libraries=0,
        adapter=adapter,
        gradients=sum(size(p) for p in trainable),
        optimizer=optimizer.state,
        base_parameters=base_parameters,
        trainable=sum(p.numel() for p in trainable),
    )


def _streamed(block: torch.nn.Module) -> list[torch.Tensor]:
    """What trainer.model.offload takes away of a block: its frozen linear weights, and the scales of 4-bit ones."""
    found = []
    for module in block.modules():
        if isinstance(module, torch.nn.Linear) and not module.weight.requires_grad:
            found.append(module.weight)
            if isinstance(module, Standin):
                found += module.block_scales()
    for stack in stacks(block).values():
        found += [stack.weight, *(getattr(stack, name) for name in stack.scales())]
    return found


def _base_ids(model: Outline) -> set[int]:
    """The base's own tensors: all of them without an adapter, else those that are not the adapter's."""
    if model.adapted is model.base:
        return {id(t) for t in [*model.base.parameters(), *model.base.buffers()]}
    return {id(t) for t in [*model.adapted.parameters(), *model.adapted.buffers()] if not t.requires_grad}


def _kind(model: Outline, module: torch.nn.Module, tensor: torch.Tensor) -> str:
    if module in model.quantised:
        if tensor is _codes(module):
            return "quantised weights"
        return "norms and others" if tensor is getattr(module, "bias", None) else "scales of quantised weights"
    if tensor.ndim >= 2 and isinstance(tensor, torch.nn.Parameter):
        return "linear weights"
    return "norms and others"


def _numbers(model: Outline, module: torch.nn.Module, tensor: torch.Tensor) -> int:
    if module not in model.quantised or tensor is getattr(module, "bias", None):
        return tensor.numel()
    return model.quantised[module] if tensor is _codes(module) else 0


def _codes(module: torch.nn.Module) -> torch.Tensor:
    """The largest tensor of a quantised layer: its packed weights."""
    return max([*module._parameters.values(), *module._buffers.values()], key=lambda t: 0 if t is None else t.nbytes)
