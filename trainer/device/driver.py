"""The NVIDIA driver of this machine, asked without torch: which CUDA it runs, how many cards it sees, what is amiss."""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass
from pathlib import Path

KERNEL_MODULE = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
"""What Linux shows where NVIDIA's kernel module is loaded; containers show the second at least."""


@dataclass(frozen=True)
class Driver:
    cuda: tuple[int, int]
    """the newest CUDA release that it runs"""
    release: str | None
    """its own number, such as 535.161.08; None where the system does not tell"""

    def __str__(self) -> str:
        return (
            f"the NVIDIA driver{f' {self.release}' * (self.release is not None)} goes up to CUDA {_dotted(self.cuda)}"
        )


def kernel_module_loaded() -> bool:
    """Whether this is a Linux with an NVIDIA card's kernel module: costs nothing, loads nothing."""
    return sys.platform.startswith("linux") and any(path.exists() for path in KERNEL_MODULE)


def find_driver() -> Driver | None:
    """The driver's user library, as CUDA itself would load it; None where there is none."""
    library = _library()
    version = ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return Driver((version.value // 1000, version.value % 1000 // 10), _release())


def num_cards() -> int:
    """Cards that a CUDA program of this process would see: CUDA_VISIBLE_DEVICES counts. Starts the driver."""
    library, count = _library(), ctypes.c_int()
    if library is None or library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def mend(driver: Driver, built_for: str | None) -> str:
    """What helps where the driver is there and torch, built for this CUDA (None: for the CPU), sees no card."""
    if built_for is None:
        return f"install a torch built for CUDA {_dotted(driver.cuda)} or earlier"
    if driver.cuda[0] < int(built_for.split(".")[0]):
        return f"update the driver to one for CUDA {built_for}, or install a torch for {driver.cuda[0]}.x"
    return "check that nvidia-smi lists a GPU and that CUDA_VISIBLE_DEVICES does not hide it"


def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def _release() -> str | None:
    try:
        found = re.search(r"\b(\d{3,}\.\d+(\.\d+)?)\b", KERNEL_MODULE[0].read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
