"""Options of the group `precision`: the dtype of unquantised base weights and of the arithmetic.

Trainable parameters are fp32 masters whatever is chosen here; autocast casts them inside the operation.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.errors import ConfigError
from trainer.registry import option

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dtypes:
    """The one dtype of a run's base weights and compute. It has no second dtype hiding in embeddings or norms."""

    compute: torch.dtype
    device_type: str

    def autocast(self) -> AbstractContextManager:
        """Context for forward passes: autocast to `compute`, or nothing in fp32."""
        import torch

        if self.compute is torch.float32:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.compute)


@dataclass
class Precision(ABC):
    """Base and compute dtype."""

    @abstractmethod
    def build(self, device: torch.device) -> Dtypes:
        """The dtypes on this device; raises ConfigError where the device cannot do it."""


@option("precision", "fp32")
@dataclass
class FP32(Precision):
    """Everything in 32 bits: the reference."""

    def build(self, device):
        import torch

        return Dtypes(torch.float32, device.type)


@option("precision", "bf16")
@dataclass
class BF16(Precision):
    """bfloat16 weights and arithmetic under autocast; no loss scaling needed."""

    def build(self, device):
        import torch

        if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ConfigError(
                f"precision=bf16: {torch.cuda.get_device_name(device)} has no bf16 arithmetic. Use precision=fp32."
            )
        return Dtypes(torch.bfloat16, device.type)


@option("precision", "auto")
@dataclass
class Auto(Precision):
    """bf16 where the device computes it faster than fp32, fp32 elsewhere."""

    min_speedup: float
    """bf16 is chosen on a CPU only if its matrix product is this many times as fast as fp32's"""

    def build(self, device):
        import torch

        if device.type == "cuda":
            supported = torch.cuda.is_bf16_supported(including_emulation=False)
            return Dtypes(torch.bfloat16 if supported else torch.float32, "cuda")
        return Dtypes(torch.bfloat16 if cpu_speedup() >= self.min_speedup else torch.float32, "cpu")


def cpu_speedup() -> float:
    """How many times as fast as fp32 this CPU multiplies in bf16."""
    import torch

    return _matmul_seconds(torch.float32) / _matmul_seconds(torch.bfloat16)


def _matmul_seconds(dtype: torch.dtype) -> float:
    """CPU seconds of a 512 x 512 x 512 product, best of five: without bf16 instructions it is 6-10 times slower."""
    import torch

    a, b = torch.ones(512, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
