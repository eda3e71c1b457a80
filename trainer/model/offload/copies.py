"""Copies beside the computation: one queue in order, and the events that say when a buffer may be used again.

The computation is told to wait for a copy (`wait`), a copy is told to wait for the computation (`after=computed()`).
On CUDA both waits are between streams and cost the host nothing. On a CPU the computation is done when Python goes
on, and a thread copies.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class Copies(ABC):
    """One queue of copies, done in the order in which they are asked for."""

    def __init__(self):
        self.copy_seconds = 0.0
        """time that finished copies took"""
        self.waited_seconds = 0.0
        """time that the computation stood still for them"""

    @abstractmethod
    def computed(self) -> Any:
        """An event: everything that the computation has been asked for so far."""

    @abstractmethod
    def enqueue(self, work: Callable[[], None], after: Any = None) -> Any:
        """Asks for a copy, which begins when the event `after` has happened; returns its handle for `wait`."""

    @abstractmethod
    def wait(self, handle: Any) -> None:
        """The computation goes on when the copy is done. Raises what the copy raised."""

    def settle(self) -> None:
        """Brings the two times up to date."""

    def close(self) -> None:
        """Ends the threads; what is queued is dropped."""

    def hidden_share(self) -> float | None:
        """Share of the copies' time that the computation did not wait for; None before the first copy."""
        self.settle()
        if self.copy_seconds == 0.0:
            return None
        return max(0.0, 1.0 - self.waited_seconds / self.copy_seconds)


class ThreadCopies(Copies):
    """Copies by a thread, for computations on the CPU."""

    def __init__(self):
        super().__init__()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload")

    def computed(self):
        return None  # the CPU computes before Python goes on

    def enqueue(self, work, after=None):
        return self._thread.submit(self._timed, work)

    def wait(self, handle):
        began = time.perf_counter()
        handle.result()
        self.waited_seconds += time.perf_counter() - began

    def close(self):
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _timed(self, work: Callable[[], None]) -> None:
        began = time.perf_counter()
        work()
        self.copy_seconds += time.perf_counter() - began


class CudaCopies(Copies):
    """Copies on a stream of their own. `reads`: the work also reads files, which a thread does for it."""

    def __init__(self, device: torch.device, reads: bool):
        super().__init__()
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload") if reads else None
        self._copied: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._waited: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._read_seconds = 0.0

    def computed(self):
        return self._mark(torch.cuda.current_stream(self.device))

    def enqueue(self, work, after=None):
        if self._thread is not None:
            return self._thread.submit(self._go, work, after)
        done: Future = Future()
        done.set_result(self._go(work, after))
        return done

    def wait(self, handle):
        began = time.perf_counter()
        done = handle.result()  # a thread may still be reading
        if self._thread is not None:
            self.waited_seconds += time.perf_counter() - began
        stream = torch.cuda.current_stream(self.device)
        before = self._mark(stream)
        stream.wait_event(done)
        self._waited.append((before, self._mark(stream)))
        self.settle()  # else a long run's events pile up

    def settle(self):
        self.copy_seconds += self._sum(self._copied) + self._read_seconds
        self._read_seconds = 0.0
        self.waited_seconds += self._sum(self._waited)

    def close(self):
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self.stream.synchronize()

    def _go(self, work: Callable[[], None], after: torch.cuda.Event | None) -> torch.cuda.Event:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            began, before = time.perf_counter(), self._mark(self.stream)
            work()
            done = self._mark(self.stream)
            if self._thread is not None:
                self._read_seconds += time.perf_counter() - began
            else:
                self._copied.append((before, done))
        return done

    @staticmethod
    def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    @staticmethod
    def _sum(pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
        """Seconds between the events of pairs that have happened, which are taken out."""
        seconds = 0.0
        while pairs and pairs[0][1].query():
            before, after = pairs.popleft()
            seconds += before.elapsed_time(after) / 1e3
        return seconds


def copies_for(device: torch.device, reads: bool = False) -> Copies:
    """The queue that a device has."""
    return CudaCopies(device, reads) if device.type == "cuda" else ThreadCopies()
