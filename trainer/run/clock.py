"""Where the time of a run goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds of each stage of a run, in order; `import_seconds` went by before it was made."""

    def __init__(self, import_seconds: float = 0.0) -> None:
        self.seconds = {"imports": import_seconds}
        self.start_up: dict[str, float] | None = None
        """those before the first step of this process, once it begins"""
        self._started = time.perf_counter() - import_seconds

    @property
    def total(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._started

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @contextmanager
    def until_first_step(self, name: str) -> Iterator[None]:
        """What is done before every step; the first time it is the last stage of the start."""
        began = time.perf_counter()
        yield
        if self.start_up is None:
            stages = {**self.seconds, name: time.perf_counter() - began}
            self.start_up = {**stages, "other": self.total - sum(stages.values())}

    def sentence(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
