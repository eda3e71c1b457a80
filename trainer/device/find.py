"""Which device a run has. Whether there can be a GPU is asked without torch: a GPU recipe on a CPU fails at once."""

from __future__ import annotations

import platform
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.device.driver import Driver, find_driver, mend, num_cards
from trainer.errors import ConfigError
from trainer.units import GIB

if TYPE_CHECKING:
    import torch


class Device(Enum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


ON_THE_CPU = (
    "Run the same job slowly on the CPU with device=cpu (add model.weights=random to try it without the weights), or a "
    "small one with recipe=quickstart."
)


def check_device(device: Device) -> None:
    """Raises ConfigError where a GPU is asked for and no driver is there. A driver without a GPU is torch's to find."""
    if device is Device.cuda and not _driver_present():
        raise ConfigError(no_gpu(None, None))


def no_gpu(driver: Driver | None, built_for: str | None) -> str:
    """The error of device=cuda where torch, built for this CUDA, sees no card."""
    if driver is None:
        return f"device=cuda: this machine has no GPU that torch can use. {ON_THE_CPU}"
    return f"device=cuda: {_unusable(driver, built_for)}. {ON_THE_CPU}"


def unused_card(built_for: str | None) -> str | None:
    """What device=auto says where it takes the CPU although a card is there; None where none is."""
    driver = find_driver()
    if driver is None or num_cards() == 0:
        return None
    return f"device=auto takes the CPU although a card is there: {_unusable(driver, built_for)}"


def _unusable(driver: Driver, built_for: str | None) -> str:
    torch = "the CPU" if built_for is None else f"CUDA {built_for}"
    return f"torch, built for {torch}, sees no GPU; {driver}: {mend(driver, built_for)}"


def find_device(device: Device) -> torch.device:
    """The device to run on. Raises ConfigError for a GPU recipe without a GPU."""
    import torch

    if device is Device.cpu or (device is Device.auto and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(no_gpu(find_driver(), torch.version.cuda))
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
    return find_driver() is not None or Path("/dev/kfd").exists()  # AMD's
