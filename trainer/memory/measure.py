"""What memory a run holds: the device's allocator on CUDA, the C allocator on a CPU, and the process beside it."""

from __future__ import annotations

import ctypes
import resource
import sys
import threading
from dataclasses import dataclass

import torch

GIB = 1024**3


class _MallInfo2(ctypes.Structure):
    """glibc's struct mallinfo2 (malloc.h)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def _mallinfo2():
    """glibc's mallinfo2, or None where the C library has none."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    function.restype = _MallInfo2
    return function


@dataclass(frozen=True)
class MemoryReading:
    """One reading, in bytes; `peak` is since the last reading."""

    allocated: int
    peak: int
    rss_peak: int
    """highest resident set of the process so far"""


class Memory:
    """Reads allocated and peak bytes.

    CUDA counts exactly. A CPU has no such counter: malloc's own count is read by a thread every few milliseconds and
    after every forward pass, where a step's activations are all alive.
    """

    INTERVAL_SECONDS = 0.005

    def __init__(self, device: torch.device):
        self.device = device
        self._mallinfo2 = _mallinfo2() if device.type == "cpu" else None
        self._peak = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Memory:
        if self.device.type == "cpu":
            self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def sample(self) -> None:
        """Notes the present height on a CPU; CUDA does so by itself."""
        if self.device.type == "cpu":
            self._peak = max(self._peak, self._held())

    def read(self) -> MemoryReading:
        """Allocated now and at most since the last reading."""
        if self.device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            allocated = self._held()
            peak, self._peak = max(self._peak, allocated), allocated
        return MemoryReading(allocated, peak, rss_peak())

    def _held(self) -> int:
        if self._mallinfo2 is None:
            import psutil

            return psutil.Process().memory_info().rss
        info = self._mallinfo2()
        return info.uordblks + info.hblkhd

    def _watch(self) -> None:
        while not self._stop.wait(self.INTERVAL_SECONDS):
            self.sample()


def rss_peak() -> int:
    """Highest resident set of this process so far, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
