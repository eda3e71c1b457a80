"""Whether there can be a GPU, asked without importing torch, so that a GPU recipe on a CPU machine fails at once."""

from __future__ import annotations

import ctypes
import sys
from enum import Enum
from pathlib import Path

from trainer.errors import ConfigError


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


def _driver_present() -> bool:
    if not sys.platform.startswith("linux"):
        return True  # torch decides
    try:
        ctypes.CDLL("libcuda.so.1")  # what CUDA itself loads
    except OSError:
        return Path("/dev/kfd").exists()  # AMD's
    return True
