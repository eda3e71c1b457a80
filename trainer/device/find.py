"""Which device a run has. Whether there can be a GPU is asked without torch: a GPU recipe on a CPU fails at once."""

from __future__ import annotations

import ctypes
import platform
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.units import GIB

if TYPE_CHECKING:
    import torch


class Device(Enum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


NO_GPU = (
    "device=cuda: this machine has no GPU that torch can use. Run the same job slowly on the CPU with device=cpu (add "
    "model.weights=random to try it without the weights), or a small one with recipe=quickstart."
)


def check_device(device: Device) -> None:
    """Raises ConfigError where a GPU is asked for and no driver is there. A driver without a GPU is torch's to find."""
    if device is Device.cuda and not _driver_present():
        raise ConfigError(NO_GPU)


def find_device(device: Device) -> torch.device:
    """The device to run on. Raises ConfigError for a GPU recipe without a GPU."""
    import torch

    if device is Device.cpu or (device is Device.auto and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(NO_GPU)
    return torch.device("cuda", torch.cuda.current_device())


def hardware(device: torch.device) -> dict[str, Any]:
    """What the run's numbers were made on."""
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"device": properties.name, "memory_gib": properties.total_memory / GIB, "cuda": torch.version.cuda}
    return {"device": "cpu", "machine": platform.machine(), "threads": torch.get_num_threads()}


def _driver_present() -> bool:
    if not sys.platform.startswith("linux"):
        return True  # torch decides
    try:
        ctypes.CDLL("libcuda.so.1")  # what CUDA itself loads
    except OSError:
        return Path("/dev/kfd").exists()  # AMD's
    return True
