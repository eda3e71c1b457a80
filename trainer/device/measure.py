"""What memory a run holds: the device's allocator on CUDA, the C allocator on a CPU, and the process beside it."""

from __future__ import annotations

import gc
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensor

from trainer.device.malloc import MallInfo2, mallinfo2
from trainer.device.stages import Stage
from trainer.units import GIB

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


@dataclass(frozen=True)
class MemoryReading:
    """One reading, in bytes; `peak` is since the last reading."""

    allocated: int
    peak: int
    rss_peak: int
    """highest resident set of the process so far"""


class Memory:
    """Reads allocated and peak bytes.

    CUDA counts exactly. A CPU has no such counter but malloc's own, which walks all free blocks under the allocator's
    lock: milliseconds, in which nobody allocates. So a thread reads it for a share of the time only (`Pace`): closely
    where something comes that has not been before, at random moments otherwise. What was held before the run is taken
    off, but for `libraries_held`: bytes of libraries' workspace that the plan's trial of them has left.
    """

    def __init__(self, device: torch.device, libraries_held: int = 0):
        self.device = device
        self._mallinfo2 = mallinfo2() if device.type == "cpu" else None
        self._peak = 0
        gc.collect()  # what an earlier run in this process left would go in the middle of this one
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # what was measured or run before is no part of this run
        self.baseline = _held(self._mallinfo2) - libraries_held if device.type == "cpu" else 0
        """bytes held on a CPU before the run, by libraries and Python itself"""
        self._tensors_before = tensor_bytes() if device.type == "cpu" else 0
        self.stages: dict[str, Stage] = {}
        """each stage of the run when it was first reached"""
        self.recording: Callable[[str, int, int], None] | None = None
        """told of every stage, also when it comes again: its name, allocated bytes, highest since the one before"""
        self._stage_peak = 0
        self._largest: dict[Hashable, int] = {}
        self._pace = Pace()
        self._stopped = False
        self._wake = threading.Event()
        self._reading = threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Memory:
        if self.device.type == "cpu":
            self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def expect(self, kind: Hashable, size: int = 1) -> None:
        """Says what comes next. Where it is larger than all of its kind before it, what happens until the next call
        can be higher than all that was seen, and is watched closely."""
        new = size > self._largest.get(kind, 0)
        if new:
            self._largest[kind] = size
        self._pace.turn(new, time.perf_counter())
        if new:
            self._wake.set()

    def sample(self) -> None:
        """Notes the present height on a CPU; CUDA does so by itself."""
        if self.device.type == "cpu":
            self._note(self._held())

    def _note(self, height: int) -> None:
        self._peak, self._stage_peak = max(self._peak, height), max(self._stage_peak, height)

    def at(self, stage: str) -> None:
        """Notes the height, and under the stage's name if it is the first time. Asks nothing of the device."""
        if stage in self.stages and self.recording is None:
            self._sample_if_due()
            return
        self.sample()
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

    def libraries(self) -> int:
        """Bytes held now on a CPU by no tensor: what libraries took for the run, such as buffers for the blocks of a
        matrix product (MKL keeps 5 to 20 MiB a thread) and compiled primitives (oneDNN). They grow with the largest
        product and stay."""
        if self.device.type != "cpu":
            return 0
        gc.collect()
        return max(0, self._held() - max(0, tensor_bytes() - self._tensors_before))

    def _held(self) -> int:
        return max(0, _held(self._mallinfo2) - self.baseline)  # libraries may give back what they held

    def _watch(self) -> None:
        while not self._stopped:
            self._wake.wait(self._pace.wait(time.perf_counter()))
            self._wake.clear()
            self._sample_if_due()

    def _sample_if_due(self) -> None:
        if self._thread is None or not self._reading.acquire(blocking=False):
            return  # nobody watches, or the other thread takes one just now
        if self._pace.wait(time.perf_counter()) <= 0:
            began = time.thread_time()
            self.sample()
            self._pace.read(time.thread_time() - began, time.perf_counter())
        self._reading.release()


class Pace:
    """When the next reading is due, so that all of them take a small share of a run's time."""

    INTERVAL_SECONDS = 0.005
    """between two readings at least"""
    CLOSE_SHARE, SHARE = 0.02, 0.004
    """of the time, that readings take where something is new, and otherwise"""
    BURST_SECONDS = 0.02
    """readings' time that something new may take at once: it may be over before a share of its time is a reading"""

    def __init__(self):
        self._close = True
        self._credit, self._credited = self.BURST_SECONDS, 0.0
        self._due, self._cost = 0.0, 0.0
        self._random = random.Random(0)  # moments that keep no step with the run's own rhythm

    def turn(self, close: bool, now: float) -> None:
        """What comes next is new, or not."""
        self._accrue(now)
        if close:
            self._credit, self._due = self.BURST_SECONDS, now
        elif self._close:
            self._due = now + self._cost / self.SHARE * self._random.random()
        self._close = close

    def wait(self, now: float) -> float:
        """Seconds until the next reading is due."""
        self._accrue(now)
        lacking = max(0.0, self._cost - self._credit) / self.CLOSE_SHARE if self._close else 0.0
        return max(self._due - now, lacking)

    def read(self, cost: float, now: float) -> None:
        """A reading took `cost` seconds."""
        self._cost = cost
        self._credit -= cost
        pause = 0.0 if self._close else cost / self.SHARE * self._random.uniform(0.5, 1.5)
        self._due = now + max(self.INTERVAL_SECONDS, pause)

    def _accrue(self, now: float) -> None:
        earned = (now - self._credited) * self.CLOSE_SHARE if self._close else 0.0
        self._credit, self._credited = min(self.BURST_SECONDS, self._credit + earned), now


def _held(mallinfo2: Callable[[], MallInfo2] | None) -> int:
    """Bytes malloc holds; where it does not count, the resident set."""
    if mallinfo2 is None:
        import psutil

        return psutil.Process().memory_info().rss
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def tensor_bytes() -> int:
    """Bytes of the storages of all living tensors on the CPU. Walks every object that Python knows: tenths of a
    second."""
    found = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and type(item) is not FakeTensor and item.device.type == "cpu":
            storage = item.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def rss_peak() -> int:
    """Highest resident set of this process so far, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def pinned_peak() -> int:
    """Most bytes of host memory that a GPU's run held for copies; 0 without a GPU, where there is one pool."""
    return torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) if torch.cuda.is_initialized() else 0


def free_bytes(device_type: str) -> int:
    """What is free on the device now."""
    if device_type == "cuda":
        return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 24 * GIB
    return psutil.virtual_memory().available
