"""What a run holds before its first step and after every step: the closed form, by walking the meta-device model.

Bytes by kind of weight, the adapter, its gradients and the optimizer's state. No weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.memory.optimizer import OptimizerMemory
from trainer.memory.standins import Outline, Standin4bit, Standin8bit
from trainer.memory.tracker import rounded

WEIGHTS = ("quantised weights", "absmax", "linear weights", "embeddings", "head", "norms and others")


@dataclass(frozen=True)
class Static:
    """Bytes by line, in the order they are shown. Empty lines are left out."""

    weights: dict[str, int]
    adapter: int
    gradients: int
    optimizer: int
    base_parameters: int
    """numbers that the base's weights stand for"""
    trainable: int
    """numbers that train"""

    def lines(self) -> dict[str, int]:
        found = {**self.weights, "adapter": self.adapter}
        found |= {"gradients": self.gradients, "optimizer state": self.optimizer}
        return {name: size for name, size in found.items() if size}

    @property
    def total(self) -> int:
        return sum(self.lines().values())

    @property
    def before_first_step(self) -> int:
        """Weights and adapter: what is held when training starts."""
        return sum(self.weights.values()) + self.adapter


def count_static(model: Outline, optimizer: OptimizerMemory, device_type: str) -> Static:
    """Walks the model once; a tied weight counts once."""
    size = rounded(device_type)
    weights = dict.fromkeys(WEIGHTS, 0)
    adapter = base_parameters = 0
    base_ids = _base_ids(model)
    tables = {id(model.base.get_input_embeddings().weight): "embeddings"}
    head = model.base.get_output_embeddings()
    if head is not None:
        tables.setdefault(id(head.weight), "head")
    seen: set[int] = set()
    for module in model.adapted.modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if id(tensor) not in base_ids:
                adapter += size(tensor)
                continue
            kind = tables.get(id(tensor)) or _kind(module, tensor)
            weights[kind] += size(tensor)
            if isinstance(tensor, torch.nn.Parameter):
                base_parameters += _numbers(module, tensor)
        if isinstance(module, (Standin4bit, Standin8bit)):
            weights["absmax"] += sum(size(tensor) for tensor in module.scales())
    trainable = model.trainable()
    return Static(
        weights=weights,
        adapter=adapter,
        gradients=sum(size(p) for p in trainable),
        optimizer=optimizer.state,
        base_parameters=base_parameters,
        trainable=sum(p.numel() for p in trainable),
    )


def _base_ids(model: Outline) -> set[int]:
    """The base's own tensors: all of them without an adapter, else those that are not the adapter's."""
    if model.adapted is model.base:
        return {id(t) for t in [*model.base.parameters(), *model.base.buffers()]}
    return {id(t) for t in [*model.adapted.parameters(), *model.adapted.buffers()] if not t.requires_grad}


def _kind(module: torch.nn.Module, tensor: torch.Tensor) -> str:
    if isinstance(module, (Standin4bit, Standin8bit)):
        return "quantised weights" if tensor is module.weight else "norms and others"
    if tensor.ndim >= 2 and isinstance(tensor, torch.nn.Parameter):
        return "linear weights"
    return "norms and others"


def _numbers(module: torch.nn.Module, tensor: torch.Tensor) -> int:
    if isinstance(module, Standin4bit) and tensor is module.weight:
        return module.in_features * module.out_features
    return tensor.numel()
