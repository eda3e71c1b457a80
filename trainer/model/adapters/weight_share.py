"""The weights of a base on their way to be quantised, and the low-rank part that an adapter takes out of each.

d: output features of a layer. k: input features. r: rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file, save_file

from trainer.model.adapters.targets import find_targets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainer.model.quant import Quant

Pair = tuple[torch.Tensor, torch.Tensor]
"""A (r, k) and B (d, r)."""
RoundTrip = Callable[[torch.Tensor], torch.Tensor]
"""A weight as it is after it was quantised."""


class Splits(Protocol):
    """An adapter that begins as a part of the weights."""

    r: int
    alpha: float
    target_modules: Any

    def split(self, weight: torch.Tensor, round_trip: RoundTrip) -> tuple[torch.Tensor, Pair]:
        """A weight (d, k) as what the base keeps of it, and the first A, B."""


class WeightShare:
    """Takes a low-rank part out of each target's weight as the base is loaded, and gives it to the adapter.

    All of it is a pure function of the weights: a resumed or reloaded run finds the same.
    """

    def __init__(self, adapter: Splits, round_trip: RoundTrip):
        self.adapter, self.round_trip = adapter, round_trip
        self.pairs: dict[str, Pair] = {}
        """by the layer's name in the base"""
        self._targets: set[str] | None = None

    def __call__(self, base: PreTrainedModel, name: str, module: torch.nn.Module) -> None:
        """Leaves in a module, which has its full weights, what is to be quantised."""
        if self._targets is None:
            self._targets = set(find_targets(base, self.adapter.target_modules))
        if name in self._targets:
            kept, self.pairs[name] = self.adapter.split(module.weight.float(), self.round_trip)
            module.weight.copy_(kept)

    @torch.no_grad()
    def put(self, adapted: torch.nn.Module) -> None:
        """A and B of each layer as they begin."""
        for name, (a, b) in self.pairs.items():
            layer = adapted.get_base_model().get_submodule(name)
            layer.lora_A["default"].weight.copy_(a)
            layer.lora_B["default"].weight.copy_(b)

    @contextmanager
    def as_begun(self, adapted: torch.nn.Module) -> Iterator[None]:
        """The base as it was, within what quantising lost: the adapter with the weights it began with."""
        layers = [adapted.get_base_model().get_submodule(name) for name in self.pairs]
        tensors = [part["default"].weight for layer in layers for part in (layer.lora_A, layer.lora_B)]
        now = [tensor.detach().clone() for tensor in tensors]
        self.put(adapted)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, now, strict=True):
                    tensor.copy_(value)

    def to_plain(self, folder: Path) -> None:
        """A saved adapter as a LoRA of rank 2 r for the base as it was: B A - B_0 A_0, in one product."""
        weights = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
        for name, (a, b) in self.pairs.items():
            key_a, key_b = (f"base_model.model.{name}.lora_{part}.weight" for part in "AB")
            weights[key_a] = torch.cat([weights[key_a], a.cpu()], dim=0)
            weights[key_b] = torch.cat([weights[key_b], -b.cpu()], dim=1)
        save_file(weights, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
        config = json.loads((folder / CONFIG_NAME).read_text())
        config |= {"r": 2 * self.adapter.r, "lora_alpha": 2 * self.adapter.alpha}  # their ratio scales: unchanged
        (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True))

    @torch.no_grad()
    def on_rest(self, adapted: torch.nn.Module) -> None:
        """Fits an adapter that `to_plain` made to a base without the part taken out: B A alone."""
        for name in self.pairs:
            adapted.get_base_model().get_submodule(name).lora_B["default"].weight[:, self.adapter.r :] = 0

    @contextmanager
    def whole_again(self, adapted: torch.nn.Module) -> Iterator[None]:
        """The base as it was, within what quantising lost: an adapter that `on_rest` fitted, with B_0 A_0 in it."""
        layers = {name: adapted.get_base_model().get_submodule(name) for name in self.pairs}
        now = {name: layer.lora_B["default"].weight.detach().clone() for name, layer in layers.items()}
        with torch.no_grad():
            for name, (_, b) in self.pairs.items():  # `to_plain` has put A_0 behind A
                layers[name].lora_B["default"].weight.copy_(torch.cat([torch.zeros_like(b), b], dim=1))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, layer in layers.items():
                    layer.lora_B["default"].weight.copy_(now[name])


def round_trip(quant: Quant, compute_dtype: torch.dtype, device: torch.device) -> RoundTrip:
    """What a quantisation makes of a weight, with the layer that will hold it."""
    from peft.utils.integrations import dequantize_module_weight

    def through(weight: torch.Tensor) -> torch.Tensor:  # (d, k) -> (d, k)
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = torch.nn.Parameter(weight.to(compute_dtype), requires_grad=False)
        return dequantize_module_weight(quant.linear(linear, compute_dtype, device)).float()

    return through


def low_rank(weight: torch.Tensor, rank: int, scale: float, iterations: int | None) -> Pair:
    """A and B with scale * B A = the closest matrix of this rank to a weight (d, k); singular values shared evenly.

    `iterations`: of a randomised decomposition (Halko et al. 2009, with a subspace of twice the rank); None: exact.
    """
    if iterations is None:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        right = right.T
    else:
        with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
            torch.manual_seed(0)
            left, values, right = torch.svd_lowrank(weight, min(2 * rank, *weight.shape), iterations)
    root = (values[:rank] / scale).sqrt()
    return (right[:, :rank] * root).T.contiguous(), (left[:, :rank] * root).contiguous()
