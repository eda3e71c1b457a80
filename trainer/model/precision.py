"""Options of the group `precision`: the dtype of unquantised base weights and of the arithmetic.

Trainable parameters are fp32 masters whatever is chosen here; autocast casts them inside the operation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.errors import ConfigError
from trainer.registry import Section, option

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
class Precision(Section, ABC):
    """Base and compute dtype."""

    @abstractmethod
    def build(self, device: torch.device) -> Dtypes:
        """The dtypes on this device; raises ConfigError where the device cannot do it."""

    def planned(self, device_type: str) -> Dtypes:
        """The dtypes on such a device that is not here."""
        import torch

        return Dtypes(self.build(torch.device("cpu")).compute, device_type)


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
                f"precision=bf16: {torch.cuda.get_device_name(device)} has no bf16 arithmetic. Use precision=fp16."
            )
        return Dtypes(torch.bfloat16, device.type)


@option("precision", "fp16")
@dataclass
class FP16(Precision):
    """float16 weights and arithmetic under autocast; the loop scales the loss (training/loss_scaling.py)."""

    def build(self, device):
        import torch

        return Dtypes(torch.float16, device.type)


@option("precision", "auto")
@dataclass
class Auto(Precision):
    """bf16 where the device has instructions for it; elsewhere fp16 on a card and fp32 on a CPU: the same answer at
    every start of a run."""

    def build(self, device):
        import torch

        if device.type == "cpu":
            return Dtypes(torch.bfloat16 if cpu_has_bf16() else torch.float32, device.type)
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
        return Dtypes(torch.bfloat16 if supported else torch.float16, device.type)

    def planned(self, device_type):
        import torch

        return Dtypes(torch.bfloat16, device_type)


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies matrices in bf16 (AVX512-BF16, AMX, and Arm's). Without, bf16 is 6-10 times slower
    than fp32. It is asked, not timed: a time on a busy machine comes out differently at a resume."""
    import torch

    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(there for name, there in found.items() if name.endswith("bf16"))
