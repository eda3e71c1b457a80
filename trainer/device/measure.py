"""What memory a run holds: the device's allocator on CUDA, the C allocator on a CPU, and the process beside it."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainer.device.stages import Stage

SIGNS = ("out of memory", "not enough memory", "can't allocate memory", "Unable to allocate", "_STATUS_ALLOC_FAILED")
"""Words of the allocators' errors: CUDA's and bitsandbytes', torch's on a CPU, numpy's, cuBLAS' and cuDNN's."""
NO_HANDLE = ("_STATUS_NOT_INITIALIZED", "Create")
"""What cuBLAS and cuDNN say where there is no memory for their handle; elsewhere the same status is a fault of ours."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator raised it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return any(sign in text for sign in SIGNS) or all(word in text for word in NO_HANDLE)


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


def malloc_statistics() -> dict[str, int]:
    """glibc's mallinfo2 by field; empty where the C library has none."""
    function = _mallinfo2()
    if function is None:
        return {}
    info = function()
    return {name: getattr(info, name) for name, _ in _MallInfo2._fields_ if getattr(info, name)}


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
    after every forward pass, where a step's activations are all alive, and what libraries held before the run, which
    no plan predicts, is taken off.
    """

    INTERVAL_SECONDS = 0.005

    def __init__(self, device: torch.device):
        self.device = device
        self._mallinfo2 = _mallinfo2() if device.type == "cpu" else None
        self._peak = 0
        gc.collect()  # what an earlier run in this process left would go in the middle of this one
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # what was measured or run before is no part of this run
        self.baseline = _held(self._mallinfo2) if device.type == "cpu" else 0
        """bytes held on a CPU before the run, by libraries and Python itself"""
        self.stages: dict[str, Stage] = {}
        """each stage of the run when it was first reached"""
        self.recording: Callable[[str, int, int], None] | None = None
        """told of every stage, also when it comes again: its name, allocated bytes, highest since the one before"""
        self._stage_peak = 0
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
            self._note(self._held())

    def _note(self, height: int) -> None:
        self._peak, self._stage_peak = max(self._peak, height), max(self._stage_peak, height)

    def at(self, stage: str) -> None:
        """Notes the height, and under the stage's name if it is the first time. Asks nothing of the device."""
        self.sample()
        if stage in self.stages and self.recording is None:
            return
        allocated, gap = self._now()
        peak, self._stage_peak = max(self._stage_peak, allocated), allocated
        self.stages.setdefault(stage, Stage(allocated, peak, allocated + gap))
        if self.recording is not None:
            self.recording(stage, allocated, peak)

    def _now(self) -> tuple[int, int]:
        """Allocated bytes, and those that the allocator holds beside them."""
        if self.device.type == "cuda":
            self._note(torch.cuda.max_memory_allocated(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)
            allocated = torch.cuda.memory_allocated(self.device)
            return allocated, torch.cuda.memory_reserved(self.device) - allocated
        free = 0 if self._mallinfo2 is None else self._mallinfo2().fordblks
        return self._held(), free

    def read(self) -> MemoryReading:
        """Allocated now and at most since the last reading."""
        if self.device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self.device)
            self._note(torch.cuda.max_memory_allocated(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)
            peak, self._peak = max(self._peak, allocated), 0
        else:
            allocated = self._held()
            peak, self._peak = max(self._peak, allocated), allocated
        return MemoryReading(allocated, peak, rss_peak())

    def _held(self) -> int:
        return max(0, _held(self._mallinfo2) - self.baseline)  # libraries may give back what they held

    def _watch(self) -> None:
        while not self._stop.wait(self.INTERVAL_SECONDS):
            self.sample()


def _held(mallinfo2: Callable[[], _MallInfo2] | None) -> int:
    """Bytes malloc holds; where it does not count, the resident set."""
    if mallinfo2 is None:
        import psutil

        return psutil.Process().memory_info().rss
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def rss_peak() -> int:
    """Highest resident set of this process so far, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
