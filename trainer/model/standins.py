"""Quantised layers without their weights: what a plan traces in their place, on the meta device or on fake tensors.

bitsandbytes' own parameters quantise when they reach a device and cannot be built without values, so a stand-in holds
tensors of the same shapes and calls the same matrix product. It is of the library's class, by which PEFT picks its
own layers, which are the code that runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes as bnb
import torch

from trainer.model.int8 import frozen_forward

BLOCK, SCALE_BLOCK = 64, 256
"""Weights that share a scale; scales that share a second one (Dettmers et al. 2023, section 3)."""
SAMPLE = 256
"""Rows and columns of a layer that is quantised to see what one holds, where that cannot be done without values."""

Convert = Callable[[torch.Tensor], torch.Tensor]
Quantise = Callable[[torch.nn.Linear, torch.dtype, torch.device], torch.nn.Module]
"""A linear layer's quantised twin, on a device."""


class Standin(ABC):
    """A quantised layer's shape. What it holds beside its parameters and buffers is here."""

    in_features: int
    out_features: int
    weight: torch.nn.Parameter
    """the packed codes"""

    @abstractmethod
    def scales(self) -> list[torch.Tensor]:
        """Tensors beside the packed codes that are neither parameters nor buffers."""

    @abstractmethod
    def block_scales(self) -> list[torch.Tensor]:
        """Those of them that grow with the weight and are streamed with it."""

    @abstractmethod
    def convert(self, function: Convert) -> None:
        """Replaces every one of them; parameters have been replaced before."""

    @abstractmethod
    def dequantize(self) -> torch.Tensor:
        """The weight (out, in)."""

    @property
    def W_q(self) -> torch.Tensor:
        """By this name PEFT knows a layer that it asks for its weight with `dequantize` (it knows bitsandbytes' own by
        the class of the weight, which no fake tensor can have)."""
        return self.weight


class Standin4bit(Standin, bnb.nn.Linear4bit):
    """The shape of a Linear4bit: packed codes, and a scale for each block."""

    def __init__(self, linear: torch.nn.Linear, code: str, double_quant: bool, compute_dtype: torch.dtype):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        numel = linear.in_features * linear.out_features
        self.weight = torch.nn.Parameter(_meta((numel + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.weight.compress_statistics, self.weight.quant_type = double_quant, code
        self.bias = linear.bias
        self.compute_dtype = compute_dtype
        blocks = -(-numel // BLOCK)
        offset = state2 = None
        absmax = _meta(blocks)
        if double_quant:
            absmax, offset = _meta(blocks, dtype=torch.uint8), _meta()
            state2 = bnb.functional.QuantState(
                absmax=_meta(-(-blocks // SCALE_BLOCK)), blocksize=SCALE_BLOCK, code=_meta(256), dtype=torch.float32
            )
        self.quant_state = bnb.functional.QuantState(
            absmax=absmax,
            shape=torch.Size((linear.out_features, linear.in_features)),
            code=_meta(16),
            blocksize=BLOCK,
            quant_type=code,
            dtype=compute_dtype,
            offset=offset,
            state2=state2,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return bnb.matmul_4bit(x, self.weight, bias=bias, quant_state=self.quant_state).to(dtype)

    def scales(self):
        state = self.quant_state
        found = [state.absmax, state.code]
        if state.state2 is not None:
            found += [state.offset, state.state2.absmax]  # its code table is one for all layers
        return found

    def block_scales(self):
        state = self.quant_state
        return [state.absmax] if state.state2 is None else [state.absmax, state.state2.absmax]

    def convert(self, function):
        state = self.quant_state
        for holder in (state, state.state2):
            if holder is not None:
                holder.absmax, holder.code = function(holder.absmax), function(holder.code)
        if state.offset is not None:
            state.offset = function(state.offset)

    def dequantize(self):
        return bnb.functional.dequantize_4bit(self.weight, self.quant_state)


class Standin8bit(Standin, bnb.nn.Linear8bitLt):
    """The shape of a Linear8bitLt: int8 weights and a scale a row; outlier columns, which only data shows, are none."""

    index = None

    def __init__(self, linear: torch.nn.Linear):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.nn.Parameter(_meta(*linear.weight.shape, dtype=torch.int8), requires_grad=False)
        self.bias = linear.bias
        self.state = bnb.MatmulLtState()
        self.state.has_fp16_weights, self.state.threshold = False, 0.0
        self.state.CB, self.state.SCB = self.weight, _meta(linear.out_features)
        frozen_forward(self)  # as the run's own layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.is_training = True
        return bnb.matmul(x, self.weight, bias=self.bias, state=self.state)

    def scales(self):
        return [self.state.SCB]

    def block_scales(self):
        return self.scales()

    def convert(self, function):
        self.state.CB, self.state.SCB = self.weight, function(self.state.SCB)

    def dequantize(self):
        return bnb.functional.int8_vectorwise_dequant(self.weight, self.state.SCB)


class StandinOfSize(Standin, torch.nn.Linear):
    """As many bytes as a sample of the real layer has a weight, and a weight of the compute dtype made in forward."""

    def __init__(self, linear: torch.nn.Linear, bytes_a_weight: float, compute_dtype: torch.dtype):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        size = round(bytes_a_weight * linear.weight.numel())
        self.weight = torch.nn.Parameter(_meta(size, dtype=torch.uint8), requires_grad=False)
        self.bias = linear.bias
        self.compute_dtype = compute_dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.dequantize().to(x.dtype), self.bias)

    def scales(self):
        return []

    def block_scales(self):
        return []

    def convert(self, function):
        pass

    def dequantize(self):
        return self.weight.new_empty((self.out_features, self.in_features), dtype=self.compute_dtype)


def without_values(quantise: Quantise, linear: torch.nn.Linear, compute_dtype: torch.dtype) -> torch.nn.Module:
    """The quantised twin of a layer on the meta device, or one of its size."""
    try:
        return quantise(linear, compute_dtype, torch.device("meta"))
    except Exception:  # whatever code that reads values meets where there are none
        return StandinOfSize(linear, _bytes_a_weight(quantise, compute_dtype), compute_dtype)


def _bytes_a_weight(quantise: Quantise, compute_dtype: torch.dtype) -> float:
    """Bytes that a real layer holds for each weight once it is quantised."""
    with torch.device("cpu"):
        sample = torch.nn.Linear(SAMPLE, SAMPLE, bias=False, device="meta", dtype=compute_dtype)
        sample.to_empty(device="cpu")
        values = torch.linspace(-1, 1, SAMPLE**2, dtype=compute_dtype).view(SAMPLE, SAMPLE)
        sample.weight = torch.nn.Parameter(values, requires_grad=False)
        quantised = quantise(sample, compute_dtype, torch.device("cpu"))
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(quantised, set())}
    return sum(storages.values()) / SAMPLE**2


def _tensors(holder: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Tensors that an object holds, in whatever it holds."""
    if id(holder) in seen:
        return
    seen.add(id(holder))
    if isinstance(holder, torch.Tensor):
        yield holder
    if isinstance(holder, dict):
        held = list(holder.values())
    elif isinstance(holder, (list, tuple)):
        held = list(holder)
    else:
        held = list(getattr(holder, "__dict__", {}).values())
    for item in held:
        yield from _tensors(item, seen)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
